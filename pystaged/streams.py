"""The pieces of one generation as they come."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from pystaged._core import DeviceError
from pystaged.config import GenerationConfig
from pystaged.contexts import Wait
from pystaged.decoding.opening import Opening
from pystaged.decoding.rounds import LiveText
from pystaged.decoding.step import Logprobs, Step
from pystaged.decoding.tree import Stage
from pystaged.loops import LoopFinder
from pystaged.process import ProcessLock
from pystaged.result import DeviceLostError, FinishReason, GenerationResult, Piece, TokenLogprob
from pystaged.sampling import bind
from pystaged.scheduler import End, Entry, Reading
from pystaged.stats import GenerationStats
from pystaged.text import TextBuffer

if TYPE_CHECKING:
    from pystaged.engine import Engine, Prompt


class Stream(Iterator[Piece]):
    """The pieces of one generation as they come. Close it, from any thread, or use it as a context manager, to stop
    early; one that is dropped gives its context back.

    Alone, a text is stepped by its reader. Several of an engine share passes in a thread of the engine's, and run at
    most 256 tokens ahead of their readers.
    """

    def __init__(self, writer: Writer) -> None:
        # The scheduler holds entry and writer, never the stream, so that a stream is freed as soon as it is dropped.
        self._writer, self._engine = writer, writer.engine
        self._entry = Entry(writer.admit)
        self._turn = ProcessLock()
        self._reader: int | None = None  # the thread whose turn it is
        self._is_open = self._cancelled = self._over = False

    def __next__(self) -> Piece:
        if self._reader == threading.get_ident() or self._engine._scheduler.is_stepping(self._entry):
            raise RuntimeError("a policy or a signal handler reads the stream in the middle of its own step")
        try:
            with self._turn.here():
                self._reader = threading.get_ident()
                try:
                    piece = self._next()
                finally:
                    self._reader = None
        except BaseException:
            self.close()
            raise
        if self._cancelled:
            self.close()
        return piece

    def _next(self) -> Piece:
        if self._over:
            raise StopIteration
        scheduler = self._engine._scheduler
        if not self._is_open:
            self._is_open = True
            scheduler.open(self._entry)
            weakref.finalize(self, scheduler.cancel, self._entry).atexit = False
        said = scheduler.next(self._entry)
        if isinstance(said, End):
            self._over = True
            raise said.error or StopIteration
        piece: Piece = said
        return piece

    @property
    def result(self) -> GenerationResult:
        """The whole, once the stream is exhausted or closed. Raises RuntimeError before."""
        if self._cancelled and not self._over:
            self.close()
        if not self._over:
            raise RuntimeError("the stream has not been read to its end")
        return self._writer.result()

    def finish(self) -> GenerationResult:
        """Read the rest and return the whole."""
        with self:
            for _ in self:
                pass
            return self.result

    def close(self) -> None:
        """Stop here. A step that is in hand is the last one; where another thread has it, or a policy calls this in the
        middle of it, the result is there after it."""
        self._cancelled = True
        if self._is_open:
            self._engine._scheduler.cancel(self._entry)
        if self._engine._scheduler.is_stepping(self._entry):
            return
        turn = self._turn.here()
        if turn.acquire(blocking=False):
            try:
                while self._is_open and not self._over:
                    self._over = isinstance(self._engine._scheduler.next(self._entry), End)
                self._over = True
            finally:
                turn.release()
            self._engine._contexts.tidy()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class OwningStream(Stream):
    """A stream whose engine is closed with it."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer)
        self._close_engine = weakref.finalize(self, writer.engine.close)

    def close(self) -> None:
        super().close()
        if self._over:
            self._close_engine()


class Writer:
    """One generation: begins its text in a context, makes pieces of the text's steps, and has the result.

    config: what it was asked for. stats: its figures so far.

    Args:
        is_end: whether a token ends the text; by default the tokens that the vocabulary says.

    Raises:
        ValueError, TypeError: as in Engine.encode, Engine.stream and sampling.bind; a closed engine.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        config: GenerationConfig,
        is_end: Callable[[int], bool] | None = None,
    ) -> None:
        engine._contexts.check_open()
        self.engine, self.prompt_tokens = engine, engine.encode(prompt)
        self._prompt, self.config, self._is_end = prompt, config, is_end
        self._constraint = engine._constraint(config)
        self._sampling = bind(
            config.sampling, engine.tokenizer, len(self.prompt_tokens), config.logprobs, self._constraint
        )
        self._buffer = TextBuffer(config.stop)
        self._loops = LoopFinder() if config.stop_loops else None
        self.stats = GenerationStats()
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._stages: list[Stage] = []
        self._pieces: list[bytes] = []
        self._logprobs: list[TokenLogprob] | None = None if config.logprobs is None else []
        self._opening = Opening(config.reuse, engine._prediction(config), config.prompt_logprobs)
        self._finish: FinishReason | None = None

    @property
    def seed(self) -> int:
        """Of the sampling."""
        return self.config.sampling.seed

    def seeded(self, seed: int) -> Writer:
        """The same text with another seed."""
        config = replace(self.config, sampling=replace(self.config.sampling, seed=seed))
        return Writer(self.engine, self._prompt, config, self._is_end)

    @property
    def prediction(self) -> Sequence[int]:
        """Tokens that the text is expected to have."""
        return self._opening.prediction

    @property
    def tokens(self) -> Sequence[int]:
        """The text's, as far as it is written."""
        return self._tokens

    @property
    def met_stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._buffer.met

    def result(self) -> GenerationResult:
        """What is written by now."""
        finish = self._finish or "cancelled"
        return GenerationResult(
            "".join(self._text),
            self._tokens,
            finish,
            self.seed,
            self.stats,
            self._stages,
            self._pieces,
            self._logprobs,
            self._prompt_logprobs(),
            None if self._is_end else self.engine._origin(self.prompt_tokens, self.config),
        )

    def admit(self, entry: Entry, must: bool) -> LiveText | Wait:
        """Begin the text in a context, or say what it has to wait for, unless it must begin. Raises as
        ContextPool.take."""
        config, contexts = self.config, self.engine._contexts
        progress = config.progress
        context = contexts.take(self.prompt_tokens, config.max_tokens, must=must, reuse=self._opening.reuse)
        if isinstance(context, Wait):
            return context
        try:
            steps = context.text(
                self.prompt_tokens,
                self._sampling,
                config.max_tokens,
                is_end=self._is_end or self.engine.tokenizer.is_end,
                speculate=config.speculate,
                stats=self.stats,
                progress=progress and (lambda tokens, of: entry.said.put(Reading(progress, tokens, of))),
                constraint=self._constraint,
                opening=self._opening,
            )
        except BaseException:
            contexts.give_back(context)
            raise

        def say(step: Step) -> None:
            piece = self._piece(step)
            if piece.tokens or piece.text:
                entry.say(piece)
            if self._buffer.stopped or self._finish == "loop":
                live.close()

        def end(error: BaseException | None) -> None:
            if self._finish is None:  # what was held back is no longer the beginning of a stop string
                self._text.append(self._buffer.finish(cut=True))
            if isinstance(error, DeviceError):
                contexts.forget()
                words = self._prompt if isinstance(self._prompt, str) else self.prompt_tokens.tolist()
                lost = DeviceLostError(str(error), words, "".join(self._text), self._tokens)
                lost.__cause__ = error
                error = lost
            else:
                contexts.give_back(context)
            self.engine._bundle.text_over()
            entry.end(error)

        live = LiveText(context, steps, say, end)
        return live

    def _piece(self, step: Step) -> Piece:
        """What a step adds: its tokens up to a stop string or a loop, and the text that is certain after them."""
        text, new = "", 0
        finish: FinishReason | None = step.finish_reason
        for token in step.tokens:
            self._pieces.append(self.engine.tokenizer.token_bytes(token))
            text += self._buffer.push(self._pieces[-1])
            new += 1
            if self._buffer.stopped:
                break
            if self._loops and self._loops.push(token):
                finish = "loop"
                break
        if finish:
            text += self._buffer.finish(cut=finish != "stop")
        self._finish = "stop" if self._buffer.stopped else finish
        self._text.append(text)
        self._tokens += step.tokens[:new]
        self._stages += step.stages[:new]
        self.stats.cut(step.stages[new:])
        logprobs = None
        if step.logprobs is not None and self._logprobs is not None:
            logprobs = tuple(map(self._logprob, step.tokens[:new], step.logprobs[:new]))
            self._logprobs += logprobs
        return Piece(text, tuple(step.tokens[:new]), tuple(step.stages[:new]), step.tree, tuple(step.path), logprobs)

    def _prompt_logprobs(self) -> list[TokenLogprob] | None:
        if self._opening.num_top is None:
            return None
        found = list(self._opening.logprobs)  # another thread may be reading the prompt
        tokens = self.prompt_tokens[1 : 1 + len(found)].tolist()
        return [self._logprob(token, logprobs) for token, logprobs in zip(tokens, found, strict=True)]

    def _logprob(self, token: int, logprobs: Logprobs) -> TokenLogprob:
        """The same with the tokens' texts."""

        def spelled(token: int) -> str:
            return self.engine.tokenizer.token_bytes(token, special=True).decode("utf-8", "replace")

        top = [TokenLogprob(other, spelled(other), logprob) for other, logprob in logprobs.top]
        return TokenLogprob(token, spelled(token), logprobs.of_token, top)
