"""Admission: a bounded number of texts in progress, and a bounded queue in order of arrival."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio

from pystaged.server.errors import ApiError

_WEIGHT = 0.2  # of the last text in the mean of their times


class Gate:
    """Lets texts begin. For one event loop.

    Args:
        parallel: texts at once. most_waiting: texts that may wait.
        clock: seconds.
    """

    def __init__(self, parallel: int, most_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._parallel, self._most_waiting, self._clock = parallel, most_waiting, clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._begun: dict[object, float] = {}  # when each that is inside began
        self._mean = 0.0  # seconds of a text, 0 before any has ended
        self._num_coming = 0
        self.num_inside = 0  # with those whose turn has come and who do not know yet

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def coming(self) -> Iterator[None]:
        """A request is taken in, whose texts will wait. Raises ApiError where the queue is full; of one that comes
        before all texts may wait."""
        excess = self.num_inside + self.num_waiting + self._num_coming + 1 - self._parallel - self._most_waiting
        if excess > 0:
            seconds = math.ceil(self._seconds(excess))
            raise ApiError(
                429,
                f"{self.num_inside} texts are being written and {self.num_waiting} wait; try again in {seconds} s",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1

    def _seconds(self, excess: int) -> float:
        """Until so many texts have left, as far as texts so far tell; at least 1."""
        now = self._clock()
        ages = [now - begun for begun in self._begun.values()]
        # One that has taken longer than usual says that the usual is longer than was thought.
        return max(1.0, max([self._mean, *ages]) * excess / self._parallel)

    @asynccontextmanager
    async def inside(self, wait: float = math.inf) -> AsyncIterator[None]:
        """Wait for one's turn, so many seconds at most, and be one of those at once. Raises ApiError."""
        try:
            with anyio.fail_after(wait):
                await self._enter()
        except TimeoutError:
            raise ApiError(503, "the server is busy: no turn came in time", code="queue_timeout") from None
        key = object()
        self._begun[key] = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - self._begun.pop(key)
            self._mean = seconds if not self._mean else self._mean + _WEIGHT * (seconds - self._mean)
            self._leave()

    async def _enter(self) -> None:
        if self.num_inside < self._parallel:
            self.num_inside += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # whose turn it was does not want it any more
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        """Pass one's place on."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.num_inside -= 1
