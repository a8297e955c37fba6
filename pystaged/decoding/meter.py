"""What drafting costs a text: processor time."""

from __future__ import annotations

import time
from collections.abc import Callable

from pystaged.decoding.requests import Done, Request, Requests


class Meter:
    """Processor seconds of a text's own Python and of its draft's passes; it stands still while others work.

    Processor time, and not the wall's, because what other programs take of the machine is not what drafting costs.

    Args:
        clock: processor seconds of the calling thread.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._since, self._before = clock(), 0.0

    def __call__(self) -> float:
        """Seconds so far; only differences mean anything, and only between calls without a step's end in between."""
        return self._before + self._clock() - self._since

    def target(self, request: Request) -> Requests[Done]:
        """Ask for a pass of the target, which is not metered: the account prices it by its rows."""
        self._before = self()
        try:
            return (yield request)
        finally:
            self._since = self._clock()  # perhaps in another thread, whose clock is another one

    def draft(self, request: Request) -> Requests[Done]:
        """Ask for a pass of a draft; the text's share of it is metered."""
        done = yield from self.target(request)
        self._before += done.share * done.processor_seconds
        return done
