"""The state of one sequence, from its prompt to its result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DeviceError, Tokenizer
from pystaged.chat.turn import TurnReader
from pystaged.decoding.contexts import Wait
from pystaged.decoding.decoder import Decoder, Prefill
from pystaged.decoding.origin import Origin
from pystaged.decoding.step import Logprobs, Step
from pystaged.decoding.stop_strings import TextBuffer
from pystaged.decoding.tree import Stage
from pystaged.options.config import GenerationConfig
from pystaged.result import DeviceLostError, FinishReason, GenerationResult, Piece, TokenLogprob
from pystaged.sampling.binding import bind
from pystaged.sampling.constraint import Constraint
from pystaged.sampling.repetition import LoopFinder
from pystaged.sampling.text import Prompt
from pystaged.sampling.thinking import Reasoning, ReasoningConstraint
from pystaged.stats import GenerationStats


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Progress of prefill: tokens done, `of` tokens in all, for the function `progress`. The reader calls it, because
    the thread that steps sequences must not wait."""

    progress: Callable[[int, int], object]
    tokens: int
    of: int

    def report(self) -> None:
        self.progress(self.tokens, self.of)


# CPython preallocates 16 MemoryErrors for when memory is short and aborts if all are in use, so sequences share these.
_OUT_OF_MEMORY = {words: MemoryError(*words) for words in ((), ("std::bad_alloc",))}


@dataclass(frozen=True, slots=True)
class End:
    """The last item of a sequence: the exception that ended it, or None."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class TokenRoles:
    """What tokens are in a sequence.

    is_end: whether a token ends it; None for the vocabulary's end tokens. spelled: control tokens that are part of the
    text. reasoning: how it reasons, None for not at all or without limits; the constraint then begins after that.
    reader: makes a reader of the answer; stop strings then apply to what it tells as text alone. ends: further stop
    strings, which apply everywhere.
    """

    is_end: Callable[[int], bool] | None = None
    spelled: frozenset[int] = frozenset()
    reasoning: Reasoning | None = None
    reader: Callable[[], TurnReader] | None = None
    ends: tuple[str, ...] = ()


USUAL = TokenRoles()


class Sequence:
    """The state of one sequence: its options, and its tokens, text and statistics so far.

    It passes PrefillProgress, pieces, and last an End to `put`, which must not block. The scheduler's thread begins and
    steps it; other threads may call `result` at any time.

    config: its options. stats: its statistics so far. wait: the reason why it waits for a context. end: its End, which
    may have left the queue. num_sent, num_read: tokens passed to `put`, and those read; it pauses at a difference of
    most_unread. is_open: whether the scheduler has it.

    Args:
        prompt: as given; prompt_tokens: int32[n].
        constraint: limits the tokens; an object for this sequence alone.
        prediction: expected tokens, to draft from.
        origin: its inputs, for its receipt; None for no receipt.

    Raises:
        ValueError, TypeError: as in sampling.bind.
    """

    def __init__(
        self,
        prompt: Prompt,
        prompt_tokens: NDArray[np.int32],
        config: GenerationConfig,
        tokenizer: Tokenizer,
        *,
        constraint: Constraint | None = None,
        prediction: list[int] | None = None,
        origin: Origin | None = None,
        roles: TokenRoles = USUAL,
    ) -> None:
        if roles.reasoning is not None:
            constraint = ReasoningConstraint(roles.reasoning, constraint, tokenizer)
        self.prompt, self.prompt_tokens, self.config, self.roles = prompt, prompt_tokens, config, roles
        self.prediction = prediction or []
        self.stats = GenerationStats()
        self.tokens: list[int] = []
        self._tokenizer, self._constraint, self._origin = tokenizer, constraint, origin
        self._sampling = bind(config.sampling, tokenizer, len(prompt_tokens), config.logprobs, constraint)
        first_scored = max(1, config.prompt_logprobs_start)
        self._prefill = Prefill(config.reuse, self.prediction, config.prompt_logprobs, first_scored)
        self._buffer = TextBuffer(config.stop, roles.reader() if roles.reader and config.stop else None, roles.ends)
        self._loops = LoopFinder() if config.stop_loops else None
        self._text: list[str] = []
        self._stages: list[Stage] = []
        self._pieces: list[bytes] = []
        self._logprobs: list[TokenLogprob] | None = None if config.logprobs is None else []
        self._finish: FinishReason | None = None
        self._release: Callable[[BaseException | None], None] | None = None
        self.decoder: Decoder | None = None  # its context, while it is decoded
        self.is_over = False
        # Shared by the reader and the scheduler.
        self.put: Callable[[Any], None]
        self.most_unread: float = sys.maxsize
        self.num_sent = self.num_read = 0
        self.wait: Wait | None = None
        self.is_open = False
        self.is_cancelled = False
        self.end: End | None = None

    @property
    def most_reused(self) -> int:
        """Most tokens of the prompt that it may take from another sequence's KV cache."""
        return self._prefill.most_reused(len(self.prompt_tokens))

    @property
    def met_stop_string(self) -> str | None:
        """The stop string that has ended the text, or None."""
        return self._buffer.met

    @property
    def can_step(self) -> bool:
        """Whether it has begun, has not ended and is not too far ahead of its reader."""
        return self.decoder is not None and not self.is_over and self.num_sent - self.num_read < self.most_unread

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one of its tokens in the text."""
        return self._tokenizer.token_bytes(token, special=token in self.roles.spelled)

    def result(self) -> GenerationResult:
        """The result so far."""
        return GenerationResult(
            "".join(self._text),
            self.tokens,
            self._finish or "cancelled",
            self.config.sampling.seed,
            self.stats,
            self._stages,
            self._pieces,
            self._logprobs,
            self._prompt_logprobs(),
            self._origin,
        )

    def start(self, context: Decoder, release: Callable[[BaseException | None], None]) -> None:
        """Begin to decode in a context. Raises as Decoder.begin.

        Args:
            release: gives the context back; called at the end with the exception that ended the sequence, or None.
        """
        config, progress = self.config, self.config.progress
        context.begin(
            self.prompt_tokens,
            self._sampling,
            config.max_tokens,
            is_end=self.roles.is_end or self._tokenizer.is_end,
            speculate=config.speculate,
            stats=self.stats,
            progress=progress and (lambda tokens, of: self.put(PrefillProgress(progress, tokens, of))),
            constraint=self._constraint,
            prefill=self._prefill,
        )
        self.decoder, self._release = context, release

    def take(self, outcome: Step | BaseException | None) -> None:
        """Take what a step of the batch gave it."""
        try:
            if isinstance(outcome, Step):
                piece = self._piece(outcome)
                if piece.tokens or piece.text:
                    self.num_sent += len(piece.tokens)
                    self.put(piece)
                if self._finish:
                    self.close()
            elif outcome is not None:
                self.close(outcome)
        except BaseException as error:
            self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the sequence. After a MemoryError it can be called again."""
        if self.is_over:
            return
        try:
            if self.decoder:
                self.decoder.end()
        except BaseException as other:
            error = other if error is None else error
        if isinstance(error, (StopIteration, StopAsyncIteration)):  # a reader would take it for the end
            cause, error = error, RuntimeError(f"{type(error).__name__} was raised while a text was decoded")
            error.__cause__ = cause
        if self.end is None:
            self.end = End(self._leave(error))
        self.put(self.end)
        del self.put  # it may hold this sequence
        self.is_over = True

    def _leave(self, error: BaseException | None) -> BaseException | None:
        """Give the context back; returns the error for the reader."""
        lost, release, self._release = error, self._release, None
        try:
            if self._finish is None:  # the text held back can no longer become a stop string
                self._text.append(self._buffer.finish(cut=True))
            if isinstance(error, DeviceError) and self.decoder:
                words = self.prompt if isinstance(self.prompt, str) else self.prompt_tokens.tolist()
                lost = DeviceLostError(str(error), words, "".join(self._text), self.tokens)
                lost.__cause__ = error
            if release:
                release(error)
        except BaseException as fault:  # must end this sequence alone
            lost = fault if lost is None else lost
        self.decoder = None
        if isinstance(lost, MemoryError) and lost.args in _OUT_OF_MEMORY:
            lost = _OUT_OF_MEMORY[lost.args]
            lost.__traceback__ = lost.__context__ = None
        return lost

    def _piece(self, step: Step) -> Piece:
        """Add a step; returns its tokens up to a stop string or a loop, and the text that is certain after them."""
        text, new = "", 0
        finish: FinishReason | None = step.finish_reason
        for new, token in enumerate(step.tokens, 1):
            self._pieces.append(self.token_bytes(token))
            text += self._buffer.push(self._pieces[-1])
            if self._buffer.stopped:
                break
            if self._loops and self._loops.push(token) and not self._is_limited(len(self.tokens) + new):
                finish = "loop"
                break
        if finish:
            text += self._buffer.finish(cut=finish != "stop")
        self._finish = "stop" if self._buffer.stopped else finish
        self._text.append(text)
        self.tokens += step.tokens[:new]
        self._stages += step.stages[:new]
        self.stats.cut(step.stages[new:])
        logprobs = None
        if step.logprobs is not None and self._logprobs is not None:
            logprobs = tuple(map(self._logprob, step.tokens[:new], step.logprobs[:new]))
            self._logprobs += logprobs
        return Piece(text, tuple(step.tokens[:new]), tuple(step.stages[:new]), step.tree, tuple(step.path), logprobs)

    def _is_limited(self, count: int) -> bool:
        """Whether a grammar limits the last of so many tokens; it may demand repetitions, which are no loop then."""
        limits = self._constraint
        begins = limits.begins if isinstance(limits, ReasoningConstraint) else 0
        return limits is not None and begins is not None and count > begins

    def _prompt_logprobs(self) -> list[TokenLogprob] | None:
        if self._prefill.num_top is None:
            return None
        found = list(self._prefill.logprobs)  # a copy, because the thread may be appending
        tokens = self.prompt_tokens[self._prefill.first_scored :][: len(found)].tolist()
        return [self._logprob(token, logprobs) for token, logprobs in zip(tokens, found, strict=True)]

    def _logprob(self, token: int, logprobs: Logprobs) -> TokenLogprob:
        """Add the tokens' texts to log-probabilities."""

        def spelled(token: int) -> str:
            return self._tokenizer.token_bytes(token, special=True).decode("utf-8", "replace")

        top = [TokenLogprob(other, spelled(other), logprob) for other, logprob in logprobs.top]
        return TokenLogprob(token, spelled(token), logprobs.of_token, top)
