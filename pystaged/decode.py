"""Decoding: a step drafts a tree and verifies it with one pass of the target."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pystaged._core import ContextFullError, Session
from pystaged.config import SamplingConfig
from pystaged.cost import PassCost
from pystaged.drafter import Drafter, common_prefix
from pystaged.stats import DrafterStats, GenerationStats
from pystaged.switch import Switch
from pystaged.tree import Stage, TokenTree


@dataclass(frozen=True, slots=True)
class Emitted:
    """The tokens one step adds to the text, and who proposed each."""

    tokens: list[int]
    stages: list[Stage]


class Decoder:
    """One context being continued.

    Between steps the session holds all tokens but the last, which is the root of the next tree.

    Args:
        target: the session to continue in; nobody else may use it meanwhile.
        drafter: proposes the trees; None for plain decoding.
        cost: seconds of a target pass, refined here; needed to tell whether drafting pays. None drafts always.
        switch: turns drafting off while it does not pay.
    """

    def __init__(
        self,
        target: Session,
        drafter: Drafter | None = None,
        cost: PassCost | None = None,
        switch: Switch | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._cost = cost
        self._switch = switch or Switch()
        self._speculate = True
        self._root = -1
        self._length = 0

    def start(self, prompt: NDArray[np.int32], *, speculate: bool = True) -> int:
        """Bring the context to a prompt, int32[n] with n >= 1; returns how many of its tokens were there already.

        Args:
            speculate: False decodes plainly until the next start.

        Raises:
            ContextFullError: the prompt is longer than the context.
        """
        if len(prompt) > self.target.n_ctx:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.target.n_ctx}; shorten the prompt"
            )
        reused = min(common_prefix(self.target.tokens, prompt), len(prompt) - 1)
        self.target.truncate(reused)
        self.target.prefill(prompt[reused:-1])
        self._speculate = speculate and self.drafter is not None
        if self.drafter and speculate:
            self.drafter.start(prompt)
        self._root, self._length = int(prompt[-1]), len(prompt) - 1
        return reused

    def drafting(self) -> dict[str, DrafterStats]:
        """What each drafter has done so far, by name."""
        return self.drafter.work() if self.drafter else {}

    def close(self) -> None:
        """Free the contexts."""
        self.target.close()
        if self.drafter:
            self.drafter.close()

    @property
    def is_full(self) -> bool:
        """Whether the context has no position left to evaluate the root at."""
        return self._length >= self.target.n_ctx

    def step(self, sampling: SamplingConfig, max_tokens: int, stats: GenerationStats) -> Emitted:
        """Draft, verify, follow, commit: at least one token, normally no more than max_tokens."""
        begin = time.perf_counter()
        tree = self._draft(sampling, min(max_tokens, self.target.n_ctx - self._length) - 1)
        drafted = time.perf_counter()
        try:
            self.target.evaluate(tree.tokens, tree.parents)
            evaluated = time.perf_counter()
            path, tokens = self.target.follow(sampling.native)
            self.target.commit(path)
        finally:
            self.target.discard()
        committed = time.perf_counter()
        nodes, emitted = path.tolist(), tokens.tolist()
        if self.drafter and self._speculate:
            self.drafter.advance(emitted)
        self._root = emitted[-1]
        self._length += len(nodes)
        stats.record(tree, nodes)
        stats.target_seconds += evaluated - drafted
        stats.native_seconds += committed - drafted
        if self._cost:
            self._cost.observe(len(tree), evaluated - drafted)
            if len(tree) > 1 or drafted - begin > 0.1 * self._cost(1):
                self._switch.record(len(emitted) * self._cost(1) - (time.perf_counter() - begin))
        return Emitted(emitted, [*(Stage(tree.stages[node]) for node in nodes[1:]), Stage.TARGET])

    def _draft(self, sampling: SamplingConfig, max_depth: int) -> TokenTree:
        if not self.drafter or not self._speculate or max_depth < 1 or (self._cost and not self._switch.is_on()):
            return TokenTree.root(self._root)
        return self.drafter.draft(sampling, max_depth)
