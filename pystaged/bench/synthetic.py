"""A drafter whose acceptance is given: what a pair would gain that one does not have, at this machine's costs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.config import SamplingConfig
from pystaged.decoding.policy import FixedPolicy
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.drafting.model import ModelDrafter
from pystaged.stats import DrafterStats


class ScriptedDrafter(ModelDrafter):
    """Proposes a chain that is right with given probabilities.

    It knows what plain decoding writes (`script`, from the prompt on), and makes the passes of a draft for their cost
    alone.

    Args:
        accept: probability that the node at depth 1, 2, ... is right if the one above it is.
        session: of the draft, None where drafting costs nothing.
        target_cost: seconds of a target pass over n rows. draft_cost: of a draft pass. They set the chain's length: the
            one with the most expected tokens per second.
        vocab_size: wrong tokens are drawn below this.
        seed: of what is right and what is wrong.
    """

    def __init__(
        self,
        accept: Sequence[float],
        session: Session | None,
        target_cost: Callable[[int], float],
        draft_cost: Callable[[int], float],
        *,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        self._accept, self._scores = list(accept), list(accumulate(accept, mul))
        expected = [
            (1 + sum(self._scores[:depth])) / (target_cost(depth + 1) + depth * draft_cost(1))
            for depth in range(len(accept) + 1)
        ]
        self.length = expected.index(max(expected))
        self.script: Sequence[int] = ()
        self._at = 0  # of the script
        self._right = True
        self._is_free = session is None
        self._random = random.Random(seed)
        policy = FixedPolicy(width=1, depth=max(1, self.length), budget=max(1, self.length), children=1)
        super().__init__(session or cast(Session, _Free()), policy, vocab_size=vocab_size)

    def work(self) -> dict[str, DrafterStats]:
        return {"draft": DrafterStats(seconds=self.stats.seconds)} if self._is_free else super().work()

    def start(self, context: NDArray[np.int32]) -> None:
        super().start(context)
        self._at = 0

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> TokenTree:
        self._right = True
        return super().draft(sampling, min(max_depth, self.length, len(self.script) - self._at), seconds)

    def advance(self, tokens: Sequence[int]) -> None:
        super().advance(tokens)
        self._at += len(tokens)

    def _expand(self, builder: TreeBuilder, node: int, *_: object) -> None:
        depth = builder.nodes[node].depth
        self._right = self._right and self._random.random() < self._accept[depth]
        token = self.script[self._at + depth]
        if not self._right:
            token = (token + self._random.randrange(1, self._vocab_size)) % self._vocab_size
        builder.add(node, token, self._scores[depth], Stage.DRAFT, (Stage.DRAFT, 0, 0))


class _Free:
    """A session that costs nothing."""

    n_ctx = vocab_size = 2**31 - 1
    weight_bytes = 0
    tokens = np.empty(0, np.int32)

    def candidates(self, rows: list[int], *_: object) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return np.zeros((len(rows), 1), np.int32), np.zeros((len(rows), 1), np.float32)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None
