"""Admission: a bounded number of sequences in progress, and a bounded first-in, first-out queue."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio

from pystaged.server.errors import ApiError

_WEIGHT = 0.2  # weight of the last sequence in the mean duration


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises ApiError where the block, which waits for something busy, takes longer."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise ApiError(503, "the server is busy: the request waited too long", code="queue_timeout") from None


class Gate:
    """Admits sequences; for one event loop. parallel: most sequences in progress. most_waiting: most sequences in the
    queue. clock: returns seconds."""

    def __init__(self, parallel: int, most_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._parallel, self._most_waiting, self._clock = parallel, most_waiting, clock
        self._places = anyio.Semaphore(parallel, fast_acquire=True)  # first in, first out
        self._begun: dict[object, float] = {}  # start time of each admitted sequence
        self._mean = 0.0  # mean duration in seconds; 0 before any sequence has ended
        self._num_coming = 0

    @property
    def num_inside(self) -> int:
        """Sequences admitted, also those that have not resumed yet."""
        return self._parallel - self._places.value

    @property
    def num_waiting(self) -> int:
        return self._places.statistics().tasks_waiting

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Count a request as arriving, before its sequences join the queue. Raises ApiError where the queue is full; a
        request may exceed it by its sequences after the first."""
        excess = self.num_inside + self.num_waiting + self._num_coming + 1 - self._parallel - self._most_waiting
        if excess > 0:
            # One that has already taken longer than the mean raises the estimate.
            longest = max([self._mean, *(self._clock() - begun for begun in self._begun.values())])
            seconds = math.ceil(max(1.0, longest * excess / self._parallel))
            raise ApiError(
                429,
                f"texts in progress: {self.num_inside}, waiting: {self.num_waiting}; try again in {seconds} s",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1

    @asynccontextmanager
    async def inside(self, wait: float = math.inf) -> AsyncIterator[None]:
        """Wait at most `wait` seconds for admission, and hold a place while the block runs. Raises ApiError."""
        with within(wait):
            await self._places.acquire()
        key = object()
        self._begun[key] = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - self._begun.pop(key)
            self._mean = seconds if not self._mean else self._mean + _WEIGHT * (seconds - self._mean)
            self._places.release()
