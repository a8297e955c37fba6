"""What a text asks a pass for, and what comes of it: decoding and drafting are generators of requests.

Who drives them decides what shares a pass: `alone` makes one for each request, stepper.py one for many texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Sampling, Session, Work
from pystaged.decoding.step import Logprobs
from pystaged.decoding.tree import TokenTree

MOST_ROWS = 256  # of a pass: PackedPass::kMaxRows, as many as fill one

T = TypeVar("T")
R = TypeVar("R")


class _OfSession:
    """What requests have in common: the session they are for, and `past`, tokens of its text before their rows.

    `work` is what a pass shared with others makes of them, `perform` what a pass of their own does; both give what
    `result` takes.
    """

    __slots__ = ()

    session: Session

    @property
    def can_share(self) -> bool:
        """Whether its pass can be others' too; what stands in for a session elsewhere has passes of its own."""
        return isinstance(self.session, Session)

    @property
    def on_device(self) -> bool:
        """Whether its pass runs elsewhere than on this process's threads."""
        return getattr(self.session, "on_device", True)


@dataclass(slots=True, eq=False)
class Read(_OfSession):
    """Read the beginning of these tokens, int32[n]; the result is how many of them were read.

    num_rows: how many to read, which whoever makes the pass decides.
    """

    session: Session
    past: int
    tokens: NDArray[np.int32]
    num_rows: int = field(default=0, kw_only=True)

    def work(self) -> Work:
        return Work.read(self.session, self.tokens[: self.num_rows])

    def perform(self) -> object:
        self.session.prefill(self.tokens[: self.num_rows])
        return None

    def result(self, found: Any) -> int:
        del found
        return self.num_rows


@dataclass(slots=True, eq=False)
class Score(Read):
    """The same, and say how likely the model finds each token after those that are read.

    following: int32[n], the token after each. logprobs: what was said, of each row that was read.
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
        """A path of a tree that cannot but be followed."""
        parents = np.arange(-1, self.num_rows - 1, dtype=np.int32)
        return parents, self.sampling, 0, only(self.following[: self.num_rows])

    def result(self, found: Any) -> int:
        self.logprobs = Logprobs.of(*found[2])
        return self.num_rows


def only(following: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Masks that allow one token each, uint32[n, words], of tokens int32[n], n >= 1."""
    masks = np.zeros((len(following), int(following.max()) // 32 + 1), np.uint32)
    masks[np.arange(len(following)), following // 32] = np.left_shift(np.uint32(1), (following % 32).astype(np.uint32))
    return masks


@dataclass(slots=True, eq=False)
class Propose(_OfSession):
    """Evaluate rows, which stay pending; the result is the k best candidates after each of the last `judged` of them,
    best first: their tokens, -1 where there are fewer, and their scores. masks: what may follow each, uint32[judged,
    words], None for anything."""

    session: Session
    past: int
    tokens: Sequence[int]
    parents: Sequence[int]
    judged: int
    k: int
    sampling: Sampling
    masks: NDArray[np.uint32] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def work(self) -> Work:
        return Work.propose(self.session, self.tokens, self.parents, self.judged, self.k, self.sampling, self.masks)

    def perform(self) -> object:
        first = self.session.num_pending + len(self.tokens) - self.judged
        self.session.evaluate(self.tokens, self.parents, self.judged)
        return self.session.candidates(list(range(first, first + self.judged)), self.k, self.sampling, self.masks)

    def result(self, found: Any) -> tuple[list[list[int]], list[list[float]]]:
        tokens, scores = found
        return tokens.tolist(), scores.tolist()


Verified = tuple[TokenTree, list[int], list[int], list[Logprobs] | None, tuple[NDArray[Any], ...]]


@dataclass(slots=True, eq=False)
class Verify(_OfSession):
    """Evaluate a tree, follow it and commit the path; the result is the tree, which whoever makes the pass may have
    trimmed, its accepted nodes, root first, the target's own token after each, where the sampling asks for them their
    log-probabilities, else None, and where num_candidates are asked for, what Session.verify says of all its nodes.
    masks: what may follow each node, uint32[nodes, words], None for anything.
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
    """A request fulfilled.

    result: as the request says. num_rows: of the whole pass, others' rows included; past: tokens before each of these
    rows, in the mean. seconds: that the pass took; processor_seconds: of these, those that the calling thread ran, all
    where the pass ran on a device. share: part of the rows that are the request's, above 0 and at most 1.
    """

    result: Any
    share: float
    num_rows: int
    past: float
    seconds: float
    processor_seconds: float


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds: by the wall, and those that the calling thread has run."""

    wall: Callable[[], float] = time.perf_counter
    processor: Callable[[], float] = time.thread_time

    def of(self, request: Request) -> Callable[[], float]:
        """What tells the cost of a request's pass. A CPU's is told by its calling thread, which has a part in all of
        the work: interruptions do not count, and its share stays the same on a busy machine."""
        return self.wall if request.on_device else self.processor


Requests = Generator[Request, Done, R]
"""A generator that asks for passes, is sent what came of each, and returns an R."""


_CLOCKS = Clocks()


def resume(text: Generator[T, Done | None, R], answer: Done | BaseException | None) -> T:
    """Let a text go on with what came of its last request, up to the next thing it says."""
    return text.throw(answer) if isinstance(answer, BaseException) else text.send(answer)


def fulfil(request: Request, clocks: Clocks) -> Done | BaseException:
    """Give a request a pass of its own."""
    processor = clocks.of(request)
    begin, processor_begin = clocks.wall(), processor()
    try:
        result = request.result(request.perform())
    except BaseException as error:
        return error
    took, cost = clocks.wall() - begin, processor() - processor_begin
    return Done(result, 1.0, request.num_rows, request.past, took, cost)


def alone(text: Generator[Any, Any, R], clocks: Clocks = _CLOCKS) -> Generator[Any, None, R]:
    """What a text says beside its requests, each of which gets a pass of its own; returns what the text returns."""
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
    """What a generator of nothing but requests returns, each request by a pass of its own."""
    running = alone(text, clocks)
    try:
        while True:
            next(running)
    except StopIteration as end:
        result: R = end.value
        return result
