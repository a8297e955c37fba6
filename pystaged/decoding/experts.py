"""Costs of a mixture's passes, by the experts that their rows use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.cost import PassCost, place, surprise
from pystaged.decoding.tree import Node, Stage

_BLEND = 0.05  # weight of a new observation of distinct experts
_PRIOR, _KEPT = 50.0, 0.998  # weight of the first price, in passes; factor of all earlier weights at each pass
_USUAL = 0.1  # assumed difference of those passes from the usual number of experts, as a share of one row's
_PRICE = 0.7  # assumed time of a row's experts, as a share of its pass
_LEAST = 0.25  # least time of a pass, as a share of one that uses the usual number
_KNOWN = 8192  # most tokens whose experts are kept
_COMPARED = 8  # guesses that are compared for each place in a tree


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
        return max(_LEAST * usual, usual + self.price * (experts - self.union(num_rows)))

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
            seconds = max(seconds - self.price * more, _LEAST * usual)
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
