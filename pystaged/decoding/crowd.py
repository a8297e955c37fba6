"""The texts that share passes with one text, as it sees them."""

from __future__ import annotations

import time
from collections.abc import Callable


class Crowd:
    """Who else is in a text's passes, and the text's own time. A text by itself is a crowd of one.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.texts = 1  # that are stepped together, this one included
        self.rows = 0  # of the others' trees, roots included, in the next pass of the target
        self.tokens = 0.0  # that the others are expected to gain by it
        self._clock = clock
        self._elsewhere = 0.0

    def clock(self) -> float:
        """Seconds of the text's own time: it stands still for others' work, and for their part of shared passes."""
        return self._clock() - self._elsewhere

    def wall(self) -> float:
        """Seconds of everybody's."""
        return self._clock()

    def pass_over(self, seconds: float) -> None:
        """Leave out so many seconds that were others'."""
        self._elsewhere += seconds
