"""Time of a pass by its rows and past length: a few samples at loading, and refined while running."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SAMPLING = 0.3  # seconds of sampling a model's passes at loading
_FIRST = 3.0  # samples of a number of rows of which the fastest counts
_RISE = 0.1  # time of another row where none is sampled, as a share of one row's pass
_PIECE = 32  # rows of the passes that read a prompt, as assumed for their time
_LEAST = 1e-6  # shortest time of a pass, in seconds: a coarse clock may show 0
_BLEND = 0.05  # weight of a new observation, for passes of any size
_OWN_BLEND = 0.02  # additional weight, for passes of its own size
_MOST = 1.25  # factor by which a new observation may differ, so that one stalled pass moves nothing


class PassCost:
    """T(n, c) of one model: processor seconds of a pass over n >= 1 rows that attend to c cells, the past length.

    The time without a past, and its increase per thousand cells, are interpolated linearly between the known n. Of an
    n's first samples the fastest counts, as noise only adds time; then a clipped average that follows lasting changes.
    An n without a sample lies on the line through its neighbours; its first is clipped, too, if a larger n has one.

    Attributes:
        seconds: time without a past, by number of rows, ascending.
        slopes: more seconds per thousand cells, by the same numbers of rows; by default 0.
        samples: number of samples behind `seconds`, up to those that count first; by default enough.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        slopes: Mapping[int, float] | None = None,
        samples: Mapping[int, float] | None = None,
    ) -> None:
        slopes = slopes or dict.fromkeys(seconds, 0.0)
        if len(seconds) == 1:
            # With one measurement, assume that the time is proportional to the number of rows.
            seconds, slopes = ({f * n: f * v for n, v in each.items() for f in (1, 2)} for each in (seconds, slopes))
        self._rows = tuple(sorted(seconds))
        self.seconds, self.slopes = ({n: each[n] for n in self._rows} for each in (seconds, slopes))
        self.samples = dict.fromkeys(self._rows, _FIRST) | dict(samples or {})
        self._fill()
        # Fewer rows never cost more, and noise only adds time.
        falling = np.minimum.accumulate([self.seconds[n] for n in reversed(self._rows)])
        self.seconds = dict(zip(self._rows, falling[::-1].tolist(), strict=True))

    def share(self, share: float) -> PassCost:
        """The costs of a model whose passes take a share of these, as is assumed until the first of them."""
        seconds, slopes = ({n: share * value for n, value in each.items()} for each in (self.seconds, self.slopes))
        return PassCost(seconds, slopes, dict.fromkeys(seconds, 0.0))

    def __call__(self, num_rows: int, cells: float = 0) -> float:
        """Current estimate of the seconds of a pass over `num_rows` rows with a past of `cells` tokens."""
        below, above, along = _place(self._rows, num_rows)
        thousands = cells / 1000
        low = self.seconds[below] + thousands * self.slopes[below]
        rise = self.seconds[above] + thousands * self.slopes[above] - low
        return low + along * (max(0.0, rise) if along > 1 else rise)

    def prefill(self, tokens: int, past: int) -> float:
        """Seconds to read a number of tokens after a past of so many."""
        return self(_PIECE, past + tokens / 2) * tokens / _PIECE

    def observe(self, num_rows: int, cells: float, seconds: float, share: float = 1.0) -> None:
        """Refine the estimate by the time of a pass, because the load of a machine varies.

        Args:
            share: weight of the observation: each text of a batch reports the same pass with its share of the rows.
        """
        seconds, believed = max(seconds, _LEAST), self(num_rows, cells)
        late, change = seconds / believed - 1, min(max(seconds / believed, 1 / _MOST), _MOST) - 1
        below, above, along = _place(self._rows, num_rows)
        along = min(along, 1.0)
        # The least change that explains the time (normalized LMS); with many cells, it is mostly the slope's.
        thousands = cells / 1000
        norm = 1 + thousands**2
        first = False
        for n, weight in ((below, 1 - along), (above, along)):
            own, samples = _OWN_BLEND * share * weight * change, self.samples[n]
            if weight >= 0.5 and samples < _FIRST:
                beyond = not any(self.samples[m] for m in self._rows if m >= n)  # no such number of rows has a sample
                first, own = True, late if late < 0 or beyond else 0.0 if samples else change
                self.samples[n] = min(samples + weight * share, _FIRST)
            self.seconds[n] = max(_LEAST, self.seconds[n] + own * believed / norm)
            self.slopes[n] = max(0.0, self.slopes[n] + own * believed * thousands / norm)
        if first:
            self._fill()
            return
        for n in self._rows:
            self.seconds[n] *= 1 + _BLEND * share * change
            self.slopes[n] *= 1 + _BLEND * share * change

    def _fill(self) -> None:
        """Reckon the times of numbers of rows that have no sample from those that have."""
        if not (rows := [n for n in self._rows if self.samples[n]]):
            return
        last, end = self.seconds[rows[-1]], self._rows[-1] + 1
        rise = _RISE * last / (1 + _RISE * (rows[-1] - 1))
        known = [*(self.seconds[n] for n in rows), last + (end - rows[-1]) * rise]
        self.seconds = dict(zip(self._rows, np.interp(self._rows, [*rows, end], known).tolist(), strict=True))


@lru_cache(maxsize=1024)  # each step needs the same few values
def _place(rows: tuple[int, ...], num_rows: int) -> tuple[int, int, float]:
    """The measured numbers below and above, and the fraction of the way between them; above 1 beyond the last one."""
    i = max(0, min(bisect_right(rows, num_rows), len(rows) - 1) - 1)
    return rows[i], rows[i + 1], (num_rows - rows[i]) / (rows[i + 1] - rows[i])


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
    wanted = [(1, 0), (8, 0), (rows[-1], 0), (8, cells), (rows[-1], cells), (1, cells)]
    wanted += [(n, 0) for n in (4, 16, 2, 24, 12, 6, 3)]
    order = [(n, past) for n, past in dict.fromkeys(wanted) if n in rows]
    took: dict[tuple[int, int], list[float]] = {each: [] for each in order}
    end = clock() + seconds
    for n, past in order * int(_FIRST):
        expected = took[n, past] or [(1 + _RISE * (n - 1)) * alone for alone in took[1, 0]]
        if not expected or clock() + min(expected) <= end:
            took[n, past].append(max(run_pass(n, past), _LEAST))
    samples = {n: len(took[n, 0]) for n in rows}
    cost = PassCost({n: min(took[n, 0], default=0.0) for n in rows}, samples=samples)
    slopes = {n: max(0.0, min(took[n, past]) - cost(n)) / (cells / 1000) for n, past in order if past and took[n, past]}
    if slopes:
        known, slope = next(iter(slopes.items()))
        for n in (1, rows[-1]):
            # Attention takes each row about as long; one row's difference is mostly noise.
            slopes.setdefault(n, slope * n / known if known > 1 else slope)
        known_rows = sorted(slopes)
        filled = np.interp(list(cost.slopes), known_rows, [slopes[n] for n in known_rows])
        cost.slopes = dict(zip(cost.slopes, filled.tolist(), strict=True))
    return cost
