"""Turns off what does not pay, and tries it again now and then."""

from __future__ import annotations

import math

_TRIAL = 4  # uses before a verdict
_BLEND = 0.2  # weight of a new observation
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 512  # uses to let pass
_STALE = 128  # times passed over after which an average says nothing any more


class Switch:
    """On while the average gain is positive. A failed trial is followed by a pause, each twice as long as the last.

    Args:
        paused: begin with a pause, for what is not expected to pay.
    """

    def __init__(self, *, paused: bool = False) -> None:
        self._gain = 0.0
        self._uses = 0
        self._passed_over = 0
        self._pause = _LONGEST_PAUSE // 4 if paused else _SHORTEST_PAUSE
        self._left = self._pause if paused else 0

    def is_on(self) -> bool:
        """Ask before each use; a pause counts down with every time of asking."""
        if self._left > 0:
            self._left -= 1
            return False
        self._passed_over += 1
        return True

    @property
    def appeal(self) -> float:
        """What to prefer among several that are on: the average gain, infinite while that is not known."""
        return math.inf if self._uses < _TRIAL or self._passed_over > _STALE else self._gain

    def record(self, gain: float) -> None:
        """What a use gained, in any unit; negative for a loss."""
        self._passed_over = 0
        self._uses += 1
        self._gain += (gain - self._gain) * max(_BLEND, 1 / self._uses)
        if self._uses < _TRIAL:
            return
        if self._gain < 0:
            self._left = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._uses = 0
            self._gain = 0.0
        else:
            self._pause = _SHORTEST_PAUSE
