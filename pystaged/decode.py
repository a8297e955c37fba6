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
        *drafters: propose the trees, each for as long as it gains most; none for plain decoding.
        cost: seconds of a target pass, refined here; needed to tell whether drafting pays. None always uses the first
            drafter.
        hopeless: begin without the first drafter and try it later.
    """

    def __init__(
        self, target: Session, *drafters: Drafter, cost: PassCost | None = None, hopeless: bool = False
    ) -> None:
        self.target = target
        self.drafters = drafters
        self._cost = cost
        self._switches = [Switch(paused=hopeless and i == 0) for i in range(len(drafters))]
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
        self._speculate = speculate
        for drafter in self.drafters if speculate else ():
            drafter.start(prompt)
        self._root, self._length = int(prompt[-1]), len(prompt) - 1
        return reused

    def drafting(self) -> dict[str, DrafterStats]:
        """What each drafter has done so far, by name."""
        total: dict[str, DrafterStats] = {}
        for drafter in self.drafters:
            for name, work in drafter.work().items():
                total[name] = total[name].plus(work) if name in total else work
        return total

    def close(self) -> None:
        """Free the contexts."""
        self.target.close()
        for drafter in self.drafters:
            drafter.close()

    @property
    def is_full(self) -> bool:
        """Whether the context has no position left to evaluate the root at."""
        return self._length >= self.target.n_ctx

    def step(self, sampling: SamplingConfig, max_tokens: int, stats: GenerationStats) -> Emitted:
        """Draft, verify, follow, commit: at least one token, normally no more than max_tokens."""
        begin = time.perf_counter()
        chosen = self._choose() if self._speculate else None
        max_depth = min(max_tokens, self.target.n_ctx - self._length) - 1
        if chosen is None or max_depth < 1:
            tree = TokenTree.root(self._root)
        else:
            tree = self.drafters[chosen].draft(sampling, max_depth)
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
        for drafter in self.drafters if self._speculate else ():
            drafter.advance(emitted)
        self._root = emitted[-1]
        self._length += len(nodes)
        stats.record(tree, nodes)
        stats.target_seconds += evaluated - drafted
        stats.native_seconds += committed - drafted
        if self._cost:
            self._cost.observe(len(tree), evaluated - drafted)
            if chosen is not None:
                self._switches[chosen].record(len(emitted) * self._cost(1) - (time.perf_counter() - begin))
        return Emitted(emitted, [*(Stage(tree.stages[node]) for node in nodes[1:]), Stage.TARGET])

    def _choose(self) -> int | None:
        """The drafter to use for this step, None where none pays."""
        if self._cost is None:
            return 0 if self.drafters else None
        paying = [i for i, switch in enumerate(self._switches) if switch.is_on()]
        return max(paying, key=lambda i: self._switches[i].appeal, default=None)
