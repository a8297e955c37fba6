"""Steps of one session, each a pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pystaged._core import Sampling, Session
from pystaged.decoding.requests import perform

Ints = Sequence[int] | npt.NDArray[np.integer]
GREEDY = Sampling()


class Heard:
    """A session that tells of each of its passes before it is made."""

    def __init__(self, session: Session, tell: Callable[..., object]) -> None:
        self.session, self._tell = session, tell

    def run(self, kind: str, *arguments: object) -> Any:
        self._tell(kind, *arguments)
        return perform(self.session, kind, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def prefill(session: Any, tokens: Ints) -> None:
    """Evaluate and commit tokens."""
    perform(session, "read", tokens)


def evaluate(session: Any, tokens: Ints, parents: Ints, num_logits: int | None = None) -> None:
    """Append pending rows, of which the last num_logits, by default all, get logits."""
    perform(session, "propose", tokens, parents, len(tokens) if num_logits is None else num_logits, 0, GREEDY)


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    """The rows of a tree from its root to this one, which is included."""
    return [*path_to(parents[row], parents), row] if row >= 0 else []


def rank(session: Any, rows: Ints, k: int, sampling: Sampling | Sequence[Sampling], masks: Any = None) -> Any:
    """The likeliest next tokens after pending rows, and their scores."""
    return perform(session, "rank", rows, k, sampling, masks)


def verify(
    session: Any, tokens: Ints, parents: Ints, sampling: Sampling, num_candidates: int = 0, masks: Any = None
) -> Any:
    """Evaluate a tree, and commit its accepted path."""
    return perform(session, "verify", tokens, parents, sampling, num_candidates, masks)
