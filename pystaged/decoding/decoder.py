"""A text's phases: it reads its prompt, then each step drafts a tree and verifies it with one pass of the target.

`ask` goes on to the next pass that the text needs, `take` takes what the pass found; stepper.py makes the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from pystaged._core import ContextFullError, Session
from pystaged.decoding.account import Account, Meter
from pystaged.decoding.constraint import constrained
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter, common_prefix
from pystaged.decoding.experts import ExpertCost
from pystaged.decoding.policy import MAX_NODES, BatchLoad
from pystaged.decoding.requests import AnyRequest, Clocks, Read, Score, Verify
from pystaged.decoding.step import FinishReason, Logprobs, Step
from pystaged.decoding.tree import Stage, TokenTree
from pystaged.options.config import SamplingConfig
from pystaged.sampling.constraint import Constraint
from pystaged.stats import DrafterStats, GenerationStats

_SCORED_ROWS = 64  # rows of a pass that scores; few, because each row has logits

Progress = Callable[[int, int], None]
"""Called during prefill with the tokens that were read so far and the tokens to read in all."""


@dataclass(slots=True)
class Prefill:
    """Options and results of one sequence's prefill.

    reuse: keep the prefix of the prompt that the context holds. prediction: tokens that drafters may expect after the
    prompt. num_top: number of the likeliest alternatives to each prompt token whose log-probabilities are wanted; None
    for no log-probabilities. first_scored: index of the first token with log-probabilities, at least 1. logprobs: the
    results, for each prompt token from that one on.
    """

    reuse: bool = True
    prediction: Sequence[int] = ()
    num_top: int | None = None
    first_scored: int = 1
    logprobs: list[Logprobs] = field(default_factory=list)

    def most_reused(self, length: int) -> int:
        """Most tokens that a prompt of `length` tokens may take from a context."""
        if not self.reuse:
            return 0
        # A token is scored when the one before it is evaluated.
        return length - 1 if self.num_top is None else min(length, self.first_scored) - 1

    def piece(self, session: Session, prompt: NDArray[np.int32], at: int) -> Read:
        """The request to prefill the next piece of a prompt. at: number of its tokens that the session holds."""
        tokens = prompt[:-1]
        num_unscored = len(tokens) if self.num_top is None else self.first_scored - 1
        if at < num_unscored:
            return Read(session, at, tokens[at:num_unscored])
        piece = slice(at, at + _SCORED_ROWS)
        sampling = SamplingConfig().native_sampling(None, self.num_top)
        return Score(session, at, tokens[piece], prompt[1:][piece], sampling)


class Phase(Enum):
    """What a text does next."""

    BEGIN = "keep what the context holds of the prompt"
    PREFILL = "read the prompt"
    CATCH_UP = "let the drafter read the prompt"
    STEP = "begin a tree"
    TREE = "grow the tree, and verify it"
    OVER = "nothing"


class Decoder:
    """Decodes one sequence at a time in a context: the target's session, the drafter with its sessions, the account.

    Between steps the target's session holds all tokens of the sequence but the last, the root of the next tree.

    Args:
        target: the session to decode in; nobody else may use it meanwhile.
        drafter: proposes the trees; None for plain decoding.
        cost: processor seconds of a target pass, refined here, to decide whether drafting pays. With None every step
            drafts.
        batch: the batch that shares the passes; by default this sequence alone.
        meter: measures the time of drafting; shared with the drafter.
        clocks: wall time and processor time.
    """

    def __init__(
        self,
        target: Session,
        drafter: Drafter | None = None,
        *,
        cost: PassCost | None = None,
        batch: BatchLoad | None = None,
        meter: Meter | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.batch = batch or BatchLoad()
        self.clocks = clocks or Clocks()
        self._meter = meter or Meter(self.clocks.processor)
        self.account = Account(cost, self.batch, self._meter)
        self._experts = cost if isinstance(cost, ExpertCost) else None
        self._phase = Phase.OVER
        self.request: AnyRequest | None = None  # the pass that the text needs
        self.outcome: Step | BaseException | None = None  # of its last pass
        self._drafting: Drafter | None = None  # the drafter of this sequence, None for plain decoding
        self._drafts: Drafter | None = None  # the same in this step, None if it does not draft
        self._before = self._root = -1  # the last two tokens of the sequence
        self._length = 0  # tokens in the context

    def begin(
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
    ) -> None:
        """Begin a text; its phases follow: `ask`, and `take` after each pass, until `end`.

        Args:
            prompt: int32[n], n >= 1.
            max_tokens: most tokens to decode, at least 1.
            is_end: whether a token ends the sequence; it is not emitted.
            speculate: False decodes plainly; the tokens are the same.
            stats: filled while decoding, complete after `end`.
            progress: called before the first piece of the prompt and after each.
            constraint: limits the tokens; an object for this sequence alone.
            prefill: options of prefill; an object for this sequence alone.

        Raises:
            ContextFullError: the prompt is longer than the context.
            ValueError: an empty prompt, or max_tokens below 1.
        """
        if len(prompt) < 1 or max_tokens < 1:
            raise ValueError(f"prompt and max_tokens must be at least 1 token, not {len(prompt)} and {max_tokens}")
        if len(prompt) > self.target.n_ctx:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.target.n_ctx}; shorten the prompt"
            )
        self._prompt, self.sampling, self.left, self._is_end = prompt, sampling, max_tokens, is_end
        self._drafting, self._is_plain = self.drafter if speculate else None, not speculate
        self.stats = GenerationStats() if stats is None else stats
        self._progress, self._constraint, self._prefill = progress, constraint, prefill or Prefill()
        self._phase, self.request, self.outcome = Phase.BEGIN, None, None

    def ask(self) -> None:
        """Go on to the next pass that the text needs, which is then `request`; or to an `outcome` without one."""
        self.outcome = None
        try:
            self.request = self._next_pass() if self.request is None else self.request
        except BaseException as error:
            self.outcome = error

    def take(self) -> None:
        """Go on with what the pass of `request` found. A step, or an error, after which the text must end, is then
        the `outcome`."""
        request, self.request = self.request, None
        assert request
        try:
            if request.session is not self.target:
                assert self._drafting
                self._drafting.take(request)
            elif isinstance(request, Verify):
                self.outcome = self._accept(request)
            else:
                self._note_piece(request)
        except BaseException as error:
            self.outcome = error

    def end(self) -> None:
        """End the text, after its last step or in the middle."""
        if self._phase is Phase.OVER:
            return
        begun, self._phase = self._phase is not Phase.BEGIN, Phase.OVER
        self.request = self.outcome = self._drafting = self._constraint = self._progress = None
        del self._is_end, self._prefill
        try:
            if self.drafter:
                self.drafter.constrain(None)
                self.drafter.end()
        finally:
            if begun:
                self.stats.finish(self._work_before, self.work(), self.target.weight_bytes)

    @property
    def wants_draft(self) -> bool:
        """Whether its request is for a session other than the target's."""
        return self.request is not None and self.request.session is not self.target

    def _next_pass(self) -> AnyRequest | None:
        if self._phase not in (Phase.STEP, Phase.TREE):
            if request := self._next_read():
                return request
            if self._constraint is not None and self._constraint.is_complete:
                self.outcome = Step([], [], TokenTree.root(self._root), [], 0.0, 0.0, 0, 0, finish_reason="stop")
                return None
        if self._phase is Phase.STEP:
            self._begin_tree()
        if self._drafts and (request := self._drafts.request()):
            return request
        return self._verify()

    def _next_read(self) -> AnyRequest | None:
        """The next pass that reads the prompt; None when it is read."""
        if self._phase is Phase.BEGIN:
            self._rewind()
        if self._drafting and (request := self._drafting.request()):
            return request
        if self._phase is Phase.PREFILL:
            if self._length < len(self._prompt) - 1:
                return self._prefill.piece(self.target, self._prompt, self._length)
            self._open()
            return self._next_read()
        self.account.opened()
        self.stats.reused_tokens += self.reused
        self.stats.prefill_seconds += self.clocks.wall() - self._began
        self._phase = Phase.STEP
        return None

    def _rewind(self) -> None:
        """Keep what the context holds of the prompt."""
        # Wall time, because users wait for the batch's other work, too.
        self._work_before, self._began = self.work(), self.clocks.wall()
        prompt, drafting = self._prompt, self._drafting
        self._phase = Phase.PREFILL
        self.stats.prompt_tokens += len(prompt)
        reused = min(common_prefix(self.target.tokens, prompt), self._prefill.most_reused(len(prompt)))
        reused = min(reused, drafting.reusable(prompt)) if drafting else reused
        self.reused = self._length = self.target.rewind(reused)
        if self._progress and self.reused < len(prompt) - 1:
            self._progress(0, len(prompt) - 1 - self.reused)

    def _note_piece(self, request: AnyRequest) -> None:
        """Take a piece of the prompt that the target has read."""
        request.check()
        first = self._length
        self._length += request.result
        if isinstance(request, Score):
            self._prefill.logprobs += request.logprobs
        self._note_experts(self._prompt[first : self._length])
        if self._drafting:
            self._drafting.watch(self._prompt, first, self._length)
        if self._progress:
            self._progress(self._length - self.reused, len(self._prompt) - 1 - self.reused)

    def _open(self) -> None:
        """Begin to draft: the drafter reads the prompt, as far as its account allows."""
        prompt, read = self._prompt, self._length - self.reused
        if self._progress and not read:
            self._progress(0, 0)
        self._before, self._root = int(prompt[-2]) if len(prompt) > 1 else -1, int(prompt[-1])
        if self.drafter:
            self.drafter.constrain(self._constraint)
        greedy = self.sampling.is_greedy
        if self._drafting:
            self._drafting.prediction, self._drafting.is_greedy = self._prefill.prediction, greedy
            self._drafting.start(prompt)
        self._phase = Phase.CATCH_UP
        self.account.open(self._drafting, len(prompt), read, greedy)

    def _begin_tree(self) -> None:
        """Begin a step: a drafter begins a tree if that may pay."""
        self._began, self._phase = self.clocks.wall(), Phase.TREE
        drafter = self._drafting if self._max_depth >= 1 else None
        self._drafts = drafter if self.account.begin(drafter, self._length) else None
        if self._drafts:
            self._drafts.draft(self.sampling, self._max_depth, self.account.seconds)

    def _verify(self) -> Verify:
        """The pass over the tree that was drafted."""
        if self._drafts:
            tree = self.account.trim(self._drafts.tree, self._drafts.estimate)
        else:
            tree = TokenTree.root(self._root)
        guesses, masks = self._constrain(tree)
        # A plain step asks for no candidates, because the time to find them would be a loss.
        recycled = self._drafts.recycled if self._drafts else None
        wanted = min(recycled.num_candidates, self.target.vocab_size) if recycled else 0
        self._meter.stop()
        return Verify(self.target, self._length, guesses, self.sampling.native, wanted, masks)

    def _accept(self, verified: Verify) -> Step:
        """Take the path of a tree and the bonus token; tell drafter and account."""
        self._meter.go_on()
        verified.check()
        tree, (path, tokens, logprobs, candidates) = verified.tree, verified.result
        experts = self._note_experts(tree.tokens)
        begin = self._meter()
        if self._drafts and (recycled := self._drafts.recycled):
            before = tree.tokens[tree.parents]
            before[0] = self._before
            recycled.learn(before, tree.tokens, *candidates)
        self._before, self._root = (self._root, *tokens)[-2:]
        self._length += len(path)
        stages = [*(Stage(tree.stages[node]) for node in path[1:]), Stage.TARGET]
        if self._drafting:
            self._drafting.advance(tokens)
        telling, certain = self._meter() - begin if self._drafts else 0.0, stages.count(Stage.GRAMMAR)
        speedup = self.account.record(verified, telling, certain, experts)
        rows, texts = verified.pass_rows, self.batch.sequences
        step = Step(tokens, stages, tree, path, verified.seconds, speedup, rows, texts, logprobs=logprobs)
        step = self._cut(step)
        if self._constraint:
            self._constraint.advance(step.tokens)
            if step.finish_reason != "stop" and self._constraint.is_complete:
                step = replace(step, finish_reason="stop")
        self.left -= len(step.tokens)
        self.stats.record(step, self.clocks.wall() - self._began)
        self._phase = Phase.STEP
        return step

    @property
    def _max_depth(self) -> int:
        """Most levels of the step's tree below its root."""
        return min(self.left, self.target.n_ctx - self._length, self.target.most_pending) - 1

    def work(self) -> dict[str, DrafterStats]:
        """Statistics of the drafter's work so far, by stage name."""
        return self.drafter.work() if self.drafter else {}

    @property
    def sessions(self) -> list[Session]:
        """The target's session, then those of the drafter."""
        return [self.target, *(self.drafter.sessions() if self.drafter else [])]

    def inherit(self, other: Decoder) -> None:
        """Copy the learnt state of another decoder with the same proposers."""
        self.account.inherit(other.account)
        if self.drafter and other.drafter:
            self.drafter.inherit(other.drafter)

    def close(self) -> None:
        """Close the sessions of target and drafter."""
        self.target.close()
        if self.drafter:
            self.drafter.close()

    def _cut(self, step: Step) -> Step:
        """The part of a step before the end token and within max_tokens, with finish_reason set if it is the last."""
        length = min(len(step.tokens), self.left)
        finish: FinishReason | None = "length" if length == self.left or self._length >= self.target.n_ctx else None
        for i, token in enumerate(step.tokens[:length]):
            if self._is_end(token):
                length, finish = i, "stop"
                break
        if finish is None:
            return step
        logprobs = step.logprobs[:length] if step.logprobs is not None else None
        return replace(
            step, tokens=step.tokens[:length], stages=step.stages[:length], finish_reason=finish, logprobs=logprobs
        )

    def _note_experts(self, tokens: NDArray[np.int32]) -> int | None:
        """Of a mixture, learn the experts of the last pass's rows; returns the number of those of the whole pass."""
        if self._experts is None:
            return None
        used, distinct = self.target.experts
        self._experts.learn(tokens.tolist(), used)
        return distinct

    def _constrain(self, tree: TokenTree) -> tuple[TokenTree, NDArray[np.uint32] | None]:
        """The tree with the constraint's forced tokens and without forbidden ones, and the masks of its nodes."""
        if self._constraint is None:
            return tree, None
        forced = [] if self._is_plain else self._constraint.forced()[: max(0, min(self._max_depth, MAX_NODES))]
        return constrained(tree, self._constraint, forced)
