"""What the loop asks of whoever proposes tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pystaged._core import RecycledCandidates, Session
from pystaged.config import SamplingConfig
from pystaged.decoding.constraint import Constraint
from pystaged.decoding.requests import Requests
from pystaged.decoding.tree import TokenTree
from pystaged.stats import DrafterStats


class Drafter(Protocol):
    """Proposes what comes after a context that it follows step by step; what may need passes is a generator of them.

    prediction: tokens that its user expects, or the like of them; set before it starts, and no part of the text.
    """

    prediction: Sequence[int]

    recycled: RecycledCandidates | None
    """Learns from every row of the trees that this drafter proposed; None where it learns nothing."""

    hit: bool | None
    """Whether its first guess for the token after the last root was right; None where it was asked for none."""

    def work(self) -> dict[str, DrafterStats]:
        """What it has done so far, by name."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...

    def sessions(self) -> list[Session]:
        """Those that it reads texts in."""
        ...

    def inherit(self, other: Drafter) -> None:
        """Believe what a drafter of the same kind has learnt."""
        ...

    def constrain(self, constraint: Constraint | None) -> None:
        """What the text must be, told before it starts, None at its end; what it forbids is cut from any tree."""
        ...

    def start(self, context: NDArray[np.int32]) -> None:
        """Begin a text: all its tokens so far, int32[n], the last of which is the root."""
        ...

    def end(self) -> None:
        """The text is over: free what the next start would discard."""
        ...

    def lag(self) -> float:
        """Seconds that catching up with the text will take, about."""
        ...

    def price(self) -> float:
        """Seconds of the least it can do once it has caught up: a pass, or a lookup."""
        ...

    def catch_up(self, seconds: float = math.inf) -> Requests[None]:
        """Read what it has not read of the text yet, as much as it can in so many seconds; drafting does that too."""
        ...

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        """A tree below the root, at most max_depth deep: what it has when the next pass would not fit into the seconds
        any more, but the first pass is always made; the root alone where reading the text does not fit, or there is
        nothing to propose."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow the target, which emitted these tokens after the root; the last of them is the next root.

        Next to free where it has not drafted: plain steps are not charged for it.
        """
        ...


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    different = np.nonzero(a[:length] != b[:length])[0]
    return int(different[0]) if len(different) else length
