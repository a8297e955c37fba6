"""Policies that decide how a tree grows and how many of its nodes are verified.

A policy is any object with the three members of TreePolicy; it sees scores and seconds, never models. Its answers are
checked and limited to what a step can do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_NODES = 64  # nodes of a tree that the target verifies, root excluded
MAX_EXPANDED = 64  # expanded nodes of a tree, each a row of a draft pass or a lookup
MAX_CHILDREN = 16  # candidates per node


@dataclass(slots=True)
class BatchLoad:
    """Size of the batch that a text is decoded in. A text alone is a batch of one.

    texts: number of texts that step together, this one included. rows: rows of the other texts' trees in the next
    target pass, roots included. tokens: number that the others are expected to gain from that pass.
    """

    texts: int = 1
    rows: int = 0
    tokens: float = 0.0


@dataclass(slots=True)
class Growth:
    """A growing tree, as a policy sees it.

    scores: probabilities of all nodes but the root, descending. leaves: those of the nodes that the next pass can
    expand, best first, and parents before children. passes: number of drafting passes so far; seconds: their time.
    gains: the tokens that expanding each leaf should add to a step, with those of later passes; for a GainPolicy alone.
    price: this text's seconds of another pass, by the number of leaves that it expands; 0 without costs.
    lag: seconds that the first pass takes besides, for tokens that it lacks or that a grammar forces.
    cells: past length: tokens of the text before the root, which every pass attends to.
    """

    scores: Sequence[float]
    leaves: Sequence[float]
    passes: int
    seconds: float
    cells: int = 0
    gains: Sequence[float] = ()
    price: Callable[[int], float] = lambda _: 0.0
    lag: float = 0.0


class TreePolicy(Protocol):
    """Decides how a tree grows.

    One policy object serves all contexts of an engine and several threads at once: state that it keeps needs a lock.
    Answers that are no integers raise TypeError, negative ones ValueError. A tree has at most 64 nodes, at most 64
    expanded nodes, and at most 16 children per node.
    """

    @property
    def children(self) -> int:
        """Candidates per node to consider."""

    def expand(self, growth: Growth) -> int:
        """Number of the best leaves to expand by another pass of the drafter; 0 ends the tree."""

    def keep(self, growth: Growth) -> int:
        """Number of the best nodes that the target verifies, root excluded; those that a grammar forces stay."""


def checked(policy: TreePolicy, member: str, answer: object, most: int, least: int = 0) -> int:
    """An answer of a user's policy, limited to what a step can do.

    Raises:
        TypeError, ValueError: it is no integer, or too small.
    """
    name = f"{type(policy).__name__}.{member}"
    try:
        number = operator.index(answer)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(answer).__name__}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return min(number, most)


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Trees of one shape: `depth` passes expand the `width` best leaves, and the `budget` best nodes are kept.

    FixedPolicy(width=1, depth=5, budget=5, children=1) is a chain.
    """

    width: int
    depth: int
    budget: int
    children: int = 4

    def expand(self, growth: Growth) -> int:
        return min(self.width, len(growth.leaves)) if growth.passes < self.depth else 0

    def keep(self, growth: Growth) -> int:
        return min(self.budget, len(growth.scores))


class GainPolicy:
    """Buys another pass while the tokens that it should add are worth its time, then keeps the n best nodes that
    maximize (1 + sum of scores) / (T_target(n + 1) + drafting time), at the current past length.

    In a batch, the numerator includes the tokens that the other texts expect, and T_target includes their rows. Assumes
    that all texts take the same time to draft and share the time of a drafting pass equally.

    Args:
        target_cost: seconds of a target pass, by its rows and its past length.
        budget: most nodes of a tree, at most 64.
        children: candidates per node.
        batch: the batch that shares the passes; by default this text alone.
    """

    def __init__(
        self, target_cost: Callable[..., float], budget: int = 31, children: int = 4, batch: BatchLoad | None = None
    ) -> None:
        self.children, self.budget = children, min(budget, MAX_NODES)
        self._batch = batch or BatchLoad()
        self._target_cost = target_cost
        self._known: tuple[tuple[int, int], list[float]] = (-1, -1), []  # what verifying one tree costs, by its rows

    def keep(self, growth: Growth) -> int:
        return self._best_size(growth)[0]

    def expand(self, growth: Growth) -> int:
        row, rate = self.margin(growth)
        best_width, best_gain, gain = 0, 0.0, 0.0
        for width, more in enumerate(growth.gains, 1):
            gain += max(0.0, more - row)
            net = gain - rate * (growth.lag + growth.price(width))
            if net > best_gain:
                best_width, best_gain = width, net
        return best_width

    @property
    def texts(self) -> int:
        """Number of texts that are expected to share a pass."""
        return self._batch.texts

    def margin(self, growth: Growth) -> tuple[float, float]:
        """The least score of a guess for which one more row pays, and the tokens per second of the best number."""
        size, rate = self._best_size(growth)
        costs = self._costs(size + 2, growth.cells)
        return rate * (costs[size + 1] - costs[size]), rate

    def _best_size(self, growth: Growth) -> tuple[int, float]:
        """The best number of nodes and its expected tokens per second."""
        tokens, scores = 1.0 + self._batch.tokens, growth.scores[: self.budget]
        drafting, costs = growth.seconds * self._batch.texts, self._costs(1 + len(scores), growth.cells)
        return best_size(tokens, scores, costs, drafting)

    def _costs(self, rows: int, cells: int) -> list[float]:
        """Seconds of the passes that verify 1, 2, ... rows of this text; `rows` entries or more."""
        # Kept, because each growth of a tree needs the same values again.
        others, (key, known) = self._batch.rows, self._known
        known = known if key == (others, cells) else []
        if len(known) < rows:
            known = known + [self._target_cost(others + n, cells) for n in range(len(known) + 1, rows + 1)]
            self._known = (others, cells), known
        return known


def best_size(tokens: float, scores: Sequence[float], costs: Sequence[float], drafting: float) -> tuple[int, float]:
    """How many guesses to verify for the most tokens per second, and that rate.

    Args:
        tokens: expected without guesses.
        scores: of the guesses, best first.
        costs: seconds of the pass by number of guesses, from 0 on.
        drafting: seconds of drafting.
    """
    best, best_rate = 0, tokens / (costs[0] + drafting)
    for size, score in enumerate(scores, 1):
        tokens += score
        rate = tokens / (costs[size] + drafting)
        if rate > best_rate:
            best, best_rate = size, rate
    return best, best_rate
