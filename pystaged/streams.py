"""The pieces of one text as they come."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from pystaged.process import ProcessLock
from pystaged.result import GenerationResult, Piece
from pystaged.scheduler import Scheduler
from pystaged.sequence import End, PrefillProgress, Sequence


class Stream(Iterator[Piece]):
    """The pieces of one text as they come. Close it, from any thread, or use it as a context manager, to stop early;
    one that is dropped gives its context back.

    Texts of an engine share passes in a thread of the engine's, and run at most 256 tokens ahead of their readers.
    """

    def __init__(self, scheduler: Scheduler, sequence: Sequence) -> None:
        # The scheduler holds the sequence, never the stream, so that a stream is freed as soon as it is dropped.
        self._scheduler, self.sequence = scheduler, sequence
        self._said: SimpleQueue[Any] = SimpleQueue()
        self._turn = ProcessLock()
        self._reader: int | None = None  # the thread whose turn it is
        self._is_open = self._cancelled = self._over = False

    def __next__(self) -> Piece:
        if self._reader == threading.get_ident() or self._scheduler.is_stepping(self.sequence):
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
        if not self._is_open:
            self._is_open = True
            weakref.finalize(self, self._scheduler.cancel, self.sequence).atexit = False
        while isinstance(said := self._hear(), PrefillProgress):
            said.report()
        if isinstance(said, End):
            self._over = True
            raise said.error or StopIteration
        self._scheduler.note_read(self.sequence, said)
        return said

    def _hear(self) -> Piece | PrefillProgress | End:
        """What the sequence says next."""
        scheduler, sequence, said = self._scheduler, self.sequence, self._said
        if sequence.process != os.getpid():
            scheduler.open(sequence, said.put)  # or a child of fork() goes on with its copy of the parent's
        while scheduler.in_step and said.empty() and not sequence.end:  # in a policy, for which the thread waits
            scheduler.step(sequence)
        if sequence.end and said.empty():  # Ctrl-C may come just when the end is taken
            return sequence.end
        item: Piece | PrefillProgress | End = said.get()
        return item

    @property
    def result(self) -> GenerationResult:
        """The whole, once the stream is exhausted or closed. Raises RuntimeError before."""
        if self._cancelled and not self._over:
            self.close()
        if not self._over:
            raise RuntimeError("the stream has not been read to its end")
        return self.sequence.result()

    def finish(self) -> GenerationResult:
        """Read the rest and return the whole."""
        with self:
            for _ in self:
                pass
            return self.result

    def close(self) -> None:
        """Stop here. A step that is in hand is the last one; where another thread reads, or a policy calls this in the
        middle of it, the result is there after it."""
        self._cancelled = True
        if self._is_open:
            self._scheduler.cancel(self.sequence)
        if self._scheduler.is_stepping(self.sequence):
            return
        turn = self._turn.here()
        if turn.acquire(blocking=False):
            try:
                while self._is_open and not self._over:
                    self._over = isinstance(self._hear(), End)
                self._over = True
            finally:
                turn.release()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class OwningStream(Stream):
    """A stream at whose end an engine is closed.

    Args:
        close_engine: closes it; called once, at the end or when the stream is dropped.
    """

    def __init__(self, scheduler: Scheduler, sequence: Sequence, close_engine: Callable[[], None]) -> None:
        super().__init__(scheduler, sequence)
        self._close_engine = weakref.finalize(self, close_engine)

    def close(self) -> None:
        super().close()
        if self._over:
            self._close_engine()
