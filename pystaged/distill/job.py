"""A distillation, from the target's file to the draft's; it resumes where it was stopped."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import pystaged
from pystaged import _core
from pystaged.distill import plan as plans
from pystaged.distill.answers import Answers, Asker, Writer
from pystaged.distill.draft import TAPS, BlockDraft, Target, commonest, layers_of, shape_for
from pystaged.distill.export import export
from pystaged.distill.plan import Plan
from pystaged.distill.prompts import read_prompts
from pystaged.distill.train import Report, Trainer, best_device, steps_of, train
from pystaged.loading.distilled import identity
from pystaged.loading.progress import Progress
from pystaged.platform.files import check_room

_EVALUATED, _TOKENS = 12, 128  # prompts, and tokens of a text
_SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "at temperature 1": {"temperature": 1.0, "top_k": 50}}
_EVERY = 300.0  # seconds between two lines, and two checkpoints


class Job:
    """A distillation: plan, write and learn, then export, in this order.

    Args:
        path: the target's file. folder: an existing folder for plan, answers and checkpoint.
        prompts: a file of prompts; None for generated questions (see Asker).
        device: where torch trains, "auto" for a GPU if it has one.
        threads: 0 for one per fast core.
        report: called with lines for the user.

    Raises:
        OSError: a file cannot be read. ValueError: there is no such device, or prompts or target cannot be used.
    """

    def __init__(
        self, path: Path, folder: Path, prompts: Path | None, device: str, threads: int, report: Callable[[str], None]
    ) -> None:
        torch.set_num_threads(threads or _core.choose_cores().few)
        self._path, self._folder, self._prompts = path, folder, prompts
        self._threads, self._report = threads, report
        self._device = best_device() if device == "auto" else device
        try:
            torch.empty(1, device=self._device)
        except (RuntimeError, AssertionError):  # torch's errors of a device that it lacks
            raise ValueError(f"torch has no device {device!r} here; leave out --device") from None
        given = read_prompts(prompts) if prompts else []
        self._target = Target(path)
        self._tokenizer = _core.Tokenizer(os.fsencode(path))
        self._model = _core.Model(os.fsencode(path), os.environ.get("PYSTAGED_KERNEL", ""), threads)
        self._writer = Writer(self._model, self._tokenizer.is_end, layers_of(self._model, TAPS))
        self._asker = Asker(self._writer, self._tokenizer, given, report)
        self._answers = Answers(folder)
        self._files = 0

    def close(self) -> None:
        """Free the target's contexts."""
        self._writer.close()

    def plan(self, hours: float, given: Mapping[str, int | None]) -> None:
        """Make the plan, or load the one that the folder was begun with, and report how long it takes.

        Args:
            hours: for writing and training together, used for a new plan.
            given: fields of Plan; None for those that the user did not set.

        Raises:
            ValueError: the folder was begun with other fields.
            OSError: the disk is too full.
        """
        operations, kind = plans.training_speed(self._device)
        speed = plans.Speed(self._writer.speed(self._tokenizer.encode("a")), operations, kind)
        chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        prompts = identity(self._prompts) if self._prompts else ""
        new = replace(Plan(identity(self._path), prompts, kind), **chosen)
        found = Plan.load(self._folder)
        if found:
            other = [key for key in ("target", "prompts", *chosen) if getattr(found, key) != getattr(new, key)]
            if other:
                raise ValueError(
                    f"{self._folder} was begun with other {' and '.join(other)}; "
                    "begin in another folder with --folder, or remove this one"
                )
            self._report(f"resuming from {self._folder}")
        plan = found or new
        self._shape = shape_for(self._model, self._tokenizer, self._target, plan.rows, block=plan.block)
        if not found:
            free = shutil.disk_usage(self._folder).free
            tokens, epochs = plans.amounts(speed, self._shape, 3600 * hours, free)
            plan = replace(plan, tokens=plan.tokens or tokens, epochs=plan.epochs or epochs)
            plan.save(self._folder)
        self._plan = plan
        room = plans.answer_bytes(plan.tokens, self._shape) + 2 * plans.checkpoint_bytes(self._shape)
        writing, learning = speed.seconds(plan.tokens, plan.epochs, self._shape)
        self._report(
            f"a draft of {self._shape.num_weights / 1e6:.1f} million weights: "
            f"to write {plan.tokens:,} tokens of answers takes about {_time(writing)}, "
            f"to train on them for {plan.epochs} epochs about {_time(learning)} on {self._device}; "
            f"about {room / 1e9:.1f} GB in {self._folder}"
        )
        there = sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))
        check_room(self._folder, max(0, room - there))

    def write(self, progress: Progress) -> None:
        """Write the answers that are missing."""
        told, begun, written, before = time.monotonic(), time.monotonic(), 0, 0
        goal = self._plan.tokens
        while not self._files or before < goal or self._files < 2:
            if not self._answers.path(self._files).exists():
                new = 0

                def add(tokens: int, so_far: int = before) -> None:
                    nonlocal new
                    new += tokens
                    progress("writing answers", min(goal, so_far + new), goal)

                self._answers.write(self._files, self._writer, self._asker, add)
                written += self._answers.num_tokens(self._files)
            before += self._answers.num_tokens(self._files)
            self._files += 1
            progress("writing answers", min(goal, before), goal)
            if time.monotonic() - told > _EVERY and written:
                told = time.monotonic()
                left = (goal - before) * (told - begun) / written
                self._report(f"{before:,} of {goal:,} tokens of answers, {_time(left)} left to write")

    def learn(self, progress: Progress) -> None:
        """Train, from the last checkpoint on."""
        numbers = range(1, self._files)
        tokens = commonest(self._answers.likely(numbers, self._shape.vocab_size), self._shape.rows)
        draft = BlockDraft(self._shape, tokens, self._target, torch.Generator().manual_seed(self._plan.seed))
        draft.to(self._device)
        texts, held_out = self._answers.texts(numbers), self._answers.texts([0])
        steps = steps_of(len(texts), self._plan.epochs)
        self._trainer = Trainer(
            *(draft, self._target, self._answers, texts, held_out, steps), seed=self._plan.seed, kind=self._plan.kind
        )
        checkpoint = self._folder / "checkpoint.safetensors"
        if checkpoint.exists():
            self._trainer.resume(checkpoint)
        else:
            self._trainer.begin()
        begun, first = time.monotonic(), self._trainer.step

        def reported(step: int, loss: float, figures: Report) -> None:
            said = "" if math.isnan(loss) else f", loss {loss:.3f}"
            each = (time.monotonic() - begun) / max(1, step - first)
            left = f", {_time(each * (steps - step))} left" if step > first else ""
            self._report(f"step {step:,} of {steps:,}{said}; held out: {_figures(figures)}{left}")

        with closing(train(self._trainer, checkpoint, reported, every=_EVERY)) as done:
            for step in done:
                progress("learning", step, steps)

    def export(self, path: Path, quantization: str) -> None:
        """Write the draft, and report its gain on held-out prompts."""
        texts = self._answers.texts([0])
        self._report(f"held out: {_figures(self._trainer.report(len(texts)))}")
        export(self._trainer.draft, self._answers.scale, path, self._path, self._model, quantization)
        self._report(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
        held_out = [self._answers.text(which) for which in texts[:_EVALUATED]]
        prompts = [text.tokens[: text.prompt].tolist() for text in held_out]
        loading: dict[str, Any] = {"recycle": False, "num_threads": self._threads, "report": self._report}
        with pystaged.load(self._path, draft=path, **loading) as engine:
            for sampling, options in _SAMPLINGS.items():
                stats = [
                    engine.generate(prompt, max_tokens=_TOKENS, speculate=speculate, **options).stats
                    for prompt in prompts
                    for speculate in (False, True)
                ]
                plain, staged = stats[::2], stats[1::2]
                steps = sum(each.steps for each in staged)
                self._report(
                    f"{len(prompts)} answers to held-out prompts, {sampling}: "
                    f"{sum(each.new_tokens for each in staged) / max(1, steps):.2f} tokens per step, "
                    f"{sum(each.decode_seconds for each in staged):.1f} seconds instead of "
                    f"{sum(each.decode_seconds for each in plain):.1f}"
                )


def _figures(figures: Report) -> str:
    shares = " ".join(f"{100 * share:.0f}" for share in figures.same)
    return (
        f"the first place is right in {100 * figures.same[0]:.1f} %, places 1 to {len(figures.same)} in {shares} %, "
        f"the first place's distribution overlaps the target's by {100 * figures.common[0]:.1f} %"
    )


def _time(seconds: float) -> str:
    minutes = max(0, round(seconds / 60))
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
