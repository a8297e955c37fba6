"""What passes cost: measured, and refined while running."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SLOPE_ROWS = (1, 4, 8, 32)  # attention is work per row, in tiles of a few
_BUDGET = 0.8  # seconds for one model
_PATIENCE = 3.0  # seconds, beyond which once must do: long passes vary less
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 15
_LEAST = 1e-6  # seconds of a pass
_BLEND = 0.05  # weight of a new observation, for passes of any size
_OWN_BLEND = 0.02  # and beyond that for passes of its own size


class PassCost:
    """T(n, c) of one model: processor seconds for a pass over n >= 1 rows behind c cells, the tokens they attend to.

    The time with no cells, and what a thousand of them add, are linear between the numbers of rows that were measured.

    Args:
        seconds: with no cells, by number of rows.
        slopes: seconds more for a thousand cells, by the same numbers of rows; none by default.
    """

    def __init__(self, seconds: Mapping[int, float], slopes: Mapping[int, float] | None = None) -> None:
        slopes = slopes or dict.fromkeys(seconds, 0.0)
        if len(seconds) == 1:
            # One measurement says nothing of the rise with rows: take them to be worked off one after the other.
            seconds, slopes = ({f * n: f * v for n, v in each.items() for f in (1, 2)} for each in (seconds, slopes))
        self._rows = tuple(sorted(seconds))
        self._knots = _rising([seconds[n] for n in self._rows])
        self._slopes = [slopes[n] for n in self._rows]
        self._scale = 1.0

    @property
    def seconds(self) -> dict[int, float]:
        """What passes with no cells take as things go now, by the numbers of rows that were measured."""
        return {n: self._scale * knot for n, knot in zip(self._rows, self._knots, strict=True)}

    @property
    def slopes(self) -> dict[int, float]:
        """What a thousand cells add to that."""
        return {n: self._scale * slope for n, slope in zip(self._rows, self._slopes, strict=True)}

    def __call__(self, num_rows: int, cells: float = 0) -> float:
        """Seconds for a pass over that many rows behind that many cells, as things go now."""
        i, along = _place(self._rows, num_rows)
        thousands = cells / 1000
        low = self._knots[i] + thousands * self._slopes[i]
        rise = self._knots[i + 1] + thousands * self._slopes[i + 1] - low
        if along > 1:
            rise = max(0.0, rise)
        return self._scale * (low + along * rise)

    def observe(self, num_rows: int, cells: float, seconds: float, share: float = 1.0) -> None:
        """Learn from a pass that was made anyway: machines get busy, and were when this was measured.

        Args:
            share: of the pass, that is the observer's: each of those that share it learns for all.
        """
        believed = self(num_rows, cells)
        change = surprise(seconds, believed)
        i, along = _place(self._rows, num_rows)
        along = min(along, 1.0)
        # The least change that explains it (normalized LMS): the slope's where there are many cells.
        thousands = cells / 1000
        norm = 1 + thousands**2
        for knot, weight in ((i, 1 - along), (i + 1, along)):
            own = _OWN_BLEND * share * weight * change
            self._knots[knot] *= 1 + own / norm
            more = own * believed / self._scale * thousands / norm
            self._slopes[knot] = max(0.0, self._slopes[knot] + more)
        self._scale *= 1 + _BLEND * share * change


@lru_cache(maxsize=1024)  # steps ask for the same few all the time
def _place(rows: tuple[int, ...], num_rows: int) -> tuple[int, float]:
    """The measurement before, and how far it is from there to the next; beyond the last one the line goes on."""
    i = max(0, min(bisect_right(rows, num_rows), len(rows) - 1) - 1)
    return i, (num_rows - rows[i]) / (rows[i + 1] - rows[i])


def surprise(seconds: float, believed: float) -> float:
    """By what share something took longer than believed, between -0.5 and 1."""
    # A pass that the system interrupted must not count for a hundred.
    return min(max(seconds / believed, 0.5), 2.0) - 1


def measure(
    run_pass: Callable[[int, int], None],
    *,
    most_rows: int = MEASURED_ROWS[-1],
    cells: int = 0,
    clock: Callable[[], float] = time.thread_time,
    wall: Callable[[], float] = time.perf_counter,
) -> PassCost:
    """Time passes of 1 to `most_rows` rows, in turn, for about a second; the shortest of each counts.

    Args:
        run_pass: makes a pass over that many rows behind that many cells.
        cells: how many of them to tell the slopes by, 0 for none.
        clock: what passes are timed by. wall: what bounds the time that this takes.
    """
    rows = [n for n in MEASURED_ROWS if n <= most_rows]
    deep = [n for n in rows if n in (*_SLOPE_ROWS, rows[-1])] if cells else []
    # Up and down: so each number of rows follows its neighbours, not what large passes left in the caches.
    passes = [(n, 0) for n in rows] + [(n, cells) for n in reversed(deep)]
    for each in passes[len(rows) - 1 : len(rows) + 1]:
        run_pass(*each)  # the largest: what is made at first is made then
    best = dict.fromkeys(passes, math.inf)
    begin = wall()
    for done in range(_MOST_ROUNDS):
        spent = wall() - begin
        if spent > _PATIENCE or (spent > _BUDGET and done >= _LEAST_ROUNDS):
            break
        for each in passes:
            start = clock()
            run_pass(*each)
            best[each] = min(best[each], max(clock() - start, _LEAST))  # clocks may be coarse
        passes.reverse()
    seconds = dict(zip(rows, _rising([best[n, 0] for n in rows]), strict=True))
    if not cells:
        return PassCost(seconds)
    behind = zip(deep, _rising([best[n, cells] for n in deep]), strict=True)
    slopes = [max(0.0, took - seconds[n]) / (cells / 1000) for n, took in behind]
    return PassCost(seconds, dict(zip(rows, np.interp(rows, deep, slopes).tolist(), strict=True)))


def _rising(values: list[float]) -> list[float]:
    """The same where fewer rows never cost more: what says so is noise, and noise only ever adds."""
    for i in reversed(range(len(values) - 1)):
        values[i] = min(values[i], values[i + 1])
    return values
