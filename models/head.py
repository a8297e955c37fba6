"""Train a draft head for a model that chats, on the answers that models.answers wrote.

    python -m models.head smollm2 answers smollm2.head.gguf --minutes 60

The head is a recurrent network (cpp/draft_head.h; ReDrafter, arXiv 2403.09919): from the target's hidden state before
a token it guesses what follows, again and again. It learns the target's own distribution some tokens ahead, the nearer
the more. Of the target's weights it borrows the embedding; its output begins as rows of the target's head. It goes on
where a run that was stopped left OUT.pt. Targets have RMS norms.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from answers import HELD_OUT
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from torch import Tensor, nn

from pystaged._core import Model, Tokenizer
from pystaged.files import whole_file
from pystaged.loading import names

REPORT = 100  # steps between two evaluations
FADE = 0.8  # weight of each further token, to that of the one before
EPSILON = 1e-5


@dataclass(frozen=True)
class Answers:
    """One file: tokens, int64[n]; states, bfloat16[n, taps * width], that they came of; texts, int64[n], which is
    whose; layers, behind which the states were taken."""

    tokens: Tensor
    states: Tensor
    texts: Tensor
    layers: list[int]

    @classmethod
    def load(cls, path: Path) -> Answers:
        with np.load(path) as file:
            texts = np.repeat(np.arange(len(file["lengths"])), file["lengths"])
            states = torch.from_numpy(file["states"]).flatten(1).to(torch.bfloat16)
            tokens = torch.from_numpy(file["tokens"]).long()
            return cls(tokens, states, torch.from_numpy(texts), file["layers"].tolist())

    def window(self, first: int, length: int) -> Answers:
        part = slice(first, first + length)
        return replace(self, tokens=self.tokens[part], states=self.states[part], texts=self.texts[part])


@dataclass(frozen=True)
class Target:
    """What a head needs of its target: embedding [vocabulary, width], the norm before its head, and the head."""

    embedding: Tensor
    norm: Tensor
    head: Tensor
    name: str
    vocabulary: str
    layers: int

    @classmethod
    def load(cls, path: Path) -> Target:
        tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}

        def read(name: str) -> Tensor:
            found = quants.dequantize(tensors[name].data, tensors[name].tensor_type)
            return torch.from_numpy(np.array(found, np.float32))

        embedding, model = read("token_embd.weight"), Model(str(path))
        head = read("output.weight") if "output.weight" in tensors else embedding
        vocabulary = Tokenizer(path).fingerprint
        return cls(embedding, read("output_norm.weight"), head, model.name or path.stem, vocabulary, model.num_layers)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def product(x: Tensor, weight: Tensor) -> Tensor:
    """In bfloat16, several times as fast as float32 where a CPU has instructions for it."""
    return F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16)).float()


class DraftHead(nn.Module):
    """The head, as cpp/draft_head.h runs it.

    Args:
        target: lends its embedding, and its head's rows to begin with.
        tokens: what the head can propose, int64[n], rising.
        taps, ffn_width, blocks: its shape.
    """

    def __init__(self, target: Target, tokens: Tensor, taps: int, ffn_width: int, blocks: int) -> None:
        super().__init__()
        width = target.embedding.shape[1]
        self.embedding, self.width = target.embedding, width

        def matrix(rows: int, cols: int, scale: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols) * scale / math.sqrt(cols))

        self.state_norm, self.state = nn.Parameter(torch.ones(taps * width)), matrix(width, taps * width, 0.1)
        self.step_norm, self.step = nn.Parameter(torch.ones(2 * width)), matrix(width, 2 * width, 0.25)
        self.blocks = nn.ModuleList(
            nn.ParameterDict(
                {
                    "ffn_norm": nn.Parameter(torch.ones(width)),
                    "ffn_gate": matrix(ffn_width, width, 1.0),
                    "ffn_up": matrix(ffn_width, width, 1.0),
                    "ffn_down": matrix(width, ffn_width, 0.1),
                }
            )
            for _ in range(blocks)
        )
        self.output_norm, self.output = nn.Parameter(target.norm.clone()), nn.Parameter(target.head[tokens].clone())
        with torch.no_grad():  # it begins with what the target itself has said
            self.state[:, -width:] += torch.eye(width)

    def begin(self, states: Tensor) -> Tensor:
        """The state before the root, [n, width], from the target's, [n, taps * width]."""
        taps = states.float().unflatten(-1, (-1, self.width))
        return product(norm(taps, self.state_norm.view(-1, self.width)).flatten(-2), self.state)

    def forward(self, state: Tensor, tokens: Tensor) -> Tensor:
        """The state behind a token, [n, width], given the one before it."""
        before, token = self.step_norm.split(self.width)
        state = state + product(torch.cat([norm(state, before), norm(self.embedding[tokens], token)], -1), self.step)
        for block in self.blocks:
            x = norm(state, block["ffn_norm"])
            hidden = F.silu(product(x, block["ffn_gate"])) * product(x, block["ffn_up"])
            state = state + product(hidden, block["ffn_down"])
        return state

    def logits(self, state: Tensor) -> Tensor:
        """What may come next, [n, tokens]."""
        return product(norm(state, self.output_norm), self.output)


@dataclass
class Trainer:
    """A head, what it learns from and how far it is."""

    target: Target
    tokens: Tensor
    head: DraftHead
    answers: list[Answers]
    depth: int
    window: int
    rate: float
    step: int = 0
    seconds: float = 0.0
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.head.parameters(), self.rate, (0.9, 0.98), weight_decay=0.01)
        self._last_head = self.target.head[self.tokens].to(torch.bfloat16)

    def train(self, seconds: float, checkpoint: Path) -> None:
        """Train for so long in all, with a rate that falls to nearly nothing."""
        random = np.random.default_rng(self.step)
        for window in windows(self.answers[HELD_OUT:], self.window, random):
            if self.step % REPORT == 0 or self.seconds >= seconds:
                self.save(checkpoint)
                print(f"{self.step} steps, {self.seconds / 60:.1f} minutes: {self.evaluate()}", flush=True)
            if self.seconds >= seconds:
                return
            begin = time.monotonic()
            rising, falling = min(1.0, (self.step + 1) / 100), 0.5 + 0.5 * math.cos(math.pi * self.seconds / seconds)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * rising * max(0.03, falling)
            self.optimizer.zero_grad()
            loss = torch.zeros(())
            for distance, (logits, wanted, same) in enumerate(self.guesses(window)):
                surprise = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1)
                loss = loss + FADE**distance * (surprise * same).sum() / same.sum().clamp(min=1)
            loss.backward()
            nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            self.seconds += time.monotonic() - begin

    def guesses(self, window: Answers) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """At each distance, the head's logits, the target's of the head's tokens, and whether both are of one text."""
        said = product(self.last(window), self._last_head).detach()
        n, state = len(window.tokens), self.head.begin(window.states)
        for distance in range(1, self.depth + 1):
            state = self.head(state[: n - distance], window.tokens[distance - 1 : n - 1])
            yield self.head.logits(state), said[distance:], window.texts[: n - distance] == window.texts[distance:]

    def last(self, window: Answers) -> Tensor:
        """What the target's own head reads, [n, width]."""
        return norm(window.states[:, -self.head.width :].float(), self.target.norm)

    @torch.no_grad()
    def evaluate(self) -> str:
        """On files held out: at each distance how often the head's first choice is the target's, how often one of its
        three best is, and how much of the two distributions is common; of all tokens, those it lacks included."""
        sums = np.zeros((self.depth, 4))
        for answers in self.answers[:HELD_OUT]:
            for first in range(0, max(1, len(answers.tokens) - self.window), 4 * self.window):
                window = answers.window(first, self.window)
                wanted = product(self.last(window), self.target.head).softmax(-1)
                for distance, (logits, _, same) in enumerate(self.guesses(window), 1):
                    target = wanted[distance:]
                    hits = self.tokens[logits.topk(3, -1).indices] == target.argmax(-1, keepdim=True)
                    common = torch.minimum(logits.softmax(-1), target[:, self.tokens]).sum(-1)
                    found = (hits[:, 0], hits.any(-1), common, torch.ones(len(same)))
                    sums[distance - 1] += [float(x[same].sum()) for x in found]
        shares = sums[:, :3] / np.maximum(sums[:, 3:], 1)
        return "; ".join(f"{first:.3f} {three:.3f} {common:.3f}" for first, three, common in shares)

    def save(self, path: Path) -> None:
        state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(), "tokens": self.tokens}
        with whole_file(path) as part:
            torch.save(state | {"step": self.step, "seconds": self.seconds}, part)

    def resume(self, found: dict[str, Any]) -> None:
        self.head.load_state_dict(found["head"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.step, self.seconds = found["step"], found["seconds"]


def windows(answers: list[Answers], length: int, random: np.random.Generator) -> Iterator[Answers]:
    """Stretches of all files in turn, for ever, begun elsewhere each time."""
    while True:
        for file in random.permutation(len(answers)):
            found = answers[file]
            first, end = int(random.integers(length)), len(found.tokens) - length
            yield from (found.window(i, length) for i in range(min(first, max(end, 0)), max(end, 1), length))


def commonest(answers: list[Answers], size: int, vocab_size: int) -> Tensor:
    """The commonest tokens of answers, rising; the lower ids of those that are as common."""
    counts = torch.stack([torch.bincount(each.tokens, minlength=vocab_size) for each in answers]).sum(0)
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def export(
    head: DraftHead, target: Target, tokens: Tensor, taps: list[int], path: Path, quantization: str, name: str = ""
) -> None:
    """Write a head as GGUF, for pystaged."""
    kind = GGMLQuantizationType[quantization]
    tensors = {name: value.detach().float() for name, value in head.named_parameters()}
    ffn_width = tensors["blocks.0.ffn_gate"].shape[0]
    with whole_file(path) as part, closing(GGUFWriter(part, "draft-head")) as writer:
        writer.add_name(f"draft head of {name or target.name}")
        writer.add_embedding_length(head.width)
        writer.add_feed_forward_length(ffn_width)
        writer.add_block_count(len(head.blocks))
        writer.add_layer_norm_rms_eps(EPSILON)
        writer.add_uint32("draft-head.target_layers", target.layers)
        writer.add_string("draft-head.vocabulary", target.vocabulary)
        writer.add_array("draft-head.taps", taps)
        writer.add_array("draft-head.tokens", tokens.tolist())
        for part_name, value in tensors.items():
            found = np.ascontiguousarray(value.numpy())
            full_name = f"{part_name.replace('blocks.', 'blk.')}.weight"
            if found.ndim == 2:
                writer.add_tensor(full_name, quants.quantize(found, kind), raw_dtype=kind)
            else:
                writer.add_tensor(full_name, found)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="as in pystaged --model")
    parser.add_argument("answers", type=Path, help="folder that models.answers wrote")
    parser.add_argument("out", type=Path, help="the head, a GGUF file")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=8192, help="that the head can propose")
    parser.add_argument("--ffn-width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--depth", type=int, default=4, help="tokens guessed one after the other in training")
    parser.add_argument("--window", type=int, default=1024, help="positions of a step")
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--type", default="Q4_0", help="of the matrices")
    parser.add_argument("--name", default="", help="of the target, if the file's own is not what it is known by")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    path = names.resolve(given.target)
    target = Target.load(path)
    answers = [Answers.load(file) for file in sorted(given.answers.glob("*.npz"))]
    if len(answers) <= HELD_OUT:
        parser.error(f"{given.answers} has {len(answers)} files; {HELD_OUT} are held out, so write more")
    checkpoint = given.out.with_suffix(".pt")
    found = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None
    tokens = found["tokens"] if found else commonest(answers, given.tokens, len(target.embedding))
    head = DraftHead(target, tokens, len(answers[0].layers), given.ffn_width, given.blocks)
    print(
        f"{sum(p.numel() for p in head.parameters())} weights, {sum(len(a.tokens) for a in answers)} tokens", flush=True
    )
    trainer = Trainer(target, tokens, head, answers, given.depth, given.window, given.rate)
    if found:
        trainer.resume(found)
    trainer.train(60 * given.minutes, checkpoint)
    export(head, target, tokens, answers[0].layers, given.out, given.type, given.name)


if __name__ == "__main__":
    main()
