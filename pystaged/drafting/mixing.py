"""Weights of the proposers: their shares in the mixture, and how often their candidates are right.

A source is a number for a proposer and, for a lookup, the number of matching tokens. A draft model proposes alone. The
other proposers are mixed in their order: each takes its share, and the rest goes to the mixture of those before it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from pystaged._core import gumbel
from pystaged.config import SamplingConfig
from pystaged.decoding.tree import Cell
from pystaged.drafting.proposer import Proposal

# Sources. A mixture of lookups has the highest of their sources.
NOBODY = 0
DRAFT = 1
TABLE = 2
RECYCLED = (NOBODY, 3, 4)  # by number of matching tokens
CONTEXT = {0: NOBODY, 1: 5, 2: 6, 3: 7, 4: 8, 8: 9, 16: 10}  # by number of matching tokens
LATER = (11, 12, 13, 14, 15, 16, 17)  # tokens of a parallel draft's pass after the first one, which is DRAFT's
HEAD = 18  # added to the source of the lookups that it is mixed with

# The share of a proposer, by the source of the mixture before it; 1 if that is empty. The longer an n-gram of the
# sequence, the larger its share.
SHARES: dict[int, dict[int, float]] = {
    TABLE: {RECYCLED[1]: 0.5, RECYCLED[2]: 0.2},
    CONTEXT[1]: {TABLE: 0.25, RECYCLED[1]: 0.6, RECYCLED[2]: 0.6},
    CONTEXT[2]: {TABLE: 0.5, RECYCLED[1]: 0.8, RECYCLED[2]: 0.8},
    CONTEXT[3]: {TABLE: 0.75, RECYCLED[1]: 0.9, RECYCLED[2]: 0.9},
    **{CONTEXT[n]: {TABLE: 0.9, RECYCLED[1]: 0.95, RECYCLED[2]: 0.95} for n in (4, 8, 16)},
    HEAD: {
        TABLE: 0.8,
        RECYCLED[1]: 0.8,
        RECYCLED[2]: 0.65,
        CONTEXT[1]: 0.7,
        CONTEXT[2]: 0.5,
        CONTEXT[3]: 0.3,
        **{CONTEXT[n]: 0.1 for n in (4, 8, 16)},
    },
}


def mix(proposals: Sequence[Proposal]) -> Proposal:
    """Mix the proposals for one node, which must be in the order of the sources above."""
    said = [proposal for proposal in proposals if proposal.chances]
    if not said:
        return Proposal({}, NOBODY)
    mixed, source = said[0].chances, said[0].source
    for proposal in said[1:]:
        share = SHARES[proposal.source][source]
        rest = 1 - share
        mixed = {token: rest * chance for token, chance in mixed.items()}
        for token, chance in proposal.chances.items():
            mixed[token] = mixed.get(token, 0.0) + share * chance
        source = source + HEAD if proposal.source == HEAD else max(source, proposal.source)
    return Proposal(mixed, source)


def rank(chances: dict[int, float], sampling: SamplingConfig, position: int, k: int) -> dict[int, float]:
    """The scores of the k best tokens at a position of a sequence, as in Candidates; ties go to the lowest token."""
    if sampling.is_greedy or not chances:
        likeliest = sorted([(-chance, token) for token, chance in chances.items()])[:k]
        return {token: math.log(-chance) for chance, token in likeliest}
    noise = gumbel(sampling.seed, position, np.array(list(chances), np.int32)).tolist()
    cold = -1 / sampling.temperature
    ranked = sorted(
        [(cold * math.log(chance) - g, token) for (token, chance), g in zip(chances.items(), noise, strict=True)]
    )[:k]
    return {token: -score for score, token in ranked}


_EDGES = (0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.23, 0.31, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.975, 0.99)
_CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True))
_TEMPERATURE = 1.25  # of the softmax; separates hits from misses best for the bundled pair
_RANKS = 6
_MEMORY = 500.0  # observations after which the older ones fade
_WEIGHT = 12.0  # weight of the prior, in observations
_TRUST = {DRAFT: 0.9, CONTEXT[8]: 0.9, CONTEXT[16]: 0.95}  # prior rate of a candidate, divided by its share; else 0.6


class Rates(dict[Cell, float]):
    """The estimated rate of each cell, with a prior for unseen ones."""

    def __missing__(self, cell: Cell) -> float:
        source, _, column = cell
        rate = self[cell] = _TRUST.get(source, 0.6) * _CENTRES[column]
        return rate


class Calibration:
    """Estimates the probability that a candidate is the target's token, given that its parent is.

    There is one rate for each source, rank and bin of the share: the softmax over the scores of a node's candidates.
    With shared noise the share predicts a hit far better than the rank alone: where the draft's perturbed scores are
    far apart, the target would have to differ much from the draft to choose another token.

    rates: the current estimate for each cell.
    """

    def __init__(self) -> None:
        self.rates = Rates()
        self._counts: dict[Cell, tuple[float, float]] = {}  # decayed numbers of candidates and of hits

    def copy(self) -> Calibration:
        """A copy of the learnt state."""
        other = Calibration()
        other.rates.update(self.rates)
        other._counts = self._counts.copy()
        return other

    def cells(self, source: int, scores: Sequence[float]) -> list[Cell]:
        """The cell of each of a node's candidates, given the scores of all of them, best first."""
        powers = [math.exp((score - scores[0]) / _TEMPERATURE) for score in scores]
        total = sum(powers)
        return [
            (source, min(rank, _RANKS - 1), bisect_right(_EDGES, power / total)) for rank, power in enumerate(powers)
        ]

    def update(self, cell: Cell, hit: bool) -> None:
        """Learn whether a candidate whose parent was accepted is the target's token."""
        tried, hits = self._counts.get(cell) or (_WEIGHT, _WEIGHT * self.rates[cell])
        fade = min(1.0, _MEMORY / tried)
        tried, hits = self._counts[cell] = fade * tried + 1, fade * hits + hit
        # Never 0 or 1, so that a tree can always grow a sibling or end.
        self.rates[cell] = min(max(hits / tried, 0.002), 0.998)
