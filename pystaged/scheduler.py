"""When the sequences of an engine take steps: one thread steps all of them, and readers wait on queues."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from pystaged._core import DeviceError
from pystaged.decoding.contexts import ContextPool, Wait
from pystaged.decoding.loop import Decoder
from pystaged.decoding.rounds import Rounds
from pystaged.sequence import Sequence

MOST_UNREAD = 256  # tokens that a sequence runs ahead of its reader
_MOST_ASKED = 8  # sequences that wait for a prompt of another one, and are asked again in a round


class Scheduler:
    """Steps the sequences of one engine in a thread, which runs while there are any.

    Only that thread touches live sequences, their contexts and what drafters have learnt. Anybody else puts a new
    sequence into `_inbox` or sets flags of one, then rings `_bell`, at which the thread sleeps. A SimpleQueue's `put`
    is reentrant, so that a finalizer may call it in the middle of anything.

    Args:
        contexts: lend each sequence a context.
        note_end: called when a text is over.
    """

    def __init__(self, rounds: Rounds, contexts: ContextPool, note_end: Callable[[], None] = lambda: None) -> None:
        self._rounds, self._contexts, self._note_end = rounds, contexts, note_end
        self._begin()

    def _begin(self) -> None:
        """Begin without sequences: at first, and in a child of fork()."""
        self._process = os.getpid()
        self._inbox: SimpleQueue[Sequence] = SimpleQueue()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._sequences: list[Sequence] = []
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_waiting = self._is_stopping = False

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is left, those aside that are not read to their end."""
        return self._thread is None

    def open(self, sequence: Sequence, put: Callable[[Any], None], most_unread: float | None = None) -> None:
        """Take on a sequence; it begins when there is room for it.

        Args:
            put: called by the thread with what the sequence says, an End as the last; must not wait.
            most_unread: tokens that it may have said and nobody has read yet; it waits beyond that; None for 256.
        """
        if os.getpid() != self._process:
            self._begin()  # the sequences and the thread are the parent's
        sequence.put, sequence.most_unread = put, MOST_UNREAD if most_unread is None else most_unread
        self._inbox.put(sequence)
        with self._starting:
            try:
                self._start()
            except RuntimeError as error:  # the system refuses a thread, or the process ends
                sequence.close(error)
        self._ring()
        sequence.process = self._process  # the last, or Ctrl-C might leave one that nobody steps

    def _start(self) -> None:
        if self._is_stopping:
            raise RuntimeError("no text can be begun while the process ends")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pystaged", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._thread = None
                raise
            _running.add(self)

    def note_read(self, sequence: Sequence, piece: Any) -> None:
        """Note that somebody has read a piece, so that the sequence may go on."""
        sequence.num_read += len(piece.tokens)
        if self._is_waiting:
            self._ring()

    def hear(self, said: SimpleQueue[Any]) -> Any:
        """The next thing that sequences put into a queue. Raises MemoryError where the thread ended without a word."""
        while True:
            try:
                return said.get(timeout=0.5)
            except Empty:
                thread = self._thread
                if said.empty() and (thread is None or not thread.is_alive()):
                    self._thread = None
                    raise MemoryError("the thread that steps texts ended for want of memory") from None

    @property
    def in_step(self) -> bool:
        """Whether this thread is in the middle of a step, which waits for it: a policy that generates."""
        return self._thread is threading.current_thread()

    def is_stepping(self, sequence: Sequence) -> bool:
        """Whether this thread is in the middle of a step that this sequence has a part in; it cannot wait for that."""
        return self.in_step and sequence in self._sequences

    def step(self, sequence: Sequence) -> None:
        """Step a sequence in the middle of another one's step, where nobody else can."""
        if sequence.is_cancelled:
            sequence.close()
        self._admit(sequence, must=True)
        if sequence.may_go_on:
            self._rounds.play([sequence])

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence after the pass in hand. Waits for nothing."""
        sequence.is_cancelled = True
        self._ring()

    def stop(self) -> None:
        """End the thread after the pass in hand, whatever becomes of the sequences: the process ends."""
        self._is_stopping = True
        self._ring()
        if thread := self._thread:
            thread.join()

    def _run(self) -> None:
        with self._starting:
            if not self.in_step:  # Ctrl-C came while it was started
                return
        while True:
            try:
                self._settle()
                if self._is_over():
                    return
                played = self._round()
            except BaseException as error:
                # A fault of our own; nobody may hang.
                played = True
                for sequence in self._sequences:
                    sequence.close(error)
            if not played:
                self._wait()

    def _is_over(self) -> bool:
        """Whether the thread may end."""
        with self._starting:
            if not self._is_stopping and (self._sequences or not self._inbox.empty()):
                return False
            self._thread = None
            return True

    def _settle(self) -> None:
        """Take in new sequences, close those that were cancelled, forget those that are over."""
        while True:
            try:
                sequence = self._inbox.get_nowait()
            except Empty:
                break
            if sequence not in self._sequences:  # Ctrl-C may have its reader open it again
                self._sequences.append(sequence)
        for sequence in self._sequences:
            if sequence.is_cancelled:
                sequence.close()
        self._sequences = [sequence for sequence in self._sequences if not sequence.is_over]

    def _admit(self, sequence: Sequence, *, must: bool) -> None:
        """Begin a sequence in a context, or note what it has to wait for, unless it must begin."""
        if sequence.decoder or sequence.is_over:
            return
        contexts = self._contexts
        try:
            context = contexts.take(sequence.prompt_tokens, sequence.config.max_tokens, must=must, reuse=sequence.reuse)
            if isinstance(context, Wait):
                sequence.wait = context
                return
            try:
                sequence.start(context, lambda error: self._release(context, error))
            except BaseException:
                contexts.give_back(context)
                raise
        except BaseException as error:
            sequence.close(error)

    def _release(self, context: Decoder, error: BaseException | None) -> None:
        if isinstance(error, DeviceError):
            self._contexts.forget()
        else:
            self._contexts.give_back(context)
            self._contexts.tidy()
        self._note_end()

    def _ring(self) -> None:
        """Have the thread, if there is any, look at the inbox and at the sequences' flags."""
        if self._bell.empty():  # else it has not looked yet
            self._bell.put(None)

    def _round(self) -> bool:
        """Admit sequences in the order they came, then play a round; returns whether anything came of it."""
        waiting = [sequence for sequence in self._sequences if not sequence.decoder]
        asked = 0
        for sequence in waiting:
            if sequence.wait is Wait.PROMPT:
                asked += 1
                if asked > _MOST_ASKED:
                    continue
            self._admit(sequence, must=False)
            # Who waits for memory is not overtaken, or those that need little would leave nothing for those that need
            # much; who waits for a prompt keeps nobody waiting.
            if not sequence.decoder and not sequence.is_over and sequence.wait is Wait.MEMORY:
                break
        ready = self._ready()
        waiting = [sequence for sequence in waiting if not sequence.decoder and not sequence.is_over]
        if not ready and waiting:
            # What is live waits for its readers, which may wait for this one.
            self._admit(waiting[0], must=True)
            ready = self._ready()
        self._rounds.play(ready)
        return bool(ready) or any(sequence.is_over for sequence in self._sequences)

    def _ready(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences if sequence.may_go_on]

    def _wait(self) -> None:
        """Wait until somebody reads, cancels or opens a sequence."""
        self._is_waiting = True
        if not self._ready():
            self._bell.get()
        self._is_waiting = False


# A thread that is in a pass when the interpreter is taken down would end the process with an error.
_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for scheduler in list(_running):
        scheduler.stop()
