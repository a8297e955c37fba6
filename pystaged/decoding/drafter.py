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
    """Proposes trees of tokens for one text at a time; drafting/drafter.py describes its methods.

    After `watch`, `catch_up` and `draft` it asks for passes: the caller makes each `request` and gives it to `take`,
    until there is none.

    Attributes:
        tree: the last draft: the root alone if nothing is worth verifying.
        recycled: learns from every row of a step that drafted; None for a drafter that does not.
    """

    tree: TokenTree
    recycled: RecycledCandidates | None

    def work(self) -> dict[str, DrafterStats]: ...
    def sessions(self) -> list[Session]: ...
    def reusable(self, prompt: NDArray[np.int32]) -> int: ...
    def watch(self, prompt: NDArray[np.int32], first: int, last: int) -> None: ...
    def start(
        self,
        context: NDArray[np.int32],
        *,
        greedy: bool = True,
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None: ...
    def end(self) -> None: ...
    def lag(self) -> float: ...
    def price(self) -> float: ...
    def catch_up(self, seconds: float = math.inf) -> None: ...
    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> None: ...
    def request(self) -> AnyRequest | None: ...
    def take(self, request: AnyRequest) -> None: ...
    def advance(self, tokens: Sequence[int]) -> None: ...


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
