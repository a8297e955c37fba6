"""A drafter whose acceptance is given: what a pair would gain that one does not have, at this machine's costs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.config import SamplingConfig
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.stats import DrafterStats


class ScriptedDrafter:
    """Proposes a chain that is right with given probabilities.

    It knows what plain decoding writes, and makes the passes a draft would make for their cost alone.

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
        self.stats = DrafterStats()
        self.script: Sequence[int] = ()
        self._accept = list(accept)
        self._scores = list(accumulate(accept, mul))
        self._session = session
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        expected = [
            (1 + sum(self._scores[:depth])) / (target_cost(depth + 1) + depth * draft_cost(1))
            for depth in range(len(accept) + 1)
        ]
        self.length = expected.index(max(expected))
        self._root, self._at = 0, 0
        self._chain: list[int] = []
        self._missing: list[int] = []

    def work(self) -> dict[str, DrafterStats]:
        return {"draft": replace(self.stats)}

    def close(self) -> None:
        if self._session:
            self._session.close()

    def start(self, context: NDArray[np.int32]) -> None:
        self._root, self._at, self._chain = int(context[-1]), 0, []
        self._missing = context[:-1].tolist()
        if self._session:
            self._session.truncate(0)

    def lag(self) -> float:
        return 0.0

    def price(self) -> float:
        return 0.0

    def catch_up(self, seconds: float = math.inf) -> None:
        del seconds
        if self._session and self._missing:
            self._session.prefill(self._missing)
            self._missing = []

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> TokenTree:
        del seconds
        begin = time.perf_counter()
        builder, node, right = TreeBuilder(self._root), 0, True
        self._chain = []
        for depth in range(min(self.length, max_depth, len(self.script) - self._at)):
            self._pass(self._chain[-1:] or [*self._missing, self._root], sampling)
            right = right and self._random.random() < self._accept[depth]
            token = self.script[self._at + depth]
            if not right:
                token = (token + self._random.randrange(1, self._vocab_size)) % self._vocab_size
            self._chain.append(token)
            node = builder.add(node, token, self._scores[depth], Stage.DRAFT, (Stage.DRAFT, 0, 0))
        self.stats.seconds += time.perf_counter() - begin
        return builder.build(range(1, len(self._chain) + 1))

    def prepare(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> None:
        self.draft(sampling, max_depth, seconds)

    def extend(self, path: list[int], length: int) -> list[int]:
        at = len(path)
        return self._chain[at : at + length] if path == self._chain[:at] else []

    def advance(self, tokens: Sequence[int]) -> None:
        emitted = [self._root, *tokens]
        accepted = 0
        while accepted < len(self._chain) and self._chain[accepted] == tokens[accepted]:
            accepted += 1
        if self._session and self._chain:
            # The last of the chain was never evaluated.
            seen = min(accepted, len(self._chain) - 1)
            self._session.commit(list(range(len(self._missing) + 1 + seen)))
            self._missing = emitted[1 + seen : -1]
        elif self._session:
            self._missing += emitted[:-1]
        self._root = emitted[-1]
        self._at += len(tokens)
        self._chain = []

    def _pass(self, tokens: list[int], sampling: SamplingConfig) -> None:
        if self._session is None:
            return
        begin = time.perf_counter()
        first = self._session.num_pending
        self._session.evaluate(tokens, [first + i - 1 for i in range(len(tokens))], 1)
        self._session.candidates([first + len(tokens) - 1], 6, sampling.native)
        self.stats.passes += 1
        self.stats.weight_bytes += self._session.weight_bytes
        self.stats.native_seconds += time.perf_counter() - begin
