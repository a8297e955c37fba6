"""How often guesses come true: the probability that a candidate is the target's token, given that its parent is.

Candidates are told apart by source, which is who proposed them and from how much, by rank, and by their share: the
softmax of the scores of a node's candidates. With shared noise the share predicts a hit far better than the rank alone,
because a draft whose perturbed scores are far apart would have to be far off for the target to choose another token.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

Cell = tuple[int, int, int]  # source, rank, bin of share

_EDGES = (0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.23, 0.31, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.975, 0.99)
_CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True))
_TEMPERATURE = 1.25  # of the softmax; tells hits from misses best on the house pair
_RANKS = 6
_SOURCES = 16  # stages; those of n-grams have several, see ngrams.py and head.py
_MEMORY = 500.0  # observations after which the older ones fade
_WEIGHT = 12.0  # observations that the prior is worth
_TRUST = (1.0, 0.9, 0.6)  # in a share before anything is learnt: target, draft, all others
_PRIOR: dict[Cell, float] = {
    (source, rank, column): _TRUST[min(source, 2)] * share
    for source in range(_SOURCES)
    for rank in range(_RANKS)
    for column, share in enumerate(_CENTRES)
}


class Calibration:
    """Decayed counts of hits by cell. `rates` holds the current belief of each."""

    def __init__(self) -> None:
        self.rates = dict(_PRIOR)
        self._tried = dict.fromkeys(_PRIOR, _WEIGHT)
        self._hits = {cell: _WEIGHT * rate for cell, rate in _PRIOR.items()}

    def copy(self) -> Calibration:
        """Another one that has learnt the same."""
        other = Calibration.__new__(Calibration)
        other.rates, other._tried, other._hits = self.rates.copy(), self._tried.copy(), self._hits.copy()
        return other

    def cells(self, source: int, scores: Sequence[float]) -> list[Cell]:
        """The cell of each of a node's candidates, given the scores of all of them, best first."""
        powers = [math.exp((score - scores[0]) / _TEMPERATURE) for score in scores]
        total = sum(powers)
        return [
            (source, min(rank, _RANKS - 1), bisect_right(_EDGES, power / total)) for rank, power in enumerate(powers)
        ]

    def update(self, cell: Cell, hit: bool) -> None:
        """Learn whether a candidate came true whose parent did."""
        tried, hits = self._tried[cell], self._hits[cell]
        fade = min(1.0, _MEMORY / tried)
        tried, hits = fade * tried + 1, fade * hits + hit
        self._tried[cell], self._hits[cell] = tried, hits
        # Never certain: a tree must always be able to hold a sibling or end.
        self.rates[cell] = min(max(hits / tried, 0.002), 0.998)
