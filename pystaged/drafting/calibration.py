"""How often candidates are right: the rates by which the tree's scores are reckoned.

A source is a number for a proposer and, for a lookup, the number of matching tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

import numpy as np

from pystaged._core import gumbel
from pystaged.decoding.tree import Cell
from pystaged.drafting.proposer import Candidates, Proposal
from pystaged.options.config import SamplingConfig

# Sources. A mixture of lookups has the highest of their sources.
NOBODY = 0
DRAFT = 1
TABLE = 2
RECYCLED = (NOBODY, 3, 4)  # by number of matching tokens
CONTEXT = {0: NOBODY, 1: 5, 2: 6, 3: 7, 4: 8, 8: 9, 16: 10}  # by number of matching tokens
LATER = (11, 12, 13, 14, 15, 16, 17)  # tokens of a parallel draft's pass after the first one, which is DRAFT's
FEATURES = 18  # drafts that read hidden states

# The share of a lookup in a mixture, by the source of the mixture before it; 1 if that is empty. The longer an n-gram
# of the text, the larger its share.
_SHARES: dict[int, dict[int, float]] = {
    TABLE: {RECYCLED[1]: 0.5, RECYCLED[2]: 0.2},
    CONTEXT[1]: {TABLE: 0.25, RECYCLED[1]: 0.6, RECYCLED[2]: 0.6},
    CONTEXT[2]: {TABLE: 0.5, RECYCLED[1]: 0.8, RECYCLED[2]: 0.8},
    CONTEXT[3]: {TABLE: 0.75, RECYCLED[1]: 0.9, RECYCLED[2]: 0.9},
    **{CONTEXT[n]: {TABLE: 0.9, RECYCLED[1]: 0.95, RECYCLED[2]: 0.95} for n in (4, 8, 16)},
}


def mix(proposals: Sequence[Proposal]) -> Proposal:
    """Mix the lookups' proposals for one node, which must be in the order of lookups()."""
    mixed, source = dict[int, float](), NOBODY
    for proposal in proposals:
        if proposal.chances:
            share = _SHARES[proposal.source][source] if mixed else 1.0
            mixed = {token: (1 - share) * chance for token, chance in mixed.items()}
            for token, chance in proposal.chances.items():
                mixed[token] = mixed.get(token, 0.0) + share * chance
            source = max(source, proposal.source)
    return Proposal(mixed, source)


def rank(chances: dict[int, float], sampling: SamplingConfig, position: int, k: int) -> dict[int, float]:
    """The scores of the k best tokens at a position of a text, as in Candidates; ties go to the lowest token."""
    cold, noise = 1.0, [0.0] * len(chances)
    if sampling.temperature > 0 and chances:
        cold = 1 / sampling.temperature
        noise = gumbel(sampling.seed, position, np.array(list(chances), np.int32)).tolist()
    scores = zip(chances.items(), noise, strict=True)
    ranked = sorted([(-cold * math.log(chance) - g, token) for (token, chance), g in scores])[:k]
    return {token: -score for score, token in ranked}


# Counts are kept by sources and these bins: who changes them begins a new version in loading/recycled.py.
_EDGES = (0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.23, 0.31, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.975, 0.99)
_CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True))
_TEMPERATURE = 1.25  # of the softmax; separates hits from misses best for the bundled pair
_RANKS = 6
_ABSENT = _RANKS  # rank of a lookup's token that the proposer above it does not name
_SUPPORT = (0.1, 0.3, 0.6, 0.85)  # edges of the rates by which lookups support a candidate
_MEMORY = 500.0  # observations after which the older ones fade
_WEIGHT = 12.0  # weight of the prior, in observations
_COVERED = 0.8  # assumed chance that a judged node's children hold the target's token
_BLEND = 0.02  # weight of a new observation of it
_FORGET = 0.05  # share of the way that each new text moves what was learnt of it back to _COVERED
_TRUST = {DRAFT: 0.9, CONTEXT[8]: 0.9, CONTEXT[16]: 0.95}  # prior rate of a candidate, divided by its share; else 0.6


class Calibration:
    """What a drafter learns from greedy texts, or from sampled ones: the probability that a candidate is the
    target's token, given that its parent is; and what judging a node adds.

    A candidate of one source has a cell for the source, its rank and a bin of its share: the softmax over the scores of
    a node's candidates. With shared noise the share predicts a hit far better than the rank alone: where the draft's
    perturbed scores are far apart, the target would have to differ much from the draft to choose another token. A
    candidate of a node that lookups and another proposer judged has a cell of both: the proposer's, and a bin of the
    rate that the lookups give it.
    """

    def __init__(self) -> None:
        self._counts: dict[Cell, tuple[float, float]] = {}  # decayed numbers of candidates and of hits
        self._covered: dict[tuple[Cell, ...], float] = {}  # by the first of a node's cells; the root has none

    def counts(self) -> list[tuple[float, ...]]:
        """Each cell with its decayed numbers of candidates and of hits, for JSON; another thread may learn meanwhile.
        What judging adds begins anew in each program: if that seemed little, nothing would be judged again."""
        return [(*cell, *numbers) for cell, numbers in self._counts.copy().items()]

    def restore(self, counts: Iterable[tuple[int, int, int, int, float, float]]) -> None:
        """Go on from what `counts` returned."""
        for a, b, c, d, tried, hits in counts:
            self._counts[a, b, c, d] = tried, hits

    def forget(self) -> None:
        """Expect a little more of a proposer that was not worth its price: it may be in the next text."""
        self._covered = {cells: chance + _FORGET * (_COVERED - chance) for cells, chance in self._covered.items()}

    def covered(self, cells: tuple[Cell, ...]) -> float:
        """The chance that the children of a judged node hold the target's token, by its own cells."""
        return self._covered.get(cells[:1], _COVERED)

    def cover(self, cells: tuple[Cell, ...], hit: bool) -> None:
        """Learn whether a judged node's children held the target's token."""
        before = self.covered(cells)
        self._covered[cells[:1]] = before + _BLEND * (hit - before)

    def cells(self, source: int, scores: Sequence[float]) -> list[Cell]:
        """The cell of each of a node's candidates, given the scores of all of them, best first."""
        powers = [math.exp((score - scores[0]) / _TEMPERATURE) for score in scores]
        total = sum(powers)
        return [
            (source, min(rank, _RANKS - 1), bisect_right(_EDGES, power / total), 0) for rank, power in enumerate(powers)
        ]

    def judged(self, found: Candidates, guesses: dict[int, Cell]) -> list[tuple[float, int, tuple[Cell, ...]]]:
        """Merge what another proposer found after a node with the cells of the tokens that lookups guessed; if one of
        both is empty, use the other. Returns the children, best first: of each its rate, the token, and the cells that
        learn whether it is right."""
        cells = dict(zip(found.scores, self.cells(found.source, list(found.scores.values())), strict=True))
        if not cells or not guesses:
            return [(self.rate(cell), token, (cell,)) for token, cell in (cells or guesses).items()]
        best = next(iter(cells.values()))
        said = list[tuple[float, int, tuple[Cell, ...]]]()
        for token, cell in cells.items():
            guess = guesses.get(token)
            support = self.rate(guess) if guess else 0.0
            both: Cell = (*cell[:3], 1 + bisect_right(_SUPPORT, support) if guess else -1)
            learning = (both, cell, guess) if guess else (both, cell)
            said.append((self.rate(both, max(self.rate(cell), support)), token, learning))
        for token, guess in guesses.items():
            if token not in cells:
                support = self.rate(guess)
                both = (found.source, _ABSENT, best[2], 1 + bisect_right(_SUPPORT, support))
                said.append((self.rate(both, support * (1 - self.rate(best))), token, (both, guess)))
        said.sort(key=itemgetter(0), reverse=True)  # of equal rates, the better rank comes first
        return said

    def rate(self, cell: Cell, prior: float | None = None) -> float:
        """The estimated rate of a cell, never 0 or 1, so that a tree can always grow a sibling or end. prior: what to
        assume of a cell of two sources."""
        if prior is None:
            prior = _TRUST.get(cell[0], 0.6) * _CENTRES[cell[2]]
        tried, hits = self._counts.get(cell) or (0.0, 0.0)
        return min(max((hits + _WEIGHT * prior) / (tried + _WEIGHT), 0.002), 0.998)

    def update(self, cell: Cell, hit: bool) -> None:
        """Learn whether a candidate whose parent was accepted is the target's token."""
        tried, hits = self._counts.get(cell) or (0.0, 0.0)
        fade = min(1.0, _MEMORY / (tried + 1))
        self._counts[cell] = fade * tried + 1, fade * hits + hit
