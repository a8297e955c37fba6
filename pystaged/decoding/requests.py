"""Requests for passes and their results: decoding and drafting are generators of requests.

The caller of a generator decides which requests share a pass: `alone` makes one for each, stepper.py one for a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pystaged._core import HiddenRows, Sampling, Session, Work, run
from pystaged.decoding.step import Logprobs
from pystaged.decoding.tree import TokenTree

MOST_ROWS = 256  # rows of a pass: PackedPass::kMaxRows in C++

T = TypeVar("T")
R = TypeVar("R")


class _OfSession:
    """Base of requests, which have a session and a `past`: the tokens that it holds before their rows.

    `work` describes the request for a shared pass, `perform` makes a pass for it alone. `result` converts what either
    returned.
    """

    __slots__ = ()

    session: Session

    @property
    def can_share(self) -> bool:
        """Whether its pass can be shared; a session on another machine cannot."""
        return isinstance(self.session, Session)

    @property
    def on_device(self) -> bool:
        """Whether its pass runs outside this process's threads."""
        return getattr(self.session, "on_device", True)


@dataclass(slots=True, eq=False)
class Read(_OfSession):
    """Request to prefill the first num_rows of the tokens, int32[n]; the result is num_rows.

    num_rows: set by the caller that makes the pass. hidden: for each token the target's hidden states, for a draft that
    reads them.
    """

    session: Session
    past: int
    tokens: NDArray[np.int32]
    num_rows: int = field(default=0, kw_only=True)
    hidden: HiddenRows | None = field(default=None, kw_only=True)

    def work(self) -> Work:
        hidden = None if self.hidden is None else self.hidden[: self.num_rows]
        return Work.read(self.session, self.tokens[: self.num_rows], hidden)

    def perform(self) -> object:
        if self.hidden is not None:
            return run([self.work()])[0]
        self.session.prefill(self.tokens[: self.num_rows])
        return None

    def result(self, found: Any) -> int:
        del found
        return self.num_rows


@dataclass(slots=True, eq=False)
class Score(Read):
    """Request to prefill as in Read, and to find the log-probability of the token after each.

    following: int32[n], the token after each. logprobs: the results, one for each row that was read.
    """

    following: NDArray[np.int32]
    sampling: Sampling
    logprobs: list[Logprobs] = field(default_factory=list)

    def work(self) -> Work:
        return Work.verify(self.session, self.tokens[: self.num_rows], *self._chain)

    def perform(self) -> object:
        return self.session.verify(self.tokens[: self.num_rows], *self._chain)

    @property
    def _chain(self) -> tuple[NDArray[np.int32], Sampling, int, NDArray[np.uint32]]:
        """Arguments of verify for a chain whose masks force its acceptance."""
        parents = np.arange(-1, self.num_rows - 1, dtype=np.int32)
        return parents, self.sampling, 0, only(self.following[: self.num_rows])

    def result(self, found: Any) -> int:
        self.logprobs = Logprobs.of(*found[2])
        return self.num_rows


def only(following: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Masks, uint32[n, words], that each allow one of the tokens, int32[n], n >= 1."""
    masks = np.zeros((len(following), int(following.max()) // 32 + 1), np.uint32)
    masks[np.arange(len(following)), following // 32] = np.left_shift(np.uint32(1), (following % 32).astype(np.uint32))
    return masks


@dataclass(slots=True, eq=False)
class Propose(_OfSession):
    """Request to evaluate rows, which stay pending. The result is the k best candidates after each of the last `judged`
    rows, best first: their tokens, -1 where there are fewer, and their scores.
    masks: allowed tokens after each of those rows, uint32[judged, words]; None allows all. hidden: for each token the
    hidden states that a draft reads, as in Read."""

    session: Session
    past: int
    tokens: Sequence[int]
    parents: Sequence[int]
    judged: int
    k: int
    sampling: Sampling
    masks: NDArray[np.uint32] | None = None
    hidden: HiddenRows | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def work(self) -> Work:
        judged, k = self.judged, self.k
        return Work.propose(self.session, self.tokens, self.parents, judged, k, self.sampling, self.masks, self.hidden)

    def perform(self) -> object:
        if self.hidden is not None or self.k == 0:
            return run([self.work()])[0]
        first = self.session.num_pending + len(self.tokens) - self.judged
        self.session.evaluate(self.tokens, self.parents, self.judged)
        return self.session.candidates(list(range(first, first + self.judged)), self.k, self.sampling, self.masks)

    def result(self, found: Any) -> tuple[list[list[int]], list[list[float]]]:
        tokens, scores = found
        return tokens.tolist(), scores.tolist()


Verified = tuple[TokenTree, list[int], list[int], list[Logprobs] | None, tuple[NDArray[Any], ...]]


@dataclass(slots=True, eq=False)
class Verify(_OfSession):
    """Request to evaluate a tree and to commit its accepted path. The result is the tree, which the caller may have
    trimmed; its accepted nodes, root first; the target's own token after each; their log-probabilities if the sampling
    asks for them, else None; and the candidates of all nodes as in Session.verify, empty if num_candidates is 0.
    masks: allowed tokens after each node, uint32[nodes, words]; None allows all.
    """

    session: Session
    past: int
    tree: TokenTree
    sampling: Sampling
    num_candidates: int = 0
    masks: NDArray[np.uint32] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tree)

    def work(self) -> Work:
        return Work.verify(
            self.session, self.tree.tokens, self.tree.parents, self.sampling, self.num_candidates, self._masks
        )

    def perform(self) -> object:
        return self.session.verify(self.tree.tokens, self.tree.parents, self.sampling, self.num_candidates, self._masks)

    @property
    def _masks(self) -> NDArray[np.uint32] | None:
        return None if self.masks is None else self.masks[: len(self.tree)]

    def result(self, found: Any) -> Verified:
        path, tokens, *more = found
        logprobs = Logprobs.of(*more.pop(0)) if more and isinstance(more[0], tuple) else None
        return self.tree, path.tolist(), tokens.tolist(), logprobs, tuple(more)


Request = Read | Propose | Verify


@dataclass(slots=True)
class Done:
    """The result of a request.

    result: see the request's class. share: the request's share of the pass's rows, above 0 and at most 1. num_rows:
    rows of the whole pass; past: mean number of tokens before each of them. seconds: wall time of the pass;
    processor_seconds: time that the calling thread ran, or the wall time of a pass on a device.
    """

    result: Any
    share: float
    num_rows: int
    past: float
    seconds: float
    processor_seconds: float


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of wall time and of the calling thread's processor time, in seconds."""

    wall: Callable[[], float] = time.perf_counter
    processor: Callable[[], float] = time.thread_time

    def of(self, request: Request) -> Callable[[], float]:
        """The clock for a request's pass: wall time on devices. On the CPU, processor time of the calling thread, which
        takes part in all of the work: interruptions do not count, and its part is the same on a busy machine."""
        return self.wall if request.on_device else self.processor


Requests = Generator[Request, Done, R]
"""A generator that yields requests, is sent the result of each, and returns an R."""


_CLOCKS = Clocks()


def resume(text: Generator[T, Done | None, R], answer: Done | BaseException | None) -> T:
    """Send a generator the result or error of its last request; returns the next item that it yields."""
    return text.throw(answer) if isinstance(answer, BaseException) else text.send(answer)


def fulfil(request: Request, clocks: Clocks) -> Done | BaseException:
    """Make a pass for one request; returns its result or error."""
    processor = clocks.of(request)
    begin, processor_begin = clocks.wall(), processor()
    try:
        result = request.result(request.perform())
    except BaseException as error:
        return error
    took, cost = clocks.wall() - begin, processor() - processor_begin
    return Done(result, 1.0, request.num_rows, request.past, took, cost)


def alone(text: Generator[Any, Any, R], clocks: Clocks = _CLOCKS) -> Generator[Any, None, R]:
    """Run a generator with a pass of its own for each request; yields its other items and returns its result."""
    answer: Done | BaseException | None = None
    with closing(text):
        while True:
            try:
                said = resume(text, answer)
            except StopIteration as end:
                result: R = end.value
                return result
            answer = None
            if not isinstance(said, Request):
                yield said
                continue
            if isinstance(said, Read):
                said.num_rows = min(len(said.tokens), MOST_ROWS)
            answer = fulfil(said, clocks)


def finish(text: Requests[R], clocks: Clocks = _CLOCKS) -> R:
    """Run a generator of requests alone, with a pass of its own for each; returns its result."""
    running = alone(text, clocks)
    try:
        while True:
            next(running)
    except StopIteration as end:
        result: R = end.value
        return result
