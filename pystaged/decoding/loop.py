"""Decoding: a step drafts a tree and verifies it with one pass of the target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pystaged._core import ContextFullError, Session
from pystaged.config import SamplingConfig
from pystaged.decoding.budget import Choice
from pystaged.decoding.cost import PassCost, surprise
from pystaged.decoding.drafter import Drafter, common_prefix
from pystaged.decoding.tree import Stage, TokenTree
from pystaged.stats import DrafterStats, GenerationStats

_BLEND = 0.2  # weight of a new observation of what drafting takes
_PLAIN_BLEND = 0.1  # of what a plain step takes
# After so many drafted steps come two plain ones, to see what those take: often at first, and rarely where drafting
# gains more than a plain step.
_FIRST_CHECK, _LAST_CHECK, _RARE_CHECK = 4, 128, 1024


@dataclass(frozen=True, slots=True)
class Emitted:
    """The tokens one step adds to the text, who proposed each, the tree that was verified and its accepted nodes."""

    tokens: list[int]
    stages: list[Stage]
    tree: TokenTree
    path: list[int]


class Decoder:
    """One context being continued.

    Between steps the session holds all tokens but the last, which is the root of the next tree.

    Args:
        target: the session to continue in; nobody else may use it meanwhile.
        *drafters: propose the trees, each for as long as it gains most; none for plain decoding.
        cost: seconds of a target pass, refined here; needed to tell whether drafting pays. None always uses the first
            drafter.
        uses: tokens of a step with each drafter and its time in plain steps, as believed before it has been tried; by
            default it gains nothing.
    """

    def __init__(
        self,
        target: Session,
        *drafters: Drafter,
        cost: PassCost | None = None,
        uses: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.target = target
        self.drafters = drafters
        self._cost = cost
        self._choice = Choice(uses or [(1.0, 1.0)] * len(drafters))
        self._prices = [0.0] * len(drafters)  # decayed average of what drafting takes once caught up, in plain steps
        # Of a step without drafting. Not the cost of a pass of one row, which is made after a draft has had the caches.
        self._plain_seconds = cost(1) if cost else 0.0
        self._plain_seen = 1  # observations it is the mean of
        self._check_after = 0
        self._unchecked = 0  # steps since it was seen
        self._was_plain = False
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
        self._speculate, self._was_plain = speculate, False
        if speculate:
            self._start_drafters(prompt)
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
            tree = self._draft(chosen, sampling, max_depth, begin)
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
        advanced = time.perf_counter()
        self._root = emitted[-1]
        self._length += len(nodes)
        stats.record(tree, nodes)
        stats.target_seconds += evaluated - drafted
        stats.native_seconds += committed - drafted
        if self._cost:
            self._cost.observe(len(tree), evaluated - drafted)
            step = time.perf_counter() - begin
            if chosen is None and self._was_plain:
                # Plain decoding has no drafters to tell.
                change = surprise(step - (advanced - committed), self._plain_seconds)
                self._plain_seen += 1
                self._plain_seconds *= 1 + max(_PLAIN_BLEND, 1 / self._plain_seen) * change
                if self._unchecked > self._check_after:
                    self._check_after = min(max(2 * self._check_after, _FIRST_CHECK), _LAST_CHECK)
                self._unchecked = 0
            self._was_plain = chosen is None
            stats.plain_seconds += len(emitted) * self._plain_seconds
            self._choice.record(chosen, len(emitted), step / self._plain_seconds)
        return Emitted(emitted, [*(Stage(tree.stages[node]) for node in nodes[1:]), Stage.TARGET], tree, nodes)

    def _start_drafters(self, prompt: NDArray[np.int32]) -> None:
        for drafter in self.drafters:
            drafter.start(prompt)
        if self._cost is None:
            return
        best = self._choice.open()
        # What will be used reads the prompt now, together with the target; a trial pays for it later.
        if best is not None:
            self.drafters[best].catch_up()

    def _choose(self) -> int | None:
        """The drafter to use for this step, None where none pays."""
        if self._cost is None:
            return 0 if self.drafters else None
        prices = zip(self.drafters, self._prices, strict=True)
        chosen = self._choice.choose([price + drafter.lag() / self._plain_seconds for drafter, price in prices])
        if chosen is not None:
            self._unchecked += 1
            if self._unchecked > (self._check_after if self._choice.gain(chosen) < 1 else _RARE_CHECK):
                return None
        return chosen

    def _draft(self, chosen: int, sampling: SamplingConfig, max_depth: int, begin: float) -> TokenTree:
        """A tree of which verifying loses no more than may be lost."""
        drafter = self.drafters[chosen]
        if self._cost is None:
            return drafter.draft(sampling, max_depth)
        lag = drafter.lag() / self._plain_seconds
        tree = drafter.draft(sampling, max_depth)
        spent = (time.perf_counter() - begin) / self._plain_seconds
        price = self._prices[chosen]
        # One that the scheduler interrupted must not put the drafter beyond all credit, where it is never seen again.
        observed = min(max(0.0, spent - lag), max(2 * price, 1.0))
        self._prices[chosen] = price + _BLEND * (observed - price)
        rows = len(tree)
        while rows > 1 and spent + (self._cost(rows) - self._cost(1)) / self._plain_seconds > self._choice.credit:
            rows -= 1
        return tree.head(rows)
