"""A text: it reads its prompt, then each step drafts a tree and verifies it with one pass of the target.

`begin` puts it into a context, `ask` goes on to the next pass that it needs, `take` takes what the pass found, `end`
lets the drafter forget it; stepper.py makes the passes, and scheduler.py begins and ends texts and gives contexts back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DeviceError, Tokenizer
from pystaged.chat.turn import TurnReader
from pystaged.decoding.context import Context
from pystaged.decoding.drafter import Drafter, common_prefix
from pystaged.decoding.origin import Origin
from pystaged.decoding.policy import MAX_NODES
from pystaged.decoding.requests import AnyRequest, Logprobs, Read, Score, Verify
from pystaged.decoding.stop_strings import TextBuffer
from pystaged.decoding.tree import Stage, TreeBuilder, constrained
from pystaged.options.config import GenerationConfig, SamplingConfig
from pystaged.result import DeviceLostError, FinishReason, GenerationResult, Piece, TokenLogprob
from pystaged.sampling.binding import bind
from pystaged.sampling.constraint import Constraint
from pystaged.sampling.repetition import LoopFinder
from pystaged.sampling.text import Prompt
from pystaged.sampling.thinking import Reasoning, ReasoningConstraint
from pystaged.stats import DrafterStats, GenerationStats

_SCORED_ROWS = 64  # rows of a pass that scores; few, because each row has logits


Item = Piece | Callable[[], object] | None
"""What a text has for its reader: pieces; calls of the function `progress`, which the reader makes because the thread
that steps texts must not wait; and None at the end."""


@dataclass(frozen=True, slots=True)
class TokenRoles:
    """What tokens are in a text.

    is_end: whether a token ends it; None for the vocabulary's end tokens.
    spelled: control tokens that are part of the text.
    reasoning: how it reasons, None for not at all or without limits; the constraint then begins after that.
    reader: makes a reader of the answer; stop strings then apply to what it tells as text alone.
    ends: further stop strings, which apply everywhere.
    """

    is_end: Callable[[int], bool] | None = None
    spelled: frozenset[int] = frozenset()
    reasoning: Reasoning | None = None
    reader: Callable[[], TurnReader] | None = None
    ends: tuple[str, ...] = ()


USUAL = TokenRoles()


class Queue(Protocol):
    """Where a reader waits. `put` must not block."""

    def put(self, item: tuple[Text, Item], /) -> None: ...


class Phase(Enum):
    """What a text does next."""

    PREFILL = "read the prompt"
    CATCH_UP = "let the drafter read the prompt"
    STEP = "begin a tree"
    TREE = "grow the tree, and verify it"


@dataclass(eq=False)
class Text:
    """A text, from its prompt to its result. The scheduler's thread steps it; other threads may call `result`.

    Args:
        prompt: as given.
        prompt_tokens: int32[n], n >= 1.
        config: its options.
        tokenizer: None for tokens without text.
        constraint: limits the tokens; an object for this text alone.
        prediction: expected tokens, to draft from.
        origin: its inputs, for its receipt; None for no receipt.
        roles: what its tokens are.
        scheduler: the Scheduler that it can be opened with.

    Attributes:
        tokens, stages, pieces, logprobs: so far, as in GenerationResult.
        stats: so far; complete at the end.
        finish: why it has ended, None before.
        error: the exception that has ended it, None before.
        context: where it is decoded, while it is.
        reused: tokens of the prompt that it need not read again.
        request: the pass that it needs.
        wait: why it waits for a context.
        queue: takes (text, item).
        num_sent, num_read: tokens put into the queue, and those read; it pauses at a difference of most_unread.
        is_open, is_cancelled, is_over: whether the scheduler has it; should end it; has ended it.

    Raises:
        ValueError, TypeError: as in sampling.binding.bind.
    """

    prompt: Prompt
    prompt_tokens: NDArray[np.int32]
    config: GenerationConfig
    tokenizer: Tokenizer | None = None
    constraint: Constraint | None = None
    prediction: list[int] = field(default_factory=list)
    origin: Origin | None = None
    roles: TokenRoles = USUAL
    scheduler: Any = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    tokens: list[int] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    error: BaseException | None = None
    context: Context | None = None
    reused: int = 0
    request: AnyRequest | None = None
    wait: Enum | None = None
    queue: Queue | None = None
    most_unread: float = 0.0
    num_sent: int = 0
    num_read: int = 0
    is_open: bool = False
    is_cancelled: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        config, roles, tokenizer = self.config, self.roles, self.tokenizer
        self.sampling = config.sampling
        if tokenizer:
            if roles.reasoning is not None:
                self.constraint = ReasoningConstraint(roles.reasoning, self.constraint, tokenizer)
            self.sampling = bind(config.sampling, tokenizer, len(self.prompt_tokens), config.logprobs, self.constraint)
        self.logprobs = None if config.logprobs is None else []
        self._is_end = roles.is_end or (tokenizer.is_end if tokenizer else lambda _: False)
        self._first_scored = max(1, config.prompt_logprobs_start)
        self._prompt_logprobs: list[Logprobs] = []
        self.buffer = TextBuffer(config.stop, roles.reader() if roles.reader and config.stop else None, roles.ends)
        self._loops = LoopFinder() if config.stop_loops else None
        self._parts: list[str] = []  # of the text
        self._drafter: Drafter | None = None  # of this text, None for plain decoding
        self._is_drafting = False  # whether it drafts in this step

    @property
    def most_reused(self) -> int:
        """Most tokens of the prompt that it may take from a context."""
        if not self.config.reuse:
            return 0
        # A token is scored when the one before it is evaluated.
        length = len(self.prompt_tokens)
        return length - 1 if self.config.prompt_logprobs is None else min(length, self._first_scored) - 1

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one of its tokens in the text."""
        return self.tokenizer.token_bytes(token, special=token in self.roles.spelled) if self.tokenizer else b""

    def result(self) -> GenerationResult:
        """The result so far."""
        found = list(self._prompt_logprobs)  # a copy, because the thread may be appending
        tokens = self.prompt_tokens[self._first_scored :][: len(found)].tolist()
        scored = None if self.config.prompt_logprobs is None else [*map(self._logprob, tokens, found)]
        finish: FinishReason = self.finish or "cancelled"
        text, seed = "".join(self._parts), self.config.sampling.seed
        return GenerationResult(
            text, self.tokens, finish, seed, self.stats, self.stages, self.pieces, self.logprobs, scored, self.origin
        )

    def begin(self, context: Context) -> Text:
        """Begin in a context, and keep what that holds of the prompt."""
        prompt, target = self.prompt_tokens, context.target
        self.context, self._phase = context, Phase.PREFILL
        # Wall time, because users wait for the batch's other work, too.
        self._began, self._worked = context.clocks.wall(), self._work()
        self._drafter = context.drafter if self.config.speculate else None
        self.stats.prompt_tokens += len(prompt)
        reused = min(common_prefix(target.tokens, prompt), self.most_reused)
        reused = min(reused, self._drafter.reusable(prompt)) if self._drafter else reused
        self.reused = self._length = target.rewind(reused)  # tokens in the context
        self._progress(0)
        return self

    def ask(self) -> None:
        """Go on to the next pass that it needs, which is then `request`; or to its end, or an error."""
        try:
            while not (self.request or self.finish or self.error is not None):
                if self._drafter and self._phase is not Phase.STEP:
                    self.request = self._drafter.request()  # it reads what the target has read, or grows its tree
                self.request = self.request or self._go_on()
        except BaseException as error:
            self.error = error

    def _go_on(self) -> AnyRequest | None:
        """The target's next pass; None if the text goes on to another phase."""
        assert self.context
        prompt, drafter, account = self.prompt_tokens, self._drafter, self.context.account
        if self._phase is Phase.TREE:
            return self._verify()
        if self._phase is Phase.STEP:
            self._begin_tree()
        elif self._phase is Phase.PREFILL:
            if self._length < len(prompt) - 1:
                return self._piece_of_prompt()
            # The drafter begins, and reads the prompt as far as its account allows.
            self._before, self._root = int(prompt[-2]) if len(prompt) > 1 else -1, int(prompt[-1])
            if drafter:
                greedy, prediction = self.sampling.is_greedy, self.prediction
                drafter.start(prompt, greedy=greedy, prediction=prediction, constraint=self.constraint)
            account.open(drafter, len(prompt), self._length - self.reused)
            self._phase = Phase.CATCH_UP
        else:
            self.stats.reused_tokens += self.reused
            self.stats.prefill_seconds += self.context.clocks.wall() - self._began
            self.finish = "stop" if self.constraint is not None and self.constraint.is_complete else None
            if self.finish:
                account.begin(None, self._length)  # no step follows; this charges for reading the prompt
            self._phase = Phase.STEP
        return None

    @property
    def wants_draft(self) -> bool:
        """Whether its request is for a session other than the target's."""
        return self.request is not None and self.context is not None and self.request.session is not self.context.target

    def take(self) -> None:
        """Go on with what the pass of `request` found."""
        request, self.request = self.request, None
        assert request
        assert self.context
        try:
            if request.session is not self.context.target:
                assert self._drafter
                self._drafter.take(request)
            elif request.error is not None:
                raise request.error
            elif isinstance(request, Verify):
                self._accept(request, self.context)
            else:
                self._note_piece(request)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """End it, after its last step or in the middle, and let its drafter forget it; its context is then free."""
        context, drafter, self._drafter = self.context, self._drafter, None
        self.request = None
        if self.finish is None and not self.is_over:  # the text held back can no longer become a stop string
            self._parts.append(self.buffer.finish(cut=True))
        try:
            if drafter:
                drafter.end()
        except BaseException as other:
            self.error = self.error or other
        if context:
            self.stats.finish(self._worked, self._work(), context.target.weight_bytes)
        if isinstance(self.error, DeviceError) and context:
            words, lost = self.prompt if isinstance(self.prompt, str) else self.prompt_tokens.tolist(), self.error
            self.error = DeviceLostError(str(lost), words, "".join(self._parts), self.tokens)
            self.error.__cause__ = lost

    def _work(self) -> dict[str, DrafterStats]:
        """The work of the context's drafter so far, by stage name."""
        return self.context.drafter.work() if self.context and self.context.drafter else {}

    def _progress(self, tokens: int) -> None:
        """Tell how far the prompt is read."""
        if self.config.progress and self.queue:
            of = len(self.prompt_tokens) - 1 - self.reused
            self.queue.put((self, partial(self.config.progress, tokens, of)))

    def _piece_of_prompt(self) -> Read:
        """The pass that reads the next piece of the prompt."""
        assert self.context
        at, num_top, tokens = self._length, self.config.prompt_logprobs, self.prompt_tokens[:-1]
        num_unscored = len(tokens) if num_top is None else self._first_scored - 1
        if at < num_unscored:
            return Read(self.context.target, at, tokens[at:num_unscored])
        piece = slice(at, at + min(_SCORED_ROWS, self.context.target.most_pending))
        sampling = SamplingConfig().native_sampling(None, num_top)
        return Score(self.context.target, at, tokens[piece], self.prompt_tokens[1:][piece], sampling)

    def _note_piece(self, request: AnyRequest) -> None:
        """Take a piece of the prompt that the target has read."""
        first = self._length
        self._length += request.result
        if isinstance(request, Score):
            self._prompt_logprobs += request.logprobs
        if self._drafter:
            self._drafter.watch(self.prompt_tokens, first, self._length)
        self._progress(self._length - self.reused)

    def _begin_tree(self) -> None:
        """Begin a step: a drafter begins a tree if that may pay."""
        assert self.context
        target, account = self.context.target, self.context.account
        self._began, self._phase = self.context.clocks.wall(), Phase.TREE
        left = self.config.max_tokens - len(self.tokens)
        self._max_depth = min(left, target.n_ctx - self._length, target.most_pending) - 1
        drafter = self._drafter if self._max_depth >= 1 else None
        seconds = account.begin(drafter, self._length)
        self._is_drafting = seconds is not None
        if drafter and seconds is not None:
            drafter.draft(self.sampling, self._max_depth, seconds)

    def _verify(self) -> Verify:
        """The pass over the tree that was drafted."""
        assert self.context
        context, limits, masks = self.context, self.constraint, None
        drafter = self._drafter if self._is_drafting else None
        if drafter:
            tree = context.account.trim(drafter.tree)
        else:
            plain = TreeBuilder(self._root)
            if limits and self.config.speculate:
                plain.force(limits.forced()[: min(self._max_depth, MAX_NODES)])
            tree = plain.build(range(1, len(plain.nodes)))
        if limits is not None:
            tree, masks = constrained(tree, limits)
        # A plain step asks for no candidates, because the time to find them would be a loss.
        recycled = drafter.recycled if drafter else None
        wanted = min(recycled.num_candidates, context.target.vocab_size) if recycled else 0
        context.meter.stop()
        return Verify(context.target, self._length, tree, self.sampling.native, wanted, masks)

    def _accept(self, verified: Verify, context: Context) -> None:
        """Take the path of a tree and the bonus token; tell drafter and account; emit them."""
        meter = context.meter
        meter.go_on()
        tree, (path, tokens, _, candidates) = verified.tree, verified.result
        drafter, begin = self._drafter, meter()
        if drafter and self._is_drafting and (recycled := drafter.recycled):
            before = tree.tokens[tree.parents]
            before[0] = self._before
            recycled.learn(before, tree.tokens, *candidates)
        self._before, self._root = (self._root, *tokens)[-2:]
        self._length += len(path)
        stages = [Stage(tree.stages[node]) for node in path[1:]] + [Stage.TARGET]
        if drafter:
            drafter.advance(tokens)
        telling, certain = meter() - begin if self._is_drafting else 0.0, stages.count(Stage.GRAMMAR)
        speedup = context.account.record(verified, telling, certain)
        self._phase = Phase.STEP
        self._emit(verified, stages, speedup, context)

    def _emit(self, verified: Verify, stages: list[Stage], speedup: float, context: Context) -> None:
        """Add the tokens of a step up to the end, and put the text that is certain after them."""
        path, tokens, logprobs, _ = verified.result
        text, count, room = "", 0, self.config.max_tokens - len(self.tokens)
        finish: FinishReason | None = "length" if len(tokens) >= room or self._length >= context.target.n_ctx else None
        ended = False
        for i, token in enumerate(tokens[:room]):
            if self._is_end(token):
                finish, room, ended = "stop", i, True
                break
        tokens = tokens[:room]
        if self.constraint is not None:
            self.constraint.advance(tokens)
            finish = "stop" if self.constraint.is_complete else finish
        for count, token in enumerate(tokens, 1):
            self.pieces.append(self.token_bytes(token))
            text += self.buffer.push(self.pieces[-1])
            if self.buffer.met is not None:
                ended = False  # the text ends before its end token
                break
            if self._loops and self._loops.push(token) and not self._is_limited(len(self.tokens) + count):
                finish, ended = "loop", False
                break
        if finish:
            text += self.buffer.finish(cut=finish != "stop")
        self._parts.append(text)
        self.tokens += tokens[:count]
        self.stages += stages[:count]
        found = None
        if logprobs is not None and self.logprobs is not None:
            found = tuple(map(self._logprob, tokens[:count], logprobs[:count]))
            self.logprobs += found
        self.finish = "stop" if self.buffer.met is not None else finish
        seconds = context.clocks.wall() - self._began
        self.stats.record(verified, stages[:count], count + ended, context.batch.texts, speedup, seconds)
        if self.queue and (count or text):
            self.num_sent += count
            said = tuple(tokens[:count]), tuple(stages[:count]), verified.tree, tuple(path), found
            self.queue.put((self, Piece(text, *said)))

    def _is_limited(self, count: int) -> bool:
        """Whether a grammar limits the last of so many tokens; it may demand repetitions, which are no loop then."""
        limits = self.constraint
        begins = limits.begins if isinstance(limits, ReasoningConstraint) else 0
        return limits is not None and begins is not None and count > begins

    def _logprob(self, token: int, logprobs: Logprobs) -> TokenLogprob:
        """Add the tokens' texts to log-probabilities."""

        def spelled(token: int) -> str:
            return self.tokenizer.token_bytes(token, special=True).decode("utf-8", "replace") if self.tokenizer else ""

        own, best, of_best = logprobs
        top = [TokenLogprob(other, spelled(other), each) for other, each in zip(best, of_best, strict=True)]
        return TokenLogprob(token, spelled(token), own, top)
