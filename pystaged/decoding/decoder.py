"""Decoding: a step drafts a tree and verifies it with one pass of the target.

Steps are generators that yield requests for passes; requests.py answers those of one sequence, stepper.py of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import ContextFullError, Session
from pystaged.config import SamplingConfig
from pystaged.decoding.batch_load import BatchLoad
from pystaged.decoding.budget import Budget
from pystaged.decoding.constraint import Constraint, constrained
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter, common_prefix
from pystaged.decoding.experts import ExpertCost
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import MAX_NODES
from pystaged.decoding.prefill import Prefill
from pystaged.decoding.requests import Clocks, Done, Request, Requests, Verify, alone
from pystaged.decoding.step import FinishReason, Step
from pystaged.decoding.tree import Stage, TokenTree
from pystaged.stats import DrafterStats, GenerationStats

Progress = Callable[[int, int], None]
"""Called during prefill with the tokens that were read so far and the tokens to read in all."""


class Decoder:
    """Decodes one sequence at a time in a context: the target's session, drafters with their sessions, and the budget.

    Between steps the target's session holds all tokens of the sequence but the last, the root of the next tree.

    Args:
        target: the session to decode in; nobody else may use it meanwhile.
        *drafters: propose the trees; each step uses the one with the highest expected gain. None for plain decoding.
        cost: processor seconds of a target pass, refined here, to decide whether drafting pays. With None the first
            drafter always drafts.
        rates: for each drafter, the initial estimate of the share of its first guesses that are right.
        batch: the batch that shares the passes; by default this sequence alone.
        meter: measures the time of drafting; shared with the drafters.
        clocks: wall time and processor time.
    """

    def __init__(
        self,
        target: Session,
        *drafters: Drafter,
        cost: PassCost | None = None,
        rates: Sequence[float] | None = None,
        batch: BatchLoad | None = None,
        meter: Meter | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.batch = batch or BatchLoad()
        self._clocks = clocks or Clocks()
        self._meter = meter or Meter(self._clocks.processor)
        self.budget = Budget(cost, self.batch, self._meter, rates or [0.5] * len(drafters))
        self._experts = cost if isinstance(cost, ExpertCost) else None
        self._drafting: Sequence[Drafter] = ()  # the drafters of this sequence, empty for plain decoding
        self._constraint: Constraint | None = None  # of this sequence
        self._is_plain = False
        self._before = self._root = -1  # the last two tokens of the sequence
        self._length = 0

    def generate(
        self,
        prompt: NDArray[np.int32],
        sampling: SamplingConfig,
        max_tokens: int,
        **options: Any,
    ) -> Generator[Step, None, None]:
        """Continue a prompt step by step, with a pass of its own for each request. Arguments and errors as in `text`;
        yields steps, no requests; uses the context only during `next`."""
        return alone(self.text(prompt, sampling, max_tokens, **options), self._clocks)

    def text(
        self,
        prompt: NDArray[np.int32],
        sampling: SamplingConfig,
        max_tokens: int,
        *,
        is_end: Callable[[int], bool] = lambda _: False,
        speculate: bool = True,
        stats: GenerationStats | None = None,
        progress: Progress | None = None,
        constraint: Constraint | None = None,
        prefill: Prefill | None = None,
    ) -> Generator[Request | Step, Done | None, None]:
        """Continue a prompt step by step.

        Args:
            prompt: int32[n], n >= 1.
            max_tokens: most tokens to decode, at least 1.
            is_end: whether a token ends the sequence; it is not emitted.
            speculate: False decodes plainly; the tokens are the same.
            stats: filled while decoding, complete when the iterator is exhausted or closed.
            progress: as in start.
            constraint: limits the tokens; an object for this sequence alone.
            prefill: options of prefill; an object for this sequence alone.

        Returns:
            A generator of requests, whose results must be sent to it, and of steps. The last step, which may have no
            tokens, has the finish_reason.

        Raises:
            ContextFullError: at once: the prompt is longer than the context.
            ValueError: at once: an empty prompt, or max_tokens below 1; later: from the constraint.
        """
        if len(prompt) < 1 or max_tokens < 1:
            raise ValueError(f"prompt and max_tokens must be at least 1 token, not {len(prompt)} and {max_tokens}")
        self._check(prompt)
        stats = GenerationStats() if stats is None else stats
        prefill = prefill or Prefill()
        return self._text(prompt, sampling, max_tokens, is_end, speculate, stats, progress, constraint, prefill)

    def start(
        self,
        prompt: NDArray[np.int32],
        *,
        speculate: bool = True,
        progress: Progress | None = None,
        greedy: bool = True,
        constraint: Constraint | None = None,
        prefill: Prefill | None = None,
    ) -> Requests[int]:
        """Prefill a prompt, int32[n] with n >= 1; returns the number of tokens that the context held already.

        After an interruption, the next call goes on after the pieces that were read.

        Args:
            speculate: False decodes plainly until the next start.
            progress: called before the first piece of the prompt and after each.
            greedy: whether decoding is greedy.
            constraint: limits the tokens until the next start; the caller of `step` must advance it.
            prefill: options of prefill.

        Raises:
            ContextFullError: the prompt is longer than the context.
        """
        self._check(prompt)
        prefill = prefill or Prefill()
        self._drafting = self.drafters if speculate else ()
        reused = min(common_prefix(self.target.tokens, prompt), prefill.most_reused(len(prompt)))
        reused = min([reused, *(drafter.reusable(prompt) for drafter in self._drafting)])
        reused = self.target.rewind(reused)
        missing = prompt[reused:-1]
        read = 0
        while read < len(missing):
            if progress:
                progress(read, len(missing))
            first = reused + read
            read += yield from prefill.read(self.target, prompt[:-1], prompt[1:], first)
            self._note_experts(prompt[first : reused + read])
            for drafter in self._drafting:
                yield from drafter.watch(prompt, first, reused + read)
        if progress:
            progress(read, read)
        self._before, self._root = int(prompt[-2]) if len(prompt) > 1 else -1, int(prompt[-1])
        self._length = len(prompt) - 1
        self._is_plain = not speculate
        self._constrain_by(constraint)
        for drafter in self._drafting:
            drafter.prediction = prefill.prediction
            drafter.start(prompt)
        yield from self.budget.open(self._drafting, len(prompt), len(missing), greedy)
        return reused

    def step(self, sampling: SamplingConfig, max_tokens: int) -> Requests[Step]:
        """Draft a tree, verify it, and return its tokens: at least one, normally no more than max_tokens."""
        max_depth = min(max_tokens, self.target.n_ctx - self._length, self.target.most_pending) - 1
        guesses, masks = self._constrain((yield from self._draft(sampling, max_depth)), max_depth)
        # A plain step asks for no candidates, because the time to find them would be a loss.
        recycled = self._drafting[self.budget.chosen].recycled if self.budget.chosen is not None else None
        wanted = min(recycled.num_candidates, self.target.vocab_size) if recycled else 0
        verified = yield from self._meter.target(
            Verify(self.target, self._length, guesses, sampling.native, wanted, masks)
        )
        tree, path, tokens, logprobs, candidates = verified.result
        experts = self._note_experts(tree.tokens)
        begin = self._meter()
        if recycled:
            before = tree.tokens[tree.parents]
            before[0] = self._before
            recycled.learn(before, tree.tokens, *candidates)
        self._before, self._root = (self._root, *tokens)[-2:]
        self._length += len(path)
        stages = [*(Stage(tree.stages[node]) for node in path[1:]), Stage.TARGET]
        self._tell(tokens)
        telling, certain = self._meter() - begin, stages.count(Stage.GRAMMAR)
        speedup = self.budget.record(self._drafting, verified, telling, certain, experts)
        return Step(
            tokens,
            stages,
            tree,
            path,
            verified.seconds,
            speedup,
            verified.num_rows,
            self.batch.sequences,
            logprobs=logprobs,
        )

    def work(self) -> dict[str, DrafterStats]:
        """Statistics of the drafters' work so far, by stage name."""
        total: dict[str, DrafterStats] = {}
        for drafter in self.drafters:
            for name, work in drafter.work().items():
                total[name] = total[name].plus(work) if name in total else work
        return total

    @property
    def sessions(self) -> list[Session]:
        """The target's session, then those of the drafters."""
        return [self.target, *(session for drafter in self.drafters for session in drafter.sessions())]

    def inherit(self, other: Decoder) -> None:
        """Copy the learnt state of another decoder with the same drafters."""
        self.budget.inherit(other.budget)
        for drafter, experienced in zip(self.drafters, other.drafters, strict=True):
            drafter.inherit(experienced)

    def close(self) -> None:
        """Close the sessions of target and drafters."""
        self.target.close()
        for drafter in self.drafters:
            drafter.close()

    @property
    def is_full(self) -> bool:
        """Whether the context has no position left to evaluate the root at."""
        return self._length >= self.target.n_ctx

    def _check(self, prompt: NDArray[np.int32]) -> None:
        if len(prompt) > self.target.n_ctx:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.target.n_ctx}; shorten the prompt"
            )

    def _text(
        self,
        prompt: NDArray[np.int32],
        sampling: SamplingConfig,
        max_tokens: int,
        is_end: Callable[[int], bool],
        speculate: bool,
        stats: GenerationStats,
        progress: Progress | None,
        constraint: Constraint | None,
        prefill: Prefill,
    ) -> Generator[Request | Step, Done | None, None]:
        # Wall time, because users wait for the batch's other work, too.
        wall = self._clocks.wall
        before, left, begin = self.work(), max_tokens, wall()
        stats.prompt_tokens += len(prompt)
        try:
            stats.reused_tokens += yield from self.start(
                prompt,
                speculate=speculate,
                progress=progress,
                greedy=sampling.is_greedy,
                constraint=constraint,
                prefill=prefill,
            )
            stats.prefill_seconds += wall() - begin
            finished = constraint is not None and constraint.is_complete
            if finished:
                yield Step([], [], TokenTree.root(self._root), [], 0.0, 0.0, 0, 0, finish_reason="stop")
            while not finished:
                begin = wall()
                step = self._cut((yield from self.step(sampling, left)), left, is_end)
                if constraint:
                    constraint.advance(step.tokens)
                    if step.finish_reason != "stop" and constraint.is_complete:
                        step = replace(step, finish_reason="stop")
                left -= len(step.tokens)
                finished = step.finish_reason is not None
                stats.record(step, wall() - begin)
                yield step
        finally:
            self._constrain_by(None)
            self._drafting = ()
            for drafter in self.drafters:
                drafter.end()
            stats.finish(before, self.work(), self.target.weight_bytes)

    def _cut(self, step: Step, max_tokens: int, is_end: Callable[[int], bool]) -> Step:
        """The part of a step before the end token and within max_tokens, with finish_reason set if it is the last."""
        length = min(len(step.tokens), max_tokens)
        finish: FinishReason | None = "length" if length == max_tokens or self.is_full else None
        for i, token in enumerate(step.tokens[:length]):
            if is_end(token):
                length, finish = i, "stop"
                break
        if finish is None:
            return step
        logprobs = step.logprobs[:length] if step.logprobs is not None else None
        return replace(
            step, tokens=step.tokens[:length], stages=step.stages[:length], finish_reason=finish, logprobs=logprobs
        )

    def _draft(self, sampling: SamplingConfig, max_depth: int) -> Requests[TokenTree]:
        drafters = self._drafting if max_depth >= 1 else ()
        self.budget.choose(drafters, self._length)
        shadow = self.budget.shadow
        # A forced token is no test of a drafter.
        if shadow is not None and not (self._constraint and self._constraint.forced()):
            scored, seconds = shadow
            yield from drafters[scored].draft(sampling, 1, seconds)
        chosen, tree = self.budget.chosen, TokenTree.root(self._root)
        if chosen is not None:
            tree = yield from drafters[chosen].draft(sampling, max_depth, self.budget.seconds)
        return self.budget.trim(tree)

    def _note_experts(self, tokens: NDArray[np.int32]) -> int | None:
        """Of a mixture, learn the experts of the last pass's rows; returns the number of those of the whole pass."""
        if self._experts is None:
            return None
        used, distinct = self.target.experts
        self._experts.learn(tokens.tolist(), used)
        return distinct

    def _constrain_by(self, constraint: Constraint | None) -> None:
        self._constraint = constraint
        for drafter in self.drafters:
            drafter.constrain(constraint)

    def _constrain(self, tree: TokenTree, max_depth: int) -> tuple[TokenTree, NDArray[np.uint32] | None]:
        """The tree with the constraint's forced tokens and without forbidden ones, and the masks of its nodes."""
        if self._constraint is None:
            return tree, None
        forced = [] if self._is_plain else self._constraint.forced()[: max(0, min(max_depth, MAX_NODES))]
        return constrained(tree, self._constraint, forced)

    def _tell(self, tokens: list[int]) -> None:
        try:
            for drafter in self._drafting:
                drafter.advance(tokens)
        except BaseException:
            # Some drafters lack these tokens, so none drafts until the next sequence.
            self._drafting = ()
            raise
