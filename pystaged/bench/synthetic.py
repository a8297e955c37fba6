"""A drafter with given acceptance rates, which predicts the gain from a draft that does not exist."""

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
    """Proposes nothing, at no cost."""

    stage = Stage.DRAFT

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> Requests[list[Candidates]]:
        del tree
        yield from ()
        return [Candidates({}, DRAFT) for _ in nodes]


class ScriptedDrafter(TreeDrafter):
    """Proposes a chain that is right with given probabilities. It knows plain decoding's output (`script`, from the
    prompt on), and runs the draft's passes only for their cost.

    Args:
        accept: probability that the node at depth 1, 2, ... is right if its parent is.
        draft: runs the passes; None if drafting costs nothing.
        target_cost: seconds of a target pass over n rows with an empty past. draft_cost: of a draft pass. They set the
            chain's length to that with the most expected tokens per second.
        vocab_size: wrong tokens are below this.
        seed: for the choice of right and wrong tokens.
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
        self._accept, places = list(accept), draft.places if draft else 1
        reached = list(accumulate(accept, mul))
        expected = [
            (1 + sum(reached[:depth])) / (target_cost(depth + 1) + -(-depth // places) * draft_cost(places))
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

    def _add(self, tree: GrowingTree, node: int, candidates: Candidates) -> float:
        del candidates
        rest, path = self.script[self._length - self._prompt_length :], tree.path(node)
        token = rest[len(path)]
        if path != list(rest[: len(path)]) or self._random.random() >= self._accept[len(path)]:
            token = (token + self._random.randrange(1, self._vocab_size)) % self._vocab_size
        return super()._add(tree, node, Candidates({token: 0.0}, DRAFT))
