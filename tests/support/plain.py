"""Texts that are decoded token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pystaged
from pystaged._core import Model, Sampling, Session
from support.steps import evaluate, prefill, verify

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


def plain_tokens(
    model: Model, prompt: Sequence[int], count: int, sampling: Sampling, is_end: Callable[[int], bool]
) -> list[int]:
    """What follows a prompt, token by token on a session of its own, to the end of the text at most."""
    session, tokens = Session(model), [int(prompt[-1])]
    prefill(session, prompt[:-1])
    while len(tokens) <= count:
        tokens += verify(session, tokens[-1:], [-1], sampling)[1].tolist()
        if is_end(tokens[-1]):
            return tokens[1:-1]
    return tokens[1:]


def staged_as_plain(path: Path, draft: Path | None = None, **options: Any) -> list[int]:
    """The tokens of a model's text, which are the same staged and plain."""
    options = {"max_tokens": 24, "seed": 3} | options
    with pystaged.load(path, draft=draft, report=lambda _: None) as engine:
        plain = engine.generate("the the", **options, speculate=False).tokens
        assert engine.generate("the the", **options).tokens == plain
    return plain
