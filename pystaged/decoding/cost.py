"""What passes cost: measured once, refined while running."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_BUDGET = 0.8  # seconds for one model
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 15
_BLEND = 0.05  # weight of a new observation, for passes of any size
_OWN_BLEND = 0.02  # and beyond that for passes of its own size


class PassCost:
    """T(n) of one model: seconds for a pass over n >= 1 rows, linear between the numbers of rows that were measured.

    Args:
        seconds: by number of rows.
    """

    def __init__(self, seconds: dict[int, float]) -> None:
        if len(seconds) == 1:
            # One measurement says nothing of the slope: take rows to be worked off one after the other.
            seconds = {factor * n: factor * value for n, value in seconds.items() for factor in (1, 2)}
        self._rows = sorted(seconds)
        self._knots = [seconds[n] for n in self._rows]
        # Fewer rows never cost more: what says so is noise, and noise only ever adds.
        for i in reversed(range(len(self._knots) - 1)):
            self._knots[i] = min(self._knots[i], self._knots[i + 1])
        self._scale = 1.0

    @property
    def seconds(self) -> dict[int, float]:
        """What passes take as things go now, by the numbers of rows that were measured."""
        return {n: self._scale * knot for n, knot in zip(self._rows, self._knots, strict=True)}

    def __call__(self, num_rows: int) -> float:
        """Seconds for a pass over that many rows, as things go now."""
        i, share = self._place(num_rows)
        low, high = self._knots[i], self._knots[i + 1]
        rise = high - low if share <= 1 else max(0.0, high - low)
        return self._scale * (low + share * rise)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a pass that was made anyway: contexts grow, machines get busy, and were when this was measured."""
        change = surprise(seconds, self(num_rows))
        i, share = self._place(num_rows)
        share = min(share, 1.0)
        self._scale *= 1 + _BLEND * change
        self._knots[i] *= 1 + _OWN_BLEND * (1 - share) * change
        self._knots[i + 1] *= 1 + _OWN_BLEND * share * change

    def _place(self, num_rows: int) -> tuple[int, float]:
        """The measurement before, and how far it is from there to the next; beyond the last one the line goes on."""
        i = max(0, min(bisect_right(self._rows, num_rows), len(self._rows) - 1) - 1)
        return i, (num_rows - self._rows[i]) / (self._rows[i + 1] - self._rows[i])


def surprise(seconds: float, believed: float) -> float:
    """By what share something took longer than believed, between -0.5 and 1."""
    # One that the scheduler interrupted must not count for a hundred.
    return min(max(seconds / believed, 0.5), 2.0) - 1


def measure(
    run_pass: Callable[[int], None],
    *,
    most_rows: int = MEASURED_ROWS[-1],
    clock: Callable[[], float] = time.perf_counter,
) -> PassCost:
    """Time passes of 1 to `most_rows` rows, in turn, for about a second; the shortest of each counts.

    Args:
        run_pass: makes a pass over that many rows.
        clock: seconds.
    """
    rows = [n for n in MEASURED_ROWS if n <= most_rows]
    for n in rows:
        run_pass(n)
    seconds = dict.fromkeys(rows, math.inf)
    begin = clock()
    for done in range(_MOST_ROUNDS):
        if done >= _LEAST_ROUNDS and clock() - begin > _BUDGET:
            break
        # Down and up again: so each number of rows follows its neighbours, not what large passes left in the caches.
        rows.reverse()
        for n in rows:
            start = clock()
            run_pass(n)
            seconds[n] = min(seconds[n], clock() - start)
    return PassCost(seconds)
