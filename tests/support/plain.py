"""Texts that are decoded token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from pystaged._core import Model, Session
from support.steps import evaluate

Floats = npt.NDArray[np.float32]


class Plain:
    """The logits after some tokens, decoded one by one by our kernels in a new session of one thread; remembered."""

    def __init__(self, path: Path) -> None:
        self._model = Model(path, "", 1)
        self._known: dict[tuple[int, ...], Floats] = {}

    def __call__(self, tokens: list[int]) -> Floats:
        if tuple(tokens) not in self._known:
            session = Session(self._model)
            for i, token in enumerate(tokens):
                evaluate(session, [token], [-1])
                self._known[tuple(tokens[: i + 1])] = session.logits(0)
                session.commit([0])
        return self._known[tuple(tokens)]
