"""The interface of a drafter."""

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
    """Proposes trees of tokens for one sequence at a time. Methods that may need passes are generators of requests.

    prediction: tokens expected after the prompt; set before `start`, and no part of the sequence. places: consecutive
    guesses that one pass or lookup makes.
    """

    prediction: Sequence[int]

    places: int

    recycled: RecycledCandidates | None
    """Learns from every row of the verified trees of this drafter; None for a drafter that does not."""

    hit: bool | None
    """Whether its first guess for the token after the last root was right; None if it was not asked for one."""

    def work(self) -> dict[str, DrafterStats]:
        """Statistics of its work so far, by stage name."""
        ...

    def close(self) -> None:
        """Free its sessions."""
        ...

    def sessions(self) -> list[Session]:
        """Its own sessions, which hold sequences."""
        ...

    def inherit(self, other: Drafter) -> None:
        """Copy the learnt state of a drafter of the same kind."""
        ...

    def constrain(self, constraint: Constraint | None) -> None:
        """Set the sequence's constraint before `start`, None at its end. Forbidden nodes are cut from any tree."""
        ...

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        """Number of tokens at the beginning of a prompt, int32[n], that the target need not read again for it."""
        ...

    def watch(self, prompt: NDArray[np.int32], first: int, last: int) -> Requests[None]:
        """The target has read the tokens [first, last) of a prompt, int32[n], and holds their hidden states."""
        ...

    def start(self, context: NDArray[np.int32]) -> None:
        """Begin a sequence with all its tokens so far, int32[n], the last of which is the root."""
        ...

    def end(self) -> None:
        """End the sequence and free what the next start would discard."""
        ...

    def lag(self) -> float:
        """Estimated seconds to prefill the tokens that it has not read yet."""
        ...

    def price(self) -> float:
        """Estimated seconds of its smallest draft after prefill: one pass or one lookup."""
        ...

    def catch_up(self, seconds: float = math.inf) -> Requests[None]:
        """Prefill the tokens that it has not read yet, as many as fit into `seconds`; `draft` does so, too."""
        ...

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        """Draft a tree of at most max_depth levels below the root. The first pass is always made, further ones if they
        fit into `seconds`. The tree is the root alone if prefill does not fit, or there is nothing to propose."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Append the tokens that the target emitted after the root; the last of them is the next root.

        Takes almost no time if it has not drafted, because plain steps are not charged for it.
        """
        ...


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    different = np.nonzero(a[:length] != b[:length])[0]
    return int(different[0]) if len(different) else length
