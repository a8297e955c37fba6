"""Scheduling of an engine's sequences: one thread steps all of them, and readers wait on queues."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from pystaged._core import DeviceError
from pystaged.decoding.contexts import ContextPool, Wait
from pystaged.decoding.decoder import Decoder
from pystaged.decoding.sequence import Sequence
from pystaged.decoding.stepper import Stepper, own_copy

MOST_UNREAD = 256  # tokens that a sequence runs ahead of its reader
_ENDS = "no text can be generated while the process exits"
_FORKED = (
    "this process was forked from the one that loaded the model, and has none of its threads; load the model in the "
    'child, or use spawn: multiprocessing.get_context("spawn")'
)
_IN_STEP = "a policy cannot generate with its own engine, which waits for it; load the model a second time"
_MOST_ASKED = 8  # most sequences per round that wait for another one's prefill and are tried again


class Scheduler:
    """Steps the sequences of one engine in a thread, which lives as long as the engine.

    Only that thread uses running sequences, their contexts and drafters. Other threads put a new sequence into `_inbox`
    or set its flags, then put an item into `_bell`, on which the thread waits. A SimpleQueue's `put` is reentrant, so
    that finalizers may call it at any time.

    Args:
        contexts: lends each sequence a context.
        note_end: called when a sequence has ended.
    """

    def __init__(self, stepper: Stepper, contexts: ContextPool, note_end: Callable[[], None] = lambda: None) -> None:
        self._stepper, self._contexts, self._note_end = stepper, contexts, note_end
        self._process = os.getpid()
        self._inbox: SimpleQueue[Sequence] = SimpleQueue()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._sequences: list[Sequence] = []
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None  # an error that must end all sequences
        self._is_waiting, self._is_stopping = True, False

    def open(self, sequence: Sequence, put: Callable[[Any], None], most_unread: float | None = None) -> None:
        """Add a sequence, which begins when there is room for it.

        Args:
            put: called by the thread with the sequence's progress, pieces and last an End; must not block.
            most_unread: tokens that it may decode ahead of its reader; None for 256.

        Raises:
            RuntimeError: as check_caller.
        """
        self.check_caller()
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
        sequence.is_open = True  # last, so that after Ctrl-C the reader opens it again

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
                bell.put(None)  # if it was started all the same, it must end
                raise

    def note_read(self, sequence: Sequence, piece: Any) -> None:
        """Count a piece as read, so that the sequence may go on."""
        sequence.num_read += len(piece.tokens)
        if self._is_waiting:
            self._ring()

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of fork(), which lacks the thread and what it was about."""
        return os.getpid() != self._process

    @property
    def can_wait(self) -> bool:
        """Whether the caller may wait for a text: not in a child of fork(), nor inside a step, as a policy is."""
        return not self.is_forked and not self._in_step

    @property
    def _in_step(self) -> bool:
        return self._thread is threading.current_thread()

    def check_caller(self) -> None:
        """Raise RuntimeError if the caller cannot wait for a text."""
        if not self.can_wait:
            raise RuntimeError(_FORKED if self.is_forked else _IN_STEP)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence after the current pass. Does not wait."""
        sequence.is_cancelled = True
        self._ring()

    def stop(self) -> None:
        """End all sequences after the current pass, and wait for the thread's end, at the process's exit."""
        self._is_stopping = True
        self._ring()
        if thread := self._thread:
            thread.join()

    def work(self) -> bool:
        """Step until no sequence can go on. Called by the thread, which ends if this returns False."""
        if not self._in_step:  # Ctrl-C interrupted the start of this thread, and another one replaces it
            return False
        self._is_waiting = False
        self._settle()
        while not self._is_stopping:
            if not self._step():
                self._is_waiting = True  # before the test, so that a reader in between wakes the thread
                if not self._ready():
                    return True
                self._is_waiting = False
            self._settle()
        return False

    def note_fault(self, error: BaseException) -> None:
        """Let the next call of `work` end all sequences with an exception that this one raised."""
        self._fault = error

    def _settle(self) -> None:
        """Accept new sequences, close cancelled ones, and drop ended ones."""
        if self._is_stopping:
            self._fault = RuntimeError(_ENDS)
        if self._fault is not None:
            for sequence in self._sequences:
                sequence.close(own_copy(self._fault))
            self._fault = None
        while not self._inbox.empty():
            sequence = self._inbox.get()
            if sequence not in self._sequences:  # after Ctrl-C its reader may open it again
                self._sequences.append(sequence)
        for sequence in self._sequences:
            if sequence.is_cancelled:
                sequence.close()
        self._sequences = [sequence for sequence in self._sequences if not sequence.is_over]

    def _admit(self, sequence: Sequence, *, must: bool) -> None:
        """Begin a sequence in a context, or store its reason to wait; with `must` it does not wait."""
        if sequence.decoder or sequence.is_over:
            return
        contexts = self._contexts
        try:
            tokens, config = sequence.prompt_tokens, sequence.config
            context = contexts.take(tokens, config.max_tokens, must=must, most_reused=sequence.most_reused)
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
        """Wake the thread, if there is one, to read the inbox and the sequences' flags."""
        if self._bell.empty():  # otherwise it will wake anyway
            self._bell.put(None)

    def _step(self) -> bool:
        """Admit sequences in the order of their arrival, then step those that can; returns whether any went on."""
        waiting = [sequence for sequence in self._sequences if not sequence.decoder]
        put_off = {*[sequence for sequence in waiting if sequence.wait is Wait.PROMPT][_MOST_ASKED:]}
        for sequence in waiting:
            if sequence not in put_off:
                self._admit(sequence, must=False)
            # No sequence overtakes one that waits for memory, or small ones could delay a large one for ever.
            if not sequence.decoder and not sequence.is_over and sequence.wait is Wait.MEMORY:
                break
        ready = self._ready()
        waiting = [sequence for sequence in waiting if not sequence.decoder and not sequence.is_over]
        if not ready and waiting:
            # All running sequences wait for their readers, who may wait for this one.
            self._admit(waiting[0], must=True)
            ready = self._ready()
        texts = [sequence.decoder for sequence in ready if sequence.decoder]
        for sequence, outcome in zip(ready, self._stepper.step(texts), strict=True):
            sequence.take(outcome)
        return bool(ready) or any(sequence.is_over for sequence in self._sequences)

    def _ready(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences if sequence.can_step]


def _step(scheduler: weakref.ref[Scheduler], bell: SimpleQueue[None]) -> None:
    """The thread of an engine: steps its sequences whenever the bell has an item, until the engine is dropped.

    No error ends it, not even a MemoryError in its own code: it goes on, and the error ends all sequences.
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


# A thread that runs a pass during the interpreter's shutdown would crash the process.
_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for scheduler in list(_running):
        scheduler.stop()
