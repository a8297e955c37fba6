"""A drafter of a given acceptance: what a draft would gain that one does not have."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.policy import FixedPolicy
from pystaged.decoding.requests import Requests
from pystaged.decoding.tree import Stage
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.mixing import DRAFT
from pystaged.drafting.model import ModelProposer
from pystaged.drafting.proposer import Candidates, GrowingTree, Proposer


class _FreeProposer(Proposer):
    """Says nothing, and costs nothing."""

    stage = Stage.DRAFT

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> Requests[list[Candidates]]:
        del tree
        yield from ()
        return [Candidates({}, DRAFT) for _ in nodes]


class ScriptedDrafter(TreeDrafter):
    """Proposes a chain that is right with given probabilities. It knows what plain decoding writes (`script`, from the
    prompt on), and makes the passes of a draft for their cost alone.

    Args:
        accept: probability that the node at depth 1, 2, ... is right if the one above it is.
        draft: makes the passes; None where drafting costs nothing.
        target_cost: seconds of a target pass over n rows where a text begins. draft_cost: of a draft pass. They set the
            chain's length: the one with the most expected tokens per second.
        vocab_size: wrong tokens are drawn below this.
        seed: of what is right and what is wrong.
    """

    def __init__(
        self,
        accept: Sequence[float],
        draft: ModelProposer | None,
        target_cost: Callable[[int], float],
        draft_cost: Callable[[int], float],
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        self._accept = list(accept)
        reached = list(accumulate(accept, mul))
        expected = [
            (1 + sum(reached[:depth])) / (target_cost(depth + 1) + depth * draft_cost(1))
            for depth in range(len(accept) + 1)
        ]
        self.length = expected.index(max(expected))
        self.script: Sequence[int] = ()
        self._prompt_length = 0
        self._random = random.Random(seed)
        policy = FixedPolicy(width=1, depth=max(1, self.length), budget=max(1, self.length), children=1)
        super().__init__([draft or _FreeProposer()], policy, vocab_size)

    def start(self, context: NDArray[np.int32]) -> None:
        super().start(context)
        self._prompt_length = len(context)

    def most_levels(self) -> float:
        return min(super().most_levels(), self.length, len(self.script) - (self._length - self._prompt_length))

    def _add(self, tree: GrowingTree, node: int, candidates: Candidates) -> None:
        del candidates
        rest, path = self.script[self._length - self._prompt_length :], tree.path(node)
        token = rest[len(path)]
        if path != list(rest[: len(path)]) or self._random.random() >= self._accept[len(path)]:
            token = (token + self._random.randrange(1, self._vocab_size)) % self._vocab_size
        super()._add(tree, node, Candidates({token: 0.0}, DRAFT))
