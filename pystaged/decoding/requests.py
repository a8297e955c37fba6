"""Requests for passes, which hold what came of them. stepper.py decides which requests share a pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pystaged._core import HiddenRows, Sampling, Session, Work, run
from pystaged.decoding.tree import TokenTree

MOST_ROWS = 256  # rows of a pass: kMostPassRows in C++


Logprobs = tuple[float, list[int], list[float]]
"""Natural log-probabilities at the position of a token, from the model's unmodified logits at temperature 1: that of
the token itself; the likeliest tokens, best first; and theirs."""


def perform(session: Any, kind: str, *arguments: Any) -> Any:
    """The result of a pass for the Work that its static method of this name makes of these arguments; where the session
    is on another machine, the pass is made there."""
    if hasattr(session, "run"):
        return session.run(kind, *arguments)
    return run([getattr(Work, kind)(session, *arguments)])[0]


@dataclass(slots=True, eq=False)
class Request:
    """Rows of one session for a pass, and what came of them, which `take` stores.

    Attributes:
        kind, arguments: the static method of Work that describes them, and what follows the session there.
        past: tokens that the session holds before the rows.
        num_rows: number of rows.
        result: see the subclass. error: why there is none, or None.
        share: share of the pass's rows, above 0 and at most 1.
        pass_rows, pass_past: rows of the whole pass, and the mean number of tokens before each of them.
        seconds: wall time of the pass.
        processor_seconds: time that the calling thread ran, or the wall time of a pass on a device.
    """

    kind: ClassVar[str]
    session: Session
    past: int
    num_rows: int = field(init=False)
    result: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    share: float = field(default=1.0, init=False)
    pass_rows: int = field(default=0, init=False)
    pass_past: float = field(default=0.0, init=False)
    seconds: float = field(default=0.0, init=False)
    processor_seconds: float = field(default=0.0, init=False)


@dataclass(slots=True, eq=False)
class Read(Request):
    """Request to prefill the first num_rows of the tokens, int32[n]; the result is num_rows.

    num_rows: as many as a pass holds; the caller that makes the pass may lower it. hidden: for each token the target's
    hidden states, for a draft that reads them.
    """

    kind = "read"
    tokens: NDArray[np.int32]
    hidden: HiddenRows | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.num_rows = min(len(self.tokens), MOST_ROWS)

    @property
    def arguments(self) -> tuple[Any, ...]:
        hidden = None if self.hidden is None else self.hidden[: self.num_rows]
        return self.tokens[: self.num_rows], hidden

    def take(self, _found: Any) -> None:
        self.result = self.num_rows


@dataclass(slots=True, eq=False)
class Score(Read):
    """Request to prefill as in Read, and to find the log-probability of the token after each.

    following: int32[n], the token after each. logprobs: the results, one for each row that was read.
    """

    kind = "verify"
    following: NDArray[np.int32]
    sampling: Sampling
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of a chain whose masks allow the known next token alone, so that all rows are accepted."""
        parents = np.arange(-1, self.num_rows - 1, dtype=np.int32)
        return self.tokens[: self.num_rows], parents, self.sampling, 0, only(self.following[: self.num_rows])

    def take(self, found: Any) -> None:
        self.result, self.logprobs = self.num_rows, _logprobs(*found[2])


def only(following: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Masks, uint32[n, words], that each allow one of the tokens, int32[n], n >= 1."""
    masks = np.zeros((len(following), int(following.max()) // 32 + 1), np.uint32)
    masks[np.arange(len(following)), following // 32] = np.left_shift(np.uint32(1), (following % 32).astype(np.uint32))
    return masks


@dataclass(slots=True, eq=False)
class Propose(Request):
    """Request to evaluate rows, which stay pending. The result is the k best candidates after each of the last `judged`
    rows, best first: their tokens, -1 where there are fewer, and their scores.
    masks: allowed tokens after each of those rows, uint32[judged, words]; None allows all. hidden: for each token the
    hidden states that a draft reads, as in Read."""

    kind = "propose"
    tokens: Sequence[int]
    parents: Sequence[int]
    judged: int
    k: int
    sampling: Sampling
    masks: NDArray[np.uint32] | None = None
    hidden: HiddenRows | None = None

    def __post_init__(self) -> None:
        self.num_rows = len(self.tokens)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.tokens, self.parents, self.judged, self.k, self.sampling, self.masks, self.hidden

    def take(self, found: Any) -> None:
        self.result = tuple(each.tolist() for each in found)


@dataclass(slots=True, eq=False)
class Verify(Request):
    """Request to evaluate a tree and to commit its accepted path. The result: the accepted nodes of the tree, which the
    caller may have trimmed, root first; the target's own token after each; their log-probabilities if the sampling asks
    for them, else None; and the candidates of all nodes as in Work.verify, empty if num_candidates is 0.
    masks: allowed tokens after each node, uint32[nodes, words]; None allows all.
    """

    kind = "verify"
    tree: TokenTree
    sampling: Sampling
    num_candidates: int = 0
    masks: NDArray[np.uint32] | None = None

    def __post_init__(self) -> None:
        self.num_rows = len(self.tree)

    def trim(self, num_rows: int) -> None:
        """Keep the first nodes of the tree."""
        self.tree, self.num_rows = self.tree.head(num_rows), num_rows

    @property
    def arguments(self) -> tuple[Any, ...]:
        masks = None if self.masks is None else self.masks[: self.num_rows]
        return self.tree.tokens, self.tree.parents, self.sampling, self.num_candidates, masks

    def take(self, found: Any) -> None:
        path, tokens, *more = found
        logprobs = _logprobs(*more.pop(0)) if more and isinstance(more[0], tuple) else None
        self.result = path.tolist(), tokens.tolist(), logprobs, tuple(more)


def _logprobs(*arrays: NDArray[Any]) -> list[Logprobs]:
    """Convert the arrays that Work.verify brings."""
    return list(zip(*(each.tolist() for each in arrays), strict=True))


AnyRequest = Read | Propose | Verify
Make = Callable[[Sequence[AnyRequest]], list[Any]]  # makes one pass for requests, and returns what it found for each


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of wall time and of the calling thread's processor time, in seconds."""

    wall: Callable[[], float] = time.perf_counter
    processor: Callable[[], float] = time.thread_time


_CLOCKS = Clocks()


def make_pass(requests: Sequence[AnyRequest]) -> list[Any]:
    """A Make for requests that can share a pass, or for a single one."""
    if len(requests) == 1:
        return [perform(requests[0].session, requests[0].kind, *requests[0].arguments)]
    return run([getattr(Work, each.kind)(each.session, *each.arguments) for each in requests])


def fulfil(requests: Sequence[AnyRequest], clocks: Clocks = _CLOCKS, make: Make = make_pass) -> None:
    """Make one pass for requests, and store what came of it; if it fails, which changes no session, one for each, so
    that only the request at fault fails."""
    several = len(requests) > 1
    if several and any(hasattr(request.session, "run") for request in requests):  # on other machines
        for request in requests:
            fulfil([request], clocks, make)
        return
    # On the CPU, processor time of the calling thread, which takes part in all of the work: interruptions do not count,
    # and its part is the same on a busy machine. A device computes outside this process's threads.
    processor = clocks.wall if getattr(requests[0].session, "on_device", True) else clocks.processor
    try:
        begin, processor_begin = clocks.wall(), processor()
        found = make(requests)
    except BaseException as error:
        for request in requests:
            if several and (not isinstance(error, MemoryError) or _is_unchanged(request)):
                fulfil([request], clocks, make)
            else:
                request.error = error
        return
    seconds, cost = clocks.wall() - begin, processor() - processor_begin
    rows, past = mean_past(requests)
    for request, each in zip(requests, found, strict=True):
        request.share, request.pass_rows, request.pass_past = request.num_rows / rows, rows, past
        request.seconds, request.processor_seconds = seconds, cost
        try:
            request.take(each)
        except BaseException as error:
            request.error = error


def _is_unchanged(request: AnyRequest) -> bool:
    """Whether a pass for which memory was short has not changed the session: it may have been short for the result."""
    with suppress(MemoryError, ValueError, RuntimeError, OSError):
        return not isinstance(request, Propose) and len(request.session.tokens) == request.past
    return False


def mean_past(requests: Sequence[AnyRequest]) -> tuple[int, float]:
    """Number of rows, and the mean number of tokens before a row."""
    rows = past = 0
    for request in requests:
        rows += request.num_rows
        past += request.num_rows * request.past
    return rows, past / rows
