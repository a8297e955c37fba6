"""GGUF files of Gemma 4's assistants, beside a sound target."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from support.assistants import Assistant, write_assistant
from support.families import CASES
from support.gguf_parts import Gguf as Parts
from support.random_models import write

from fuzz.gguf import CHANGES
from fuzz.target import Case, Target
from pystaged._core import Model, Sampling, Session, Work, run


class Assistants(Target):
    """What the loader makes of such a file, and passes over its rows, which read the target's keys and values."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        model = replace(CASES["gemma4"], context=1024)
        self._target = Model(write(folder / "target.gguf", model), "", 1)
        self._target.tap([self._target.num_layers], last_row=True)
        self._path = folder / "damaged.gguf"
        drafts = [Assistant(model), Assistant(model, quantization="Q8_0", centroids=True)]
        self._bases = {each.quantization: write_assistant(self._path, each).read_bytes() for each in drafts}
        self._parts = {name: Parts(data) for name, data in self._bases.items()}

    def sound(self) -> Iterator[Case]:
        for name, data in self._bases.items():
            yield Case(name, len(data), partial(self._use, data))

    def case(self, r: random.Random) -> Case:
        name = r.choice(list(self._bases))
        data, step = r.choice(CHANGES)(r, self._parts[name])
        return Case(f"{name}; {step}", len(data), partial(self._use, data))

    def _use(self, data: bytes) -> None:
        self._path.write_bytes(data)
        draft = Model(self._path, "", 1, lender=self._target)
        source = Session(self._target, 130)
        source.prefill(range(120))  # beyond the window
        session, last = Session(draft, target=source), draft.vocab_size - 1
        hidden, greedy = source.hidden, Sampling()
        run([Work.propose(session, [0, last], [-1, -1], 2, 3, greedy, hidden=hidden + hidden)])
        run([Work.propose(session, [1, 2], [0, 1], 2, 3, greedy, hidden=session.hidden_of([0, 1]))])
        tokens, _ = session.candidates([0, 3], 5, greedy)
        if not (tokens.min() >= -1 and tokens.max() <= last):
            raise AssertionError(f"tokens {tokens} with a vocabulary of {last + 1}")
