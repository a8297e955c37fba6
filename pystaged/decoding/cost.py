"""Time of a pass by its rows and past length: measured once, and refined while running."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import lru_cache
from statistics import median_low

import numpy as np

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SLOPE_ROWS = (1, 4, 8, 32)  # few are enough: attention takes about the same time for each row
_BUDGET = 0.8  # seconds of measuring one model
_PATIENCE = 3.0  # seconds after which one round must do: long passes vary less
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 15
_LEAST = 1e-6  # shortest time of a pass, in seconds
_BLEND = 0.05  # weight of a new observation, for passes of any size; the first ones of a process weigh more
_OWN_BLEND = 0.02  # additional weight, for passes of its own size


class PassCost:
    """T(n, c) of one model: processor seconds of a pass over n >= 1 rows that attend to c cells, the past length.

    The time without a past, and its increase per thousand cells, are interpolated linearly between the measured n.

    Args:
        seconds: time without a past, by number of rows.
        slopes: more seconds per thousand cells, by the same numbers of rows; 0 by default.
    """

    def __init__(self, seconds: Mapping[int, float], slopes: Mapping[int, float] | None = None) -> None:
        slopes = slopes or dict.fromkeys(seconds, 0.0)
        if len(seconds) == 1:
            # With one measurement, assume that the time is proportional to the number of rows.
            seconds, slopes = ({f * n: f * v for n, v in each.items() for f in (1, 2)} for each in (seconds, slopes))
        self._rows = tuple(sorted(seconds))
        self._knots = _rising([seconds[n] for n in self._rows])
        self._slopes = [slopes[n] for n in self._rows]
        self._scale = 1.0
        self._observed = 0.0  # passes

    @property
    def seconds(self) -> dict[int, float]:
        """Current estimate of the time without a past, in seconds by measured number of rows."""
        return {n: self._scale * knot for n, knot in zip(self._rows, self._knots, strict=True)}

    @property
    def slopes(self) -> dict[int, float]:
        """Current estimate of the increase per thousand cells, in seconds by measured number of rows."""
        return {n: self._scale * slope for n, slope in zip(self._rows, self._slopes, strict=True)}

    def __call__(self, num_rows: int, cells: float = 0, experts: float | None = None) -> float:
        """Current estimate of the seconds of a pass over `num_rows` rows with a past of `cells` tokens. experts: for an
        ExpertCost, the distinct experts that the pass uses."""
        del experts
        i, along = place(self._rows, num_rows)
        thousands = cells / 1000
        low = self._knots[i] + thousands * self._slopes[i]
        rise = self._knots[i + 1] + thousands * self._slopes[i + 1] - low
        if along > 1:
            rise = max(0.0, rise)
        return self._scale * (low + along * rise)

    def observe(
        self, num_rows: int, cells: float, seconds: float, share: float = 1.0, experts: int | None = None
    ) -> None:
        """Refine the estimate by the time of a pass, because the load of a machine varies.

        Args:
            share: weight of the observation: each sequence of a batch reports the same pass with its share of the rows.
            experts: as for the estimate.
        """
        del experts
        believed = self(num_rows, cells)
        change = surprise(seconds, believed)
        i, along = place(self._rows, num_rows)
        along = min(along, 1.0)
        # The least change that explains the time (normalized LMS); with many cells, it is mostly the slope's.
        thousands = cells / 1000
        norm = 1 + thousands**2
        for knot, weight in ((i, 1 - along), (i + 1, along)):
            own = _OWN_BLEND * share * weight * change
            self._knots[knot] *= 1 + own / norm
            more = own * believed / self._scale * thousands / norm
            self._slopes[knot] = max(0.0, self._slopes[knot] + more)
        self._observed += share
        self._scale *= 1 + max(_BLEND, 1 / (1 + self._observed)) * share * change


@lru_cache(maxsize=1024)  # each step needs the same few values
def place(rows: tuple[int, ...], num_rows: int) -> tuple[int, float]:
    """Index of the measurement below, and the fraction of the way to the next; above 1 beyond the last one."""
    i = max(0, min(bisect_right(rows, num_rows), len(rows) - 1) - 1)
    return i, (num_rows - rows[i]) / (rows[i + 1] - rows[i])


def surprise(seconds: float, believed: float) -> float:
    """Relative error of an estimate: seconds / believed - 1, clipped to -0.5..1."""
    # One interrupted pass must not outweigh a hundred others.
    return min(max(seconds / believed, 0.5), 2.0) - 1


def measure(
    run_pass: Callable[[int, int], None],
    *,
    most_rows: int = MEASURED_ROWS[-1],
    cells: int = 0,
    clock: Callable[[], float] = time.thread_time,
    wall: Callable[[], float] = time.perf_counter,
) -> PassCost:
    """Time passes of 1 to `most_rows` rows in turn for about a second; the median of each counts.

    Medians, not minima: while other programs run, a pass takes about twice as long if its threads do not run at the
    same time. The minimum for one number of rows may be a short time and that for the next a long one.

    Args:
        run_pass: makes a pass over the given number of rows with the given past length.
        cells: past length for the slopes; 0 measures none.
        clock: seconds, times the passes. wall: seconds, limits the time of measuring.
    """
    rows = [n for n in MEASURED_ROWS if n <= most_rows]
    deep = [n for n in rows if n in (*_SLOPE_ROWS, rows[-1])] if cells else []
    # Up and down, so that no small pass runs with the caches that a large one left.
    passes = [(n, 0) for n in rows] + [(n, cells) for n in reversed(deep)]
    for each in passes[len(rows) - 1 : len(rows) + 1]:
        run_pass(*each)  # the largest ones, so that first-use allocations are not timed
    times: dict[tuple[int, int], list[float]] = {each: [] for each in passes}
    begin = wall()
    for done in range(_MOST_ROUNDS):
        spent = wall() - begin
        if spent > _PATIENCE or (spent > _BUDGET and done >= _LEAST_ROUNDS):
            break
        for each in passes:
            start = clock()
            run_pass(*each)
            times[each].append(max(clock() - start, _LEAST))  # a coarse clock may show 0
        passes.reverse()
    usual = {each: median_low(took) for each, took in times.items()}
    seconds = dict(zip(rows, _rising([usual[n, 0] for n in rows]), strict=True))
    if not cells:
        return PassCost(seconds)
    behind = zip(deep, _rising([usual[n, cells] for n in deep]), strict=True)
    slopes = [max(0.0, took - seconds[n]) / (cells / 1000) for n, took in behind]
    return PassCost(seconds, dict(zip(rows, np.interp(rows, deep, slopes).tolist(), strict=True)))


def _rising(values: list[float]) -> list[float]:
    """Lower each value to the least of those after it: fewer rows never cost more, and noise only adds time."""
    for i in reversed(range(len(values) - 1)):
        values[i] = min(values[i], values[i + 1])
    return values
