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
    """Size of the batch that a sequence is decoded in. A sequence alone is a batch of one.

    sequences: number of sequences that step together, this one included. rows: rows of the other sequences' trees in
    the next target pass, roots included. tokens: number that the others are expected to gain from that pass.
    """

    sequences: int = 1
    rows: int = 0
    tokens: float = 0.0


@dataclass(slots=True)
class Growth:
    """A growing tree, as a policy sees it.

    scores: probabilities of all nodes but the root, descending. leaves: those of the nodes that the next pass can
    expand, best first; gains: the tokens that expanding each should add to a step. passes: number of drafting passes so
    far; seconds: their time. price: seconds of another pass, by the number of leaves that it expands; 0 without costs.
    lag: seconds for which the first pass also reads tokens that it lacks.
    cells: past length: tokens of the sequence before the root, which every pass attends to.
    experts: in `keep` of a mixture: predicted number of distinct experts of the root and the first n nodes, for n = 0,
    1, ...; the scores are then in the order of the nodes' gain per second, not descending.
    """

    scores: Sequence[float]
    leaves: Sequence[float]
    passes: int
    seconds: float
    cells: int = 0
    experts: Sequence[float] | None = None
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
        ...

    def expand(self, growth: Growth) -> int:
        """Number of the best leaves to expand by another pass of the drafter; 0 ends the tree."""
        ...

    def keep(self, growth: Growth) -> int:
        """Number of the best nodes that the target verifies, root excluded; 0 is plain decoding."""
        ...


class CheckedPolicy:
    """Checks the answers of a policy and limits them to what a step can do.

    Args:
        chains: whether trees have no branches: one candidate per node.

    Raises:
        TypeError, ValueError: from any member: the policy's answer is no integer, or too small.
    """

    def __init__(self, policy: TreePolicy, *, chains: bool = False) -> None:
        self._policy = policy
        self._most_children = 1 if chains else MAX_CHILDREN

    @property
    def children(self) -> int:
        return self._checked("children", self._policy.children, self._most_children, least=1)

    def expand(self, growth: Growth) -> int:
        return self._checked("expand", self._policy.expand(growth), len(growth.leaves))

    def keep(self, growth: Growth) -> int:
        return self._checked("keep", self._policy.keep(growth), MAX_NODES)

    def _checked(self, member: str, answer: object, most: int, least: int = 0) -> int:
        name = f"{type(self._policy).__name__}.{member}"
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

    In a batch, the numerator includes the tokens that the other sequences expect, and T_target includes their rows.
    Assumes that all sequences take the same time to draft and share the time of a drafting pass equally.

    Args:
        target_cost: seconds of a target pass, by its rows and its past length; of a mixture also by its experts.
        budget: most nodes of a tree.
        children: candidates per node.
        batch: the batch that shares the passes; by default this sequence alone.
    """

    def __init__(
        self, target_cost: Callable[..., float], budget: int = 31, children: int = 4, batch: BatchLoad | None = None
    ) -> None:
        self.children, self.budget = children, budget
        self._batch = batch or BatchLoad()
        self._target_cost = target_cost
        self._known: tuple[tuple[int, int], dict[int, float]] = (-1, -1), {}  # cached costs of verifying one tree

    def keep(self, growth: Growth) -> int:
        return self._best_size(growth)[0]

    def expand(self, growth: Growth) -> int:
        size, rate = self._best_size(growth)
        row, texts = self._row(size, rate, growth.cells), self._batch.sequences
        best_width, best_gain, gain = 0, 0.0, 0.0
        for width, more in enumerate(growth.gains, 1):
            gain += max(0.0, more - row)
            net = gain - rate * (growth.lag + growth.price(width * texts) / texts)
            if net > best_gain:
                best_width, best_gain = width, net
        return best_width

    def least(self, growth: Growth) -> float:
        """The score from which a guess is worth a row of the target's pass."""
        size, rate = self._best_size(growth)
        return self._row(size, rate, growth.cells)

    def _row(self, size: int, rate: float, cells: int) -> float:
        """What another row after `size` nodes costs, in tokens."""
        return rate * (self._verify_cost(size + 2, cells) - self._verify_cost(size + 1, cells))

    def _best_size(self, growth: Growth) -> tuple[int, float]:
        """The best number of nodes and its expected tokens per second."""
        tokens, cells = 1.0 + self._batch.tokens, growth.cells
        drafting = growth.seconds * self._batch.sequences
        best_size, best_rate = 0, tokens / (self._verify_cost(1, cells) + drafting)
        for size, score in enumerate(growth.scores[: self.budget], 1):
            tokens += score
            rate = tokens / (self._verify_cost(size + 1, cells, growth.experts) + drafting)
            if rate > best_rate:
                best_size, best_rate = size, rate
        return best_size, best_rate

    def _verify_cost(self, num_rows: int, cells: int, experts: Sequence[float] | None = None) -> float:
        """Seconds of the pass that verifies `num_rows` rows of this sequence."""
        # Cached, because each growth of a tree needs the same values again.
        others, known = self._batch.rows, self._known
        if experts and not others:
            return self._target_cost(num_rows, cells, experts[num_rows - 1])
        if known[0] != (others, cells):
            known = self._known = (others, cells), {}
        seconds = known[1].get(num_rows)
        if seconds is None:
            seconds = known[1][num_rows] = self._target_cost(others + num_rows, cells)
        return seconds
