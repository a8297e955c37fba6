"""The interface of a drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pystaged._core import RecycledCandidates, Session
from pystaged.decoding.requests import AnyRequest, Clocks, fulfil
from pystaged.decoding.tree import TokenTree
from pystaged.options.config import SamplingConfig
from pystaged.sampling.constraint import Constraint
from pystaged.stats import DrafterStats


class Drafter(Protocol):
    """Proposes trees of tokens for one sequence at a time.

    After `watch`, `catch_up` and `draft` it asks for passes: the caller makes each `request` and gives it to `take`,
    until there is none.

    Attributes:
        estimate: seconds that the last draft should have taken; 0 without costs.
        tree: the last draft: the root alone if nothing is worth verifying.
        recycled: learns from every row of a step that drafted; None for a drafter that does not.
    """

    estimate: float
    tree: TokenTree
    recycled: RecycledCandidates | None

    def work(self) -> dict[str, DrafterStats]:
        """Statistics of its work so far, by stage name."""

    def sessions(self) -> list[Session]:
        """Its own sessions, which hold sequences."""

    def inherit(self, other: Drafter) -> None:
        """Copy the learnt state of a drafter of the same kind."""

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        """Number of tokens at the beginning of a prompt, int32[n], that the target need not read again for it."""

    def watch(self, prompt: NDArray[np.int32], first: int, last: int) -> None:
        """The target has read the tokens [first, last) of a prompt, int32[n], and holds their hidden states."""

    def start(
        self,
        context: NDArray[np.int32],
        *,
        greedy: bool = True,
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """Begin a sequence with all its tokens so far, int32[n], the last of which is the root.

        Args:
            greedy: whether decoding is greedy.
            prediction: tokens expected after the prompt, no part of the sequence.
            constraint: the sequence's; forbidden nodes are cut from any tree.
        """

    def end(self) -> None:
        """End the sequence and free what the next start would discard."""

    def lag(self) -> float:
        """Estimated seconds to read the tokens that its cheapest draft needs and that it has not read yet."""

    def price(self) -> float:
        """Estimated seconds of its cheapest draft after that: one pass or one lookup."""

    def catch_up(self, seconds: float = math.inf) -> None:
        """Prefill the tokens that it has not read yet, as many as fit into `seconds`; `draft` does so, too."""

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> None:
        """Draft a tree of at most max_depth levels below the root, by passes that should fit into `seconds`."""

    def request(self) -> AnyRequest | None:
        """The next pass that it needs; None if it is done."""

    def take(self, request: AnyRequest) -> None:
        """Go on with the result of a pass. Raises the pass's error."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Append the tokens that the target emitted after the root; the last of them is the next root.

        Takes almost no time if it has not drafted, because plain steps are not charged for it.
        """


def fulfil_all(drafter: Drafter, clocks: Clocks | None = None) -> None:
    """Make the passes that a drafter asks for, each of them alone."""
    while request := drafter.request():
        fulfil([request], clocks or Clocks())
        drafter.take(request)


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    different = np.nonzero(a[:length] != b[:length])[0]
    return int(different[0]) if len(different) else length
