"""Stream of one generation."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from pystaged.decoding.scheduler import Scheduler
from pystaged.decoding.sequence import End, PrefillProgress, Sequence
from pystaged.result import GenerationResult, Piece


class Stream(Iterator[Piece]):
    """Iterator of the pieces of one generation. To stop early, close it from any thread, use it as a context manager,
    or drop it.

    A thread of the engine decodes all sequences in batches, each at most 256 tokens ahead of its reader.
    """

    def __init__(self, scheduler: Scheduler, sequence: Sequence) -> None:
        # The scheduler holds the sequence, never the stream, so that a stream is freed as soon as it is dropped.
        self._scheduler, self.sequence = scheduler, sequence
        self._said = SimpleQueue[Piece | PrefillProgress | End]()
        self._turn = threading.Lock()
        self._reader: int | None = None  # id of the thread that is reading
        self._is_open = self._cancelled = self._over = False

    def __next__(self) -> Piece:
        self._scheduler.check_caller()
        if self._reader == threading.get_ident():
            raise RuntimeError("`progress` or a signal handler reads the stream while its thread does")
        try:
            with self._turn:
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
            raise StopIteration if said.error is None else said.error
        self._scheduler.note_read(self.sequence, said)
        return said

    def _hear(self) -> Piece | PrefillProgress | End:
        """The next item of the sequence."""
        sequence, said = self.sequence, self._said
        if not sequence.is_open:
            self._scheduler.open(sequence, said.put)
        if sequence.end and said.empty():  # Ctrl-C interrupted an earlier read of the end
            return sequence.end
        return said.get()

    @property
    def result(self) -> GenerationResult:
        """The whole result, once the stream is exhausted or closed. Raises RuntimeError before."""
        if self._cancelled and not self._over:
            self.close()
        if not self._over:
            raise RuntimeError("the stream has not been read to its end")
        return self.sequence.result()

    def finish(self) -> GenerationResult:
        """Read the rest and return the whole result."""
        with self:
            for _ in self:
                pass
            return self.result

    def close(self) -> None:
        """Stop after the current step. If another thread is reading, or a policy calls this inside the step, the result
        is complete after that step."""
        self._cancelled = True
        if self._is_open:
            self._scheduler.cancel(self.sequence)
        if self._scheduler.can_wait and self._turn.acquire(blocking=False):
            try:
                while self._is_open and not self._over:
                    self._over = isinstance(self._hear(), End)
                self._over = True
            finally:
                self._turn.release()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OwningStream(Stream):
    """A stream that closes its engine at its end.

    Args:
        close_engine: called once, at the end or when the stream is dropped.
    """

    def __init__(self, scheduler: Scheduler, sequence: Sequence, close_engine: Callable[[], None]) -> None:
        super().__init__(scheduler, sequence)
        self._close_engine = weakref.finalize(self, close_engine)

    def close(self) -> None:
        super().close()
        if self._over:
            self._close_engine()
