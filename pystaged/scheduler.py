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
from pystaged.decoding.stepper import Stepper
from pystaged.sequence import Sequence

MOST_UNREAD = 256  # tokens that a sequence runs ahead of its reader
_ENDS = "no text can be written while the process ends"
_MOST_ASKED = 8  # sequences that wait for a prompt of another one, and are asked again in a round


class Scheduler:
    """Steps the sequences of one engine in a thread, which lives as long as the engine.

    Only that thread touches live sequences, their contexts and what drafters have learnt. Anybody else puts a new
    sequence into `_inbox` or sets flags of one, then rings `_bell`, at which the thread sleeps. A SimpleQueue's `put`
    is reentrant, so that a finalizer may call it in the middle of anything.

    Args:
        contexts: lend each sequence a context.
        note_end: called when a text is over.
    """

    def __init__(self, stepper: Stepper, contexts: ContextPool, note_end: Callable[[], None] = lambda: None) -> None:
        self._stepper, self._contexts, self._note_end = stepper, contexts, note_end
        self._begin()

    def _begin(self) -> None:
        """Begin without sequences: at first, and in a child of fork()."""
        self._process = os.getpid()
        self._inbox: SimpleQueue[Sequence] = SimpleQueue()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._sequences: list[Sequence] = []
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None  # which ends all sequences
        self._is_waiting, self._is_stopping = True, False

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is left, those aside that are not read to their end."""
        return self._is_waiting and not self._sequences and self._inbox.empty()

    def open(self, sequence: Sequence, put: Callable[[Any], None], most_unread: float | None = None) -> None:
        """Take on a sequence; it begins when there is room for it.

        Args:
            put: called by the thread with what the sequence says, an End as the last; must not wait.
            most_unread: tokens that it may have said and nobody has read yet; it waits beyond that; None for 256.
        """
        if os.getpid() != self._process:
            self._begin()  # the sequences and the thread are the parent's
        if sequence.end:  # fork() came in the middle of its end
            put(sequence.end)
            sequence.process = self._process
            return
        sequence.put, sequence.most_unread = put, MOST_UNREAD if most_unread is None else most_unread
        self._inbox.put(sequence)
        try:
            with self._starting:
                self._start()
        except RuntimeError as error:  # the system refuses a thread, or the process ends
            if isinstance(error.__context__, (KeyboardInterrupt, SystemExit)):
                raise error.__context__ from None  # a signal came while threading held a lock of its own
            sequence.close(error)
        self._ring()
        sequence.process = self._process  # the last, or Ctrl-C might leave one that nobody steps

    def _start(self) -> None:
        if self._is_stopping:
            raise RuntimeError(_ENDS)
        if self._thread is None:
            _running.add(self)
            self._bell = bell = SimpleQueue[None]()
            me = weakref.ref(self, lambda _: bell.put(None))
            self._thread = threading.Thread(target=_step, args=(me, bell), name="pystaged", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._thread = None
                bell.put(None)  # it may have been started, and is not the one
                raise

    def note_read(self, sequence: Sequence, piece: Any) -> None:
        """Note that somebody has read a piece, so that the sequence may go on."""
        sequence.num_read += len(piece.tokens)
        if self._is_waiting:
            self._ring()

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
        if sequence.can_step:
            self._stepper.step([sequence])

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence after the pass in hand. Waits for nothing."""
        sequence.is_cancelled = True
        self._ring()

    def stop(self) -> None:
        """End all sequences after the pass in hand, and the thread: the process ends."""
        self._is_stopping = True
        self._ring()
        if thread := self._thread:
            thread.join()

    def work(self) -> bool:
        """Step until no sequence can go on. For the thread, which ends where this returns False."""
        if not self.in_step:  # Ctrl-C came while the thread was started
            return False
        self._is_waiting = False
        self._settle()
        while not self._is_stopping:
            if not self._step():
                self._is_waiting = True  # before looking, or a reader might come in between and not ring
                if not self._ready():
                    return True
                self._is_waiting = False
            self._settle()
        return False

    def note_fault(self, error: BaseException) -> None:
        """Have an exception that `work` raised end all sequences when it is called next."""
        self._fault = error

    def _settle(self) -> None:
        """Take in new sequences, close those that are to go no further, forget those that are over."""
        if self._is_stopping:
            self._fault = RuntimeError(_ENDS)
        if self._fault:
            for sequence in self._sequences:
                sequence.close(self._fault)
            self._fault = None
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
        self._note_end()

    def _ring(self) -> None:
        """Have the thread, if there is any, look at the inbox and at the sequences' flags."""
        if self._bell.empty():  # else it has not looked yet
            self._bell.put(None)

    def _step(self) -> bool:
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
        self._stepper.step(ready)
        return bool(ready) or any(sequence.is_over for sequence in self._sequences)

    def _ready(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences if sequence.can_step]


def _step(scheduler: weakref.ref[Scheduler], bell: SimpleQueue[None]) -> None:
    """The thread of an engine: steps its sequences when the bell rings, until the engine is dropped.

    Nothing ends it early, not even memory that is short wherever it looks: what it was doing is done again, and the
    readers of all sequences are told.
    """
    is_idle, here = True, None
    while True:
        try:
            here = None
            if is_idle:
                bell.get()
            is_idle = False
            here = scheduler()
            if here is None or not here.work():
                return
            is_idle = True
        except BaseException as error:
            if here:
                here.note_fault(error)


# A thread that is in a pass when the interpreter is taken down would end the process with an error.
_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for scheduler in list(_running):
        scheduler.stop()
