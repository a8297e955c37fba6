"""Which guesses to grow and how many to hand over: expected gain against measured cost.

A policy is any object with the three members of TreePolicy; it sees scores and seconds, never models. What it answers
is checked, and cut to what can be done in a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pystaged.decoding.batch_load import BatchLoad

MAX_NODES = 64  # of a tree that the target verifies, root excluded
MAX_EXPANDED = 64  # nodes of a tree that are expanded, each a row of a draft pass or a lookup
MAX_CHILDREN = 16  # candidates per node


@dataclass(slots=True)
class Growth:
    """A tree being grown, as a policy sees it.

    scores: of all nodes but the root, falling. leaves: of those not expanded yet, falling. passes: times that leaves
    were expanded so far, the root first; seconds: that this took.
    cells: tokens of the text before the root, which every pass attends to.
    """

    scores: Sequence[float]
    leaves: Sequence[float]
    passes: int
    seconds: float
    cells: int = 0


class TreePolicy(Protocol):
    """Decides how a tree grows.

    One policy object serves all contexts of an engine, and several threads at once: what it keeps between calls needs a
    lock of its own. Answers that are not integers are a TypeError, negative ones a ValueError; a tree has 64 nodes at
    most, of which at most 64 are expanded, with 16 children each at most.
    """

    @property
    def children(self) -> int:
        """Candidates per node to consider."""
        ...

    def expand(self, growth: Growth) -> int:
        """How many of the best leaves to expand with another pass of the drafter; 0 ends the growing."""
        ...

    def keep(self, growth: Growth) -> int:
        """How many of the best nodes the target verifies, root excluded; 0 is plain decoding."""
        ...


class CheckedPolicy:
    """A policy whose answers are checked, and cut to what can be done in a step.

    Raises:
        TypeError, ValueError: every member, where the policy answers nonsense; naming its class and the member.
    """

    def __init__(self, policy: TreePolicy) -> None:
        self._policy = policy

    @property
    def children(self) -> int:
        return self._checked("children", self._policy.children, MAX_CHILDREN, least=1)

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
    """A tree of always the same make: `depth` passes that expand the `width` best leaves, `budget` nodes kept.

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
    """Grows while the expected extra tokens are worth their time, then keeps the n best nodes that maximize
    (1 + sum of scores) / (T_target(n + 1) + time spent drafting), at the present length of the text.

    In a batch, the others' expected tokens are added above and their rows to those of T_target. All are taken to draft
    alike: that takes `texts` times this text's own seconds, and a drafting pass for all costs each an equal part.

    Args:
        target_cost: seconds of a target pass over n rows behind so many cells.
        draft_cost: the same of a drafting pass.
        budget: nodes at most.
        children: candidates per node.
        batch: who shares the passes; by default nobody.
    """

    def __init__(
        self,
        target_cost: Callable[[int, int], float],
        draft_cost: Callable[[int, int], float],
        budget: int = 31,
        children: int = 4,
        batch: BatchLoad | None = None,
    ) -> None:
        self.children = children
        self._batch = batch or BatchLoad()
        self._target_cost = target_cost
        self._draft_cost = draft_cost
        self._budget = budget
        self._known: tuple[tuple[int, int], dict[int, float]] = (-1, -1), {}  # costs of verifying one tree

    def keep(self, growth: Growth) -> int:
        return self._best_size(growth)[0]

    def expand(self, growth: Growth) -> int:
        size, rate = self._best_size(growth)
        if size >= self._budget:
            return 0
        # A leaf's best child adds about this much of the leaf's own score, and one more row for the target.
        child = 0.75
        texts, cells = self._batch.sequences, growth.cells
        row_cost = rate * (self._verify_cost(size + 2, cells) - self._verify_cost(size + 1, cells))
        best_width, best_gain, gain = 0, 0.0, 0.0
        before = 0.0
        for width, score in enumerate(growth.leaves[: self._budget], 1):
            if child * score <= row_cost:
                break  # as are all that follow
            pass_cost = self._draft_cost(width * texts, cells) / texts
            gain += child * score - rate * (pass_cost - before) - row_cost
            before = pass_cost
            if gain > best_gain:
                best_width, best_gain = width, gain
        return best_width

    def _best_size(self, growth: Growth) -> tuple[int, float]:
        """The best number of nodes and its expected tokens per second."""
        tokens, cells = 1.0 + self._batch.tokens, growth.cells
        drafting = growth.seconds * self._batch.sequences
        best_size, best_rate = 0, tokens / (self._verify_cost(1, cells) + drafting)
        for size, score in enumerate(growth.scores[: self._budget], 1):
            tokens += score
            rate = tokens / (self._verify_cost(size + 1, cells) + drafting)
            if rate > best_rate:
                best_size, best_rate = size, rate
        return best_size, best_rate

    def _verify_cost(self, num_rows: int, cells: int) -> float:
        """Seconds of the pass that verifies so many rows of this text."""
        # A tree that grows asks for the same again and again.
        others, known = self._batch.rows, self._known
        if known[0] != (others, cells):
            known = self._known = (others, cells), {}
        seconds = known[1].get(num_rows)
        if seconds is None:
            seconds = known[1][num_rows] = self._target_cost(others + num_rows, cells)
        return seconds
