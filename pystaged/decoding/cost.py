"""Time of a pass by its rows and past length: a few samples at loading, and refined while running."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate

import numpy as np

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SAMPLING = 0.3  # seconds of sampling a model's passes at loading
_FIRST = 3.0  # samples of a number of rows of which the fastest counts
_RISE = 0.1  # time of another row where none is sampled, as a share of one row's pass
_LEAST = 1e-6  # shortest time of a pass, in seconds: a coarse clock may show 0
_BLEND = 0.05  # weight of a new observation, for passes of any size
_OWN_BLEND = 0.02  # additional weight, for passes of its own size
_MOST = 1.25  # factor by which a new observation may differ, so that one stalled pass moves nothing


class PassCost:
    """T(n, c) of one model: processor seconds of a pass over n >= 1 rows that attend to c cells, the past length.

    The time without a past, and its increase per thousand cells, are interpolated linearly between the known n. The
    fastest of the first samples of an n counts, because noise only adds time; then a clipped average, which follows
    lasting changes. An n without a sample lies on the line through its neighbours.

    Args:
        seconds: time without a past, by number of rows.
        slopes: more seconds per thousand cells, by the same numbers of rows; 0 by default.
        samples: number of samples behind `seconds`, by the same numbers of rows; enough by default.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        slopes: Mapping[int, float] | None = None,
        samples: Mapping[int, float] | None = None,
    ) -> None:
        slopes = slopes or dict.fromkeys(seconds, 0.0)
        samples = samples or dict.fromkeys(seconds, _FIRST)
        if len(seconds) == 1:
            # With one measurement, assume that the time is proportional to the number of rows.
            seconds, slopes = ({f * n: f * v for n, v in each.items() for f in (1, 2)} for each in (seconds, slopes))
        self._rows = tuple(sorted(seconds))
        self._knots = [seconds[n] for n in self._rows]
        self._slopes = [slopes[n] for n in self._rows]
        self._samples = [samples.get(n, _FIRST) for n in self._rows]
        self._scale = 1.0
        self._fill()
        # Fewer rows never cost more, and noise only adds time.
        self._knots = list(accumulate(reversed(self._knots), min))[::-1]

    @property
    def seconds(self) -> dict[int, float]:
        """Current estimate of the time without a past, in seconds by number of rows."""
        return {n: self._scale * knot for n, knot in zip(self._rows, self._knots, strict=True)}

    @property
    def slopes(self) -> dict[int, float]:
        """Current estimate of the increase per thousand cells, in seconds by number of rows."""
        return {n: self._scale * slope for n, slope in zip(self._rows, self._slopes, strict=True)}

    @property
    def samples(self) -> dict[int, float]:
        """Number of samples by number of rows, up to those that count first."""
        return dict(zip(self._rows, self._samples, strict=True))

    def share(self, share: float) -> PassCost:
        """The costs of a model whose passes take a share of these, as is assumed until the first of them."""
        seconds, slopes = ({n: share * value for n, value in each.items()} for each in (self.seconds, self.slopes))
        return PassCost(seconds, slopes, dict.fromkeys(seconds, 0.0))

    def __call__(self, num_rows: int, cells: float = 0) -> float:
        """Current estimate of the seconds of a pass over `num_rows` rows with a past of `cells` tokens."""
        i, along = place(self._rows, num_rows)
        thousands = cells / 1000
        low = self._knots[i] + thousands * self._slopes[i]
        rise = self._knots[i + 1] + thousands * self._slopes[i + 1] - low
        if along > 1:
            rise = max(0.0, rise)
        return self._scale * (low + along * rise)

    def observe(self, num_rows: int, cells: float, seconds: float, share: float = 1.0) -> None:
        """Refine the estimate by the time of a pass, because the load of a machine varies.

        Args:
            share: weight of the observation: each text of a batch reports the same pass with its share of the rows.
        """
        seconds, believed = max(seconds, _LEAST), self(num_rows, cells)
        late, change = seconds / believed - 1, min(max(seconds / believed, 1 / _MOST), _MOST) - 1
        i, along = place(self._rows, num_rows)
        along = min(along, 1.0)
        # The least change that explains the time (normalized LMS); with many cells, it is mostly the slope's.
        thousands = cells / 1000
        norm = 1 + thousands**2
        first = False
        for knot, weight in ((i, 1 - along), (i + 1, along)):
            samples = self._samples[knot]
            own = _OWN_BLEND * share * weight * change
            if weight >= 0.5 and samples < _FIRST:
                first, own = True, late if late < 0 or not samples else 0.0
                self._samples[knot] = min(samples + weight * share, _FIRST)
            self._knots[knot] *= 1 + own / norm
            more = own * believed / self._scale * thousands / norm
            self._slopes[knot] = max(0.0, self._slopes[knot] + more)
        if first:
            self._fill()
        else:
            self._scale *= 1 + _BLEND * share * change

    def _fill(self) -> None:
        """Reckon the times of numbers of rows that have no sample from those that have."""
        known = [k for k, samples in enumerate(self._samples) if samples]
        if not known:
            return
        rows, knots, end = [self._rows[k] for k in known], [self._knots[k] for k in known], self._rows[-1] + 1
        rise = _RISE * knots[-1] / (1 + _RISE * (rows[-1] - 1))
        self._knots = np.interp(self._rows, [*rows, end], [*knots, knots[-1] + (end - rows[-1]) * rise]).tolist()


@lru_cache(maxsize=1024)  # each step needs the same few values
def place(rows: tuple[int, ...], num_rows: int) -> tuple[int, float]:
    """Index of the measurement below, and the fraction of the way to the next; above 1 beyond the last one."""
    i = max(0, min(bisect_right(rows, num_rows), len(rows) - 1) - 1)
    return i, (num_rows - rows[i]) / (rows[i + 1] - rows[i])


def measure(
    run_pass: Callable[[int, int], float],
    *,
    most_rows: int = MEASURED_ROWS[-1],
    cells: int = 0,
    seconds: float = SAMPLING,
    clock: Callable[[], float] = time.perf_counter,
) -> PassCost:
    """Sample passes of 1 to `most_rows` rows in turn, as many as the time allows, those first that tell most.

    Args:
        run_pass: makes a pass over the given number of rows with the given past length; returns its seconds.
        cells: past length for the slopes; 0 samples none.
        seconds: time of sampling. A pass that would not end in it is left out, but not the first.
        clock: seconds, limits the time of sampling.
    """
    rows = [n for n in MEASURED_ROWS if n <= most_rows]
    deep = [(n, cells) for n in dict.fromkeys((8, rows[-1], 1)) if n in rows] if cells else []
    order = [*dict.fromkeys((n, 0) for n in (1, 8, rows[-1]) if n in rows), *deep]
    order += [(n, 0) for n in (4, 16, 2, 24, 12, 6, 3) if n in rows and (n, 0) not in order]
    took: dict[tuple[int, int], list[float]] = {each: [] for each in order}
    end = clock() + seconds
    for n, past in order * int(_FIRST):
        expected = took[n, past] or [(1 + _RISE * (n - 1)) * alone for alone in took[1, 0]]
        if not expected or clock() + min(expected) <= end:
            took[n, past].append(max(run_pass(n, past), _LEAST))
    samples = {n: len(took[n, 0]) for n in rows}
    cost = PassCost({n: min(took[n, 0], default=0.0) for n in rows}, samples=samples)
    slopes = {n: max(0.0, min(took[n, past]) - cost(n)) / (cells / 1000) for n, past in deep if took[n, past]}
    if not slopes:
        return cost
    known, slope = next(iter(slopes.items()))
    for n in (1, rows[-1]):
        # Attention takes each row about as long; one row's difference is mostly noise.
        slopes.setdefault(n, slope * n / known if known > 1 else slope)
    filled = np.interp(rows, sorted(slopes), [slopes[n] for n in sorted(slopes)]).tolist()
    return PassCost(cost.seconds, dict(zip(rows, filled, strict=True)), samples)
