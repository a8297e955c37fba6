"""Time of a pass by its rows and past length, in a mixture also by the experts that its rows use: a few samples at
loading, and refined while running."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.tree import Node, Stage

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SAMPLING = 0.3  # seconds of sampling a model's passes at loading
_FIRST = 3.0  # samples of a number of rows of which the fastest counts
_RISE = 0.1  # time of another row where none is sampled, as a share of one row's pass
_LEAST = 1e-6  # shortest time of a pass, in seconds: a coarse clock may show 0
_BLEND = 0.05  # weight of a new observation, for passes of any size, and of distinct experts
_OWN_BLEND = 0.02  # additional weight, for passes of its own size
_MOST = 1.25  # factor by which a new observation may differ, so that one stalled pass moves nothing
_DEEPEST = 8  # tokens of the longest chain by which devices are compared
# Of mixtures of experts.
_PRIOR, _KEPT = 50.0, 0.998  # weight of the first price, in passes; factor of all earlier weights at each pass
_USUAL = 0.1  # assumed difference of those passes from the usual number of experts, as a share of one row's
_PRICE = 0.7  # assumed time of a row's experts, as a share of its pass
_LEAST_TIME = 0.25  # least time of a pass, as a share of one that uses the usual number
_KNOWN = 8192  # most tokens whose experts are kept
_COMPARED = 8  # guesses that are compared for each place in a tree


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
            share: weight of the observation: each text of a batch reports the same pass with its share of the rows.
            experts: as for the estimate.
        """
        del experts
        seconds, believed = max(seconds, _LEAST), self(num_rows, cells)
        late, change = seconds / believed - 1, surprise(seconds, believed, _MOST)
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
        for k, n in enumerate(self._rows):
            if not self._samples[k]:
                above = bisect_right(known, k)
                low = known[max(above, 1) - 1]
                m, took = self._rows[low], self._knots[low]
                rise = _RISE * took / (1 + _RISE * (m - 1))
                if 0 < above < len(known):
                    high = known[above]
                    rise = (self._knots[high] - took) / (self._rows[high] - m)
                self._knots[k] = took + (n - m) * rise


class ExpertCost(PassCost):
    """T(n, c, e) of a mixture of experts: seconds of a pass that uses e distinct experts, summed over layers.

    A pass over n rows of a text usually uses U(n) experts, which is learnt. T(n, c) is the time of such a pass, and
    T(n, c, e) = T(n, c) + price * (e - U(n)), where the price is learnt by least squares.

    Args:
        seconds, slopes, samples: T(n, c), as in PassCost.
        unions: U by numbers of rows; U(1) is the experts of a row.
        price: seconds of an expert; assumed by default.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        slopes: Mapping[int, float] | None,
        unions: Mapping[int, float],
        price: float | None = None,
        samples: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__(seconds, slopes, samples)
        known = sorted(unions)
        if price is None:
            price = _PRICE * seconds[known[0]] / unions[known[0]]
        self._unions: list[float] = np.interp(self._rows, known, [unions[n] for n in known]).tolist()
        self._price = price
        # Sums of squares, of differences in experts and of those with differences in seconds, each relative to T.
        self._squares = _PRIOR * (_USUAL * self._unions[0] / seconds[min(seconds)]) ** 2
        self._products = price * self._squares
        self._masks: dict[int, int] = {}  # the experts that tokens used last, a bit for each; the latest token last

    @property
    def price(self) -> float:
        """Current estimate of the seconds of an expert."""
        return self._scale * self._price

    @property
    def unions(self) -> dict[int, float]:
        """Current estimate of U, by numbers of rows."""
        return dict(zip(self._rows, self._unions, strict=True))

    def union(self, num_rows: int) -> float:
        """Distinct experts that `num_rows` rows of a text usually use."""
        i, along = place(self._rows, num_rows)
        low = self._unions[i]
        return low + min(along, 1.0) * (self._unions[i + 1] - low)

    def __call__(self, num_rows: int, cells: float = 0, experts: float | None = None) -> float:
        usual = super().__call__(num_rows, cells)
        if experts is None:
            return usual
        return max(_LEAST_TIME * usual, usual + self.price * (experts - self.union(num_rows)))

    def observe(
        self, num_rows: int, cells: float, seconds: float, share: float = 1.0, experts: int | None = None
    ) -> None:
        if experts is not None and num_rows <= self._rows[-1]:
            usual, more = super().__call__(num_rows, cells), experts - self.union(num_rows)
            late = surprise(seconds, usual)
            kept = 1 - share * (1 - _KEPT)
            self._squares = kept * self._squares + share * (more * self._scale / usual) ** 2
            self._products = kept * self._products + share * late * more * self._scale / usual
            self._price = min(max(0.0, self._products / self._squares), self._knots[0] / self._unions[0])
            seconds = max(seconds - self.price * more, _LEAST_TIME * usual)
            i, along = place(self._rows, num_rows)
            for knot, weight in ((i, 1 - along), (i + 1, along)):
                change = _BLEND * share * weight * more
                self._unions[knot] += change
                self._knots[knot] += self._price * change
        super().observe(num_rows, cells, seconds, share)

    def learn(self, tokens: Sequence[int], used: NDArray[np.uint8]) -> None:
        """Note the experts of rows, as in Session.experts, by their tokens."""
        for token, bits in zip(tokens, used, strict=False):
            self._masks.pop(token, None)
            self._masks[token] = int.from_bytes(bits.tobytes(), "little")
        if len(self._masks) > _KNOWN:
            self._masks = dict(list(self._masks.items())[-_KNOWN // 2 :])

    def order(
        self, nodes: Sequence[Node], ranked: Sequence[int], cells: int, most: int
    ) -> tuple[list[int], list[float]]:
        """The best guesses of a tree, by probability per predicted seconds.

        Args:
            nodes: of the tree, its root first.
            ranked: the guesses, the likeliest first.
            cells: past length.
            most: most guesses to return.

        Returns:
            Guesses that may pay, parents before children; and the distinct experts that the root and the first n of
            them are predicted to use, n from 0 on.
        """
        seen, experts = self._masks.get(nodes[0].token, 0), [self.union(1)]
        order, placed, left = list[int](), {0}, list(ranked)
        before = token = self(1, cells)
        price = self.price
        while left and len(order) < most:
            rows = len(order) + 2
            usual, after = self.union(rows) - self.union(rows - 1), self(rows, cells)
            if nodes[left[0]].score * token < after - before - price * usual:
                break  # even a row without experts of its own costs more than it can gain
            best, best_rate, best_more = 0, -1.0, 0.0
            for node in islice((node for node in left if nodes[node].parent in placed), _COMPARED):
                mask, more = self._masks.get(nodes[node].token), usual
                if mask is not None:
                    more = (usual + (mask & ~seen).bit_count()) / 2  # mean of usual rows and of the token's last use
                rate = nodes[node].score / max(1e-9, after - before + price * (more - usual))
                if nodes[node].stage is Stage.GRAMMAR:  # forced tokens come first
                    rate = math.inf
                if rate > best_rate:
                    best, best_rate, best_more = node, rate, more
            order.append(best)
            placed.add(best)
            left.remove(best)
            seen |= self._masks.get(nodes[best].token, 0)
            experts.append(experts[-1] + best_more)
            before = after
        return order, experts


@lru_cache(maxsize=1024)  # each step needs the same few values
def place(rows: tuple[int, ...], num_rows: int) -> tuple[int, float]:
    """Index of the measurement below, and the fraction of the way to the next; above 1 beyond the last one."""
    i = max(0, min(bisect_right(rows, num_rows), len(rows) - 1) - 1)
    return i, (num_rows - rows[i]) / (rows[i + 1] - rows[i])


def surprise(seconds: float, believed: float, most: float = 2.0) -> float:
    """Relative error of an estimate: seconds / believed - 1, where the quotient is clipped to 1 / most..most."""
    # One interrupted pass must not outweigh a hundred others.
    return min(max(seconds / believed, 1 / most), most) - 1


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


def chain_speedup(rate: float, price: float, extra: Callable[[int], float], places: int = 1) -> float:
    """Speedup over plain decoding of a chain of guesses of the best length.

    Args:
        rate: probability that a guess is right.
        price: tokens that drafting `places` guesses costs.
        extra: tokens that a pass over the given number of rows costs beyond a plain step.
    """
    tokens, most = 1.0, 0.0
    for depth in range(1, _DEEPEST + 1):
        tokens += rate**depth
        speedup = tokens / (1 + extra(1 + depth) + -(-depth // places) * price)
        if speedup <= most:
            break
        most = speedup
    return most
