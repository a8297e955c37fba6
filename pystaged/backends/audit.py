"""Audit of emitted tokens: replays them one row at a time and compares them with the model's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.config import SamplingConfig


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that a pass over one row does not choose.

    index: of the token after the prompt. gap: difference of the two best scores of that row (log p, plus noise when
    sampling); it is small if the rounding of a device explains the difference.
    """

    index: int
    emitted: int
    replayed: int
    gap: float


def audit(
    session: Session, prompt: NDArray[np.int32], tokens: Sequence[int], sampling: SamplingConfig
) -> Difference | None:
    """Evaluate the tokens after a prompt one row at a time; returns the first difference, or None.

    Raises:
        ContextFullError: prompt and tokens are longer than the context.
    """
    session.rewind(0)
    session.prefill(prompt[:-1])
    root = int(prompt[-1])
    for index, token in enumerate(tokens):
        session.evaluate([root], [-1])
        _, chosen = session.follow(sampling.native)
        if chosen[0] != token:
            _, scores = session.candidates([0], 2, sampling.native)
            session.discard()
            return Difference(index, token, int(chosen[0]), float(scores[0, 0] - scores[0, 1]))
        session.commit([0])
        root = token
    return None
