"""Measures the processor time of drafting."""

from __future__ import annotations

import time
from collections.abc import Callable

from pystaged.decoding.requests import Done, Request, Requests


class Meter:
    """Processor seconds of a sequence's own Python and of its share of draft passes; stops during target passes.

    Processor time excludes other programs, which are no cost of drafting.

    Args:
        clock: processor seconds of the calling thread.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._since, self._before = clock(), 0.0

    def __call__(self) -> float:
        """Seconds so far. Only the difference of two calls within one step has a meaning."""
        return self._before + self._clock() - self._since

    def target(self, request: Request) -> Requests[Done]:
        """Request a pass of the target. It is not metered, because the budget prices it by its rows."""
        self._before = self()
        try:
            return (yield request)
        finally:
            self._since = self._clock()  # another thread may go on, whose clock differs

    def draft(self, request: Request) -> Requests[Done]:
        """Request a pass of a draft. The sequence's share of it is metered."""
        done = yield from self.target(request)
        self._before += done.share * done.processor_seconds
        return done
