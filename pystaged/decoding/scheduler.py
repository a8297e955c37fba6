"""Scheduling of an engine's texts: one thread steps all of them, and readers wait on queues."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from pystaged._core import DeviceError
from pystaged.decoding.context import ContextPool, Wait
from pystaged.decoding.stepper import Stepper
from pystaged.decoding.text import Queue, Text
from pystaged.result import Piece

MOST_UNREAD = 256  # tokens that a text runs ahead of its reader
_ENDS = "no text can be generated while the process exits"
_FORKED = (
    "this process was forked from the one that loaded the model, and has none of its threads; load the model in the "
    'child, or use spawn: multiprocessing.get_context("spawn")'
)
_IN_STEP = "a policy cannot generate with its own engine, which waits for it; load the model a second time"
_MOST_ASKED = 8  # at most so many texts that wait for a shared prompt are tried again in a round
# CPython preallocates 16 MemoryErrors for when memory is short and aborts if all are in use, so texts share these.
_OUT_OF_MEMORY = {words: MemoryError(*words) for words in ((), ("std::bad_alloc",))}


class Scheduler:
    """Steps the texts of one engine in a thread, from the first text on until the engine is dropped.

    Only that thread uses running texts, their contexts and drafters. Other threads put a new text into `_inbox`
    or set its flags, then put an item into `_bell`, on which the thread waits. A SimpleQueue's `put` is reentrant, so
    that finalizers may call it at any time.

    Args:
        note_end: called when a text has ended.
    """

    def __init__(self, stepper: Stepper, contexts: ContextPool, note_end: Callable[[], None] = lambda: None) -> None:
        self._stepper, self._contexts, self._note_end = stepper, contexts, note_end
        self._process = os.getpid()
        self._inbox, self._bell = SimpleQueue[Text](), SimpleQueue[None]()
        self._texts, self._starting = list[Text](), threading.Lock()
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None  # an error with which the next call of `work` must end all texts
        self._is_waiting, self._is_stopping = True, False

    def open(self, text: Text, queue: Queue, most_unread: float | None = None) -> None:
        """Add a text, which begins when there is room for it.

        Args:
            queue: where its reader waits.
            most_unread: tokens that it may decode ahead of its reader; None for 256.

        Raises:
            RuntimeError: as check_caller.
        """
        self.check_caller()
        text.queue, text.most_unread = queue, MOST_UNREAD if most_unread is None else most_unread
        self._inbox.put(text)
        try:
            with self._starting:
                self._start()
        except RuntimeError as error:  # the system refuses a thread, or the process ends
            if isinstance(error.__context__, (KeyboardInterrupt, SystemExit)):
                raise error.__context__ from None  # a signal came while threading held a lock of its own
            text.error = error
            self._end(text)
        self._ring()
        text.is_open = True  # last: if Ctrl-C comes before this, the reader's next call opens the text again

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

    def note_read(self, text: Text, piece: Piece) -> None:
        """Count a piece as read, so that the text may go on."""
        text.num_read += len(piece.tokens)
        if self._is_waiting:
            self._ring()

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of fork(), which lacks the thread and what it was about."""
        return os.getpid() != self._process

    @property
    def can_wait(self) -> bool:
        """Whether the caller may wait for a text: not in a child of fork(), nor inside a step, as a policy is."""
        return not self.is_forked and self._thread is not threading.current_thread()

    def check_caller(self) -> None:
        """Raise RuntimeError if the caller cannot wait for a text."""
        if not self.can_wait:
            raise RuntimeError(_FORKED if self.is_forked else _IN_STEP)

    def cancel(self, text: Text) -> None:
        """End a text after the current pass. Does not wait."""
        text.is_cancelled = True
        self._ring()

    def stop(self) -> None:
        """End all texts after the current pass, and wait for the thread's end, at the process's exit."""
        self._is_stopping = True
        self._ring()
        if thread := self._thread:
            thread.join()

    def work(self) -> bool:
        """Step until no text can go on. Called by the thread, which ends if this returns False."""
        if self._thread is not threading.current_thread():  # another one replaces it, as Ctrl-C interrupted its start
            return False
        self._is_waiting = False
        self._settle()
        while not self._is_stopping:
            ready = self._admit_all()
            self._stepper.step(ready)
            if not ready and not any(text.is_over for text in self._texts):
                self._is_waiting = True  # before the test, so that a reader in between wakes the thread
                if not self._ready():
                    return True
                self._is_waiting = False
            self._settle()
        self._settle()  # `stop` may have come during the last call
        return False

    def _settle(self) -> None:
        """Accept new texts, end those that are done, failed or cancelled, and drop ended ones."""
        for text in self._texts:
            if not text.is_over:  # otherwise its reader has been told
                text.error = self._fault or text.error
        self._fault = None
        while not self._inbox.empty():
            text = self._inbox.get()
            if text not in self._texts:  # after Ctrl-C its reader may open it again
                self._texts.append(text)
        for text in self._texts:
            if self._is_stopping and not text.is_over:
                text.error = RuntimeError(_ENDS)
            if text.is_cancelled or text.finish or text.error is not None:
                self._end(text)
        self._texts = [text for text in self._texts if not text.is_over]

    def _end(self, text: Text) -> None:
        """End a text, with or without an error: its context rests, and its reader hears of the end. After a MemoryError
        it can be called again."""
        if text.is_over and text.queue is None:
            return
        try:
            try:
                text.end()
            finally:
                if context := text.context:
                    text.context = None
                    self._contexts.give_back(context)
                    if isinstance(text.error, DeviceError):  # the idle ones may be lost, too
                        self._contexts.forget()
                    self._note_end()
        except BaseException as fault:  # must end this text alone
            text.error = fault if text.error is None else text.error
        if isinstance(text.error, (StopIteration, StopAsyncIteration)):  # a reader would take it for the end
            told = RuntimeError(f"{type(text.error).__name__} was raised while a text was decoded")
            told.__cause__, text.error = text.error, told
        if isinstance(text.error, MemoryError) and text.error.args in _OUT_OF_MEMORY:
            text.error = _OUT_OF_MEMORY[text.error.args]
            text.error.__traceback__ = text.error.__context__ = None
        text.is_over = True  # first: a reader that Ctrl-C interrupts after it took the end still sees that it is over
        if text.queue:
            text.queue.put((text, None))
        text.queue = None  # which may hold the text

    def _admit_all(self) -> list[Text]:
        """Begin texts in the order of their arrival; returns those that can step."""
        new, asked = [text for text in self._texts if not text.context], 0
        for text in new:
            asked += text.wait is Wait.PROMPT
            if text.wait is not Wait.PROMPT or asked <= _MOST_ASKED:
                self._admit(text)
            # No text overtakes one that waits for memory, or small ones could delay a large one for ever.
            if text.wait is Wait.MEMORY:
                break
        waiting = next((text for text in new if text.wait), None)
        if waiting and not self._ready():
            # All running texts wait for their readers, who may wait for this one.
            self._admit(waiting, must=True)
        return self._ready()

    def _admit(self, text: Text, *, must: bool = False) -> None:
        """Begin a text in a context, or store its reason to wait; with `must` it does not wait."""
        text.wait = None
        try:
            context = self._contexts.take(
                text.prompt_tokens, text.config.max_tokens, must=must, most_reused=text.most_reused
            )
            if isinstance(context, Wait):
                text.wait = context
            else:
                text.context = context
                text.begin(context)
        except BaseException as error:
            text.error = error
            self._end(text)

    def _ready(self) -> list[Text]:
        """The texts that have begun and have not ended, except those that are too far ahead of their readers."""
        return [text for text in self._texts if text.context and text.num_sent - text.num_read < text.most_unread]

    def _ring(self) -> None:
        """Wake the thread, if there is one, to read the inbox and the texts' flags."""
        if self._bell.empty():  # otherwise it will wake anyway
            self._bell.put(None)


def _step(scheduler: weakref.ref[Scheduler], bell: SimpleQueue[None]) -> None:
    """The thread of an engine: steps its texts whenever the bell has an item, until the engine is dropped.

    No error ends it, not even a MemoryError in its own code: it goes on, and the error ends all texts.
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
                here._fault = error


# A thread that runs a pass during the interpreter's shutdown would crash the process.
_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for scheduler in list(_running):
        scheduler.stop()
