"""Trains a block draft on answers: loss, order of texts, checkpoints, held-out figures.

Each step is determined by its number, so a run that was stopped goes on to the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from pystaged.distill.answers import Answers, Text, read_errors, save
from pystaged.distill.draft import Batch, BlockDraft, Target, compared
from pystaged.distill.optimizer import optimizers

CE, TV = 0.1, 0.9  # weights of cross-entropy and total variation distance in the loss
CLIP = 1.0
WARM_UP = 10  # steps
LEAST_RATE = 0.03  # of the highest, at the end
TEXTS_OF_STEP, TEXTS_AT_ONCE = 8, 4
HELD_OUT = 32  # texts of a report
FAR = 4096  # largest gap in a text's positions, so that the draft learns contexts longer than a text


@dataclass(frozen=True)
class Report:
    """Held-out figures for each place of a block.

    same: share in which the likeliest tokens of draft and target are equal. common: mean overlap of their
    distributions, the sum of min(p, q).
    """

    same: list[float]
    common: list[float]


class Trainer:
    """Trains a draft, on the device where it is.

    Args:
        texts, held_out: to train on and to evaluate with, as from Answers.texts.
        steps: in all.
        kind: type of matrix products, "float32" or "bfloat16".
    """

    def __init__(
        self,
        draft: BlockDraft,
        target: Target,
        answers: Answers,
        texts: Sequence[tuple[int, int]],
        held_out: Sequence[tuple[int, int]],
        steps: int,
        *,
        seed: int = 0,
        kind: str = "float32",
    ) -> None:
        self.draft, self.step, self.steps = draft, 0, steps
        self._target, self._answers, self._texts, self._held_out = target, answers, texts, held_out
        self._seed, self._kind = seed, getattr(torch, kind)
        self._device = str(next(draft.parameters()).device)
        self._weights = torch.exp(-torch.arange(draft.shape.block) / 4)
        self._optimizers = optimizers(self.draft, self._kind)
        self._rates = [each.param_groups[0]["lr"] for each in self._optimizers]

    def begin(self) -> None:
        """Before the first step of a new draft: see BlockDraft.focus."""
        some = [self._answers.text(which) for which in self._texts[:TEXTS_AT_ONCE]]
        self.draft.focus(self._collate(some, np.random.default_rng(self._seed)).to(self._device))

    def advance(self) -> float:
        """One step; its loss."""
        random = np.random.default_rng([self._seed, 1, self.step])
        texts = sorted((self._answers.text(which) for which in self._batch()), key=lambda text: len(text.tokens))
        groups = [texts[i : i + TEXTS_AT_ONCE] for i in range(0, len(texts), TEXTS_AT_ONCE)]
        batches = [self._collate(group, random) for group in groups]
        total, loss = sum(float(batch.weights.sum()) for batch in batches), 0.0
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * self._factor()
        for batch in batches:
            surprise, common, _ = self._compared(batch)
            weights = batch.weights.to(self._device)
            part = ((CE * surprise + TV * (1 - common)) * weights).sum() / total
            part.backward()
            loss += float(part.detach())
        nn.utils.clip_grad_norm_(self.draft.parameters(), CLIP)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss

    def report(self, texts: int = HELD_OUT) -> Report:
        """Figures of that many held-out texts."""
        block = self.draft.shape.block
        sums = torch.zeros(3, block)
        random = np.random.default_rng(self._seed)
        chosen = list(self._held_out[:texts])
        with torch.no_grad():
            for i in range(0, len(chosen), TEXTS_AT_ONCE):
                batch = self._collate([self._answers.text(which) for which in chosen[i : i + TEXTS_AT_ONCE]], random)
                _, common, same = self._compared(batch)
                counted = (batch.weights > 0).float()
                found = [same.cpu() * counted, common.cpu() * counted, counted]
                sums += torch.stack([each.sum((0, 1)) for each in found])
        same, common = (sums[:2] / sums[2].clamp(min=1)).tolist()
        return Report(same, common)

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        tensors = {"step": torch.tensor(self.step)}
        for name, value in self.draft.named_parameters():
            tensors[f"draft.{name}"] = value.detach()
            for key, state in self._state(value).items():
                tensors[f"{key}.{name}"] = state
        save(tensors, path)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: it is damaged, or of another draft.
            OSError: it cannot be read.
        """
        with read_errors(path):
            found = load_file(path, device=self._device)
        parameters = dict(self.draft.named_parameters())
        keys = {name: value.shape for name, value in found.items() if name.startswith("draft.")}
        if keys != {f"draft.{name}": value.shape for name, value in parameters.items()} or (
            "step" not in found or found["step"].shape
        ):
            raise ValueError(f"{path} is a checkpoint of another draft; remove it to begin anew")
        with torch.no_grad():
            for name, value in parameters.items():
                value.copy_(found[f"draft.{name}"])
                for key in ("step", "exp_avg", "exp_avg_sq", "average"):
                    if f"{key}.{name}" in found:
                        state = found[f"{key}.{name}"]
                        self._state(value)[key] = state.cpu() if key == "step" else state
        self.step = int(found["step"])

    def _state(self, parameter: Any) -> dict[str, Any]:
        """What an optimizer keeps of a parameter."""
        owner = next(
            each for each in self._optimizers if any(parameter is own for own in each.param_groups[0]["params"])
        )
        found: dict[str, Any] = owner.state[parameter]
        return found

    def _factor(self) -> float:
        """Factor of the learning rate: linear warm-up, times a cosine."""
        falling = 0.5 + 0.5 * math.cos(math.pi * self.step / self.steps)
        return min(1.0, (self.step + 1) / WARM_UP) * max(LEAST_RATE, falling)

    def _batch(self) -> list[tuple[int, int]]:
        """The texts of the step: all in a new order in each epoch."""
        size = min(TEXTS_OF_STEP, len(self._texts))
        epoch, place = divmod(self.step, len(self._texts) // size)
        order = np.random.default_rng([self._seed, 0, epoch]).permutation(len(self._texts))
        return [self._texts[i] for i in order[place * size : (place + 1) * size]]

    def _collate(self, texts: Sequence[Text], random: np.random.Generator) -> Batch:
        """Blocks with a random anchor in each stretch of an answer as long as a block; the last may have none."""
        anchors, block = [], self.draft.shape.block
        for text in texts:
            firsts = np.arange(text.prompt - 1, len(text.tokens), block)
            chosen = firsts + random.integers(block, size=len(firsts))
            found = chosen[chosen < len(text.tokens)].tolist()
            anchors.append(found or [int(random.integers(text.prompt - 1, len(text.tokens)))])
        # Half of the texts have a gap in their positions, as if they were longer.
        lengths = np.array([len(text.tokens) for text in texts])
        far = random.integers(FAR, size=len(texts)) * random.integers(2, size=len(texts))
        return self._blocks(texts, anchors, random.integers(lengths), far)

    def _blocks(self, texts: Sequence[Text], anchors: list[list[int]], torn: Any, far: Any) -> Batch:
        block, most = self.draft.shape.block, max(map(len, anchors))
        length = max(len(text.tokens) for text in texts)
        parts: list[tuple[Any, ...]] = []
        for text, own in zip(texts, anchors, strict=True):
            size = len(text.tokens)
            tokens = nn.functional.pad(text.tokens, (0, length - size))
            anchor = torch.tensor([*own, *[own[0]] * (most - len(own))])
            rows = anchor.unsqueeze(1) + torch.arange(block)
            real = (rows < size) & (torch.arange(most) < len(own)).unsqueeze(1)
            rows = rows.clamp(max=size - 1)
            said = rows - (text.prompt - 1)
            features = text.features.float() * 8
            features = nn.functional.pad(features, (0, 0, 0, length - size))
            parts.append(
                (features, anchor, tokens[anchor], tokens[rows], text.likeliest[said], text.logprobs[said], real)
            )
        features, anchor, last, before, likeliest, logprobs, real = (
            torch.stack(each) for each in zip(*parts, strict=True)
        )
        positions = torch.arange(length).expand(len(texts), -1)
        positions = positions + torch.from_numpy(far).unsqueeze(1) * (positions >= torch.from_numpy(torn).unsqueeze(1))
        weights = real * self._weights
        return Batch(
            features, positions, anchor, self._target.embedding(last), before, likeliest, logprobs, weights.float()
        )

    def _compared(self, batch: Batch) -> tuple[Any, Any, Any]:
        batch = batch.to(self._device)
        with torch.autocast(torch.device(self._device).type, self._kind, enabled=self._kind != torch.float32):
            y = self.draft(batch)
            logits = self.draft.logits(y, batch.before)
        return compared(self.draft, logits, batch.likeliest, batch.logprobs)


def steps_of(texts: int, epochs: int) -> int:
    """Steps of a training."""
    return epochs * (texts // min(TEXTS_OF_STEP, texts))


def best_device() -> str:
    """A GPU if torch has one."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def train(
    trainer: Trainer,
    checkpoint: Path,
    reported: Callable[[int, float, Report], None],
    *,
    every: float = 300.0,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[int, None, None]:
    """Train to the end; yields the number of each step that is done. A checkpoint is written every so many seconds, at
    the end, and when the generator is closed.

    Args:
        reported: called with step, loss and figures at the beginning and with each checkpoint.
    """
    saved, loss = clock(), math.nan
    reported(trainer.step, loss, trainer.report())
    begun = trainer.step
    try:
        while trainer.step < trainer.steps:
            new = trainer.advance()
            loss = new if math.isnan(loss) else 0.95 * loss + 0.05 * new
            if clock() - saved >= every:
                trainer.save(checkpoint)
                begun = trainer.step
                reported(trainer.step, loss, trainer.report())
                saved = clock()
            yield trainer.step
    finally:
        if trainer.step > begun:
            trainer.save(checkpoint)
