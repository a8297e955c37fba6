"""Who steps the texts of an engine: a text alone is stepped by whoever reads it, several together by a thread."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from pystaged.contexts import Wait
from pystaged.decoding.rounds import LiveText, Rounds

MOST_UNREAD = 256  # tokens that a text runs ahead of its reader
_MOST_ASKED = 8  # texts that wait for a prompt of another one, and are asked again in a round


class Said(Protocol):
    """Where a text puts what it says: how far its prompt is read, pieces, and an End as the last."""

    def put(self, item: Any) -> None:
        """Called by the thread that steps the text; must not wait."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How many tokens of a prompt are read, of how many, and who is to be told: by the text's reader, because who steps
    texts must not wait."""

    progress: Callable[[int, int], object]
    tokens: int
    of: int

    def tell(self) -> None:
        self.progress(self.tokens, self.of)


@dataclass(frozen=True, slots=True)
class End:
    """The last thing that a text says: the exception that ended it, or None."""

    error: BaseException | None


class Entry:
    """A text in the hands of a scheduler.

    Args:
        admit: called with this entry, whose `say` and `end` the text calls, and whether it must begin; begins it in a
            context, or returns what it has to wait for.
        said: where what it says goes, for a text that only the thread steps; by default a queue of its own, for a
            reader that calls `Scheduler.next` and may step it.
        most_unread: tokens of it that may be said and not read yet; it waits beyond that.
    """

    def __init__(
        self,
        admit: Callable[[Entry, bool], LiveText | Wait],
        *,
        said: Said | None = None,
        most_unread: float = MOST_UNREAD,
    ) -> None:
        self.admit = admit
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.said: Said = said or self.queue
        self.in_background = said is not None
        self.most_unread = most_unread
        self.live: LiveText | None = None
        self.wait: Wait | None = None  # what for, when it was asked last
        self.num_said = self.num_read = 0  # tokens
        self.process: int | None = None  # in which it was opened
        self.is_cancelled = self.is_over = False

    def say(self, piece: Any) -> None:
        """Called with each piece of the text."""
        self.num_said += len(piece.tokens)
        self.said.put(piece)

    def end(self, error: BaseException | None) -> None:
        """Called when the text is over."""
        self.is_over = True
        self.said.put(End(error))


_YOURS = object()  # said to a reader that waits: step the text yourself


class _Turn:
    """A lock that is given back whatever moment Ctrl-C comes at."""

    def __init__(self) -> None:
        # An RLock knows its owner; a flag of ours might not have been set yet when Ctrl-C comes.
        self._lock: Any = threading.RLock()

    @property
    def is_mine(self) -> bool:
        return bool(self._lock._is_owned())

    @contextmanager
    def at_once(self) -> Iterator[bool]:
        """Take it if it is free; gives whether it was."""
        try:
            self._lock.acquire(blocking=False)
            yield self.is_mine
        finally:
            try:
                self._give_back()
            except BaseException:
                self._give_back()
                raise

    def _give_back(self) -> None:
        if self.is_mine:
            self._lock.release()

    @contextmanager
    def when_free(self) -> Iterator[None]:
        """Wait for it."""
        with self._lock:
            yield


class Scheduler:
    """Steps the texts of one engine, whatever threads their readers are in.

    Only who holds `_driver` touches live texts, their contexts and what drafters have learnt. Anybody else puts a new
    entry into `_inbox` or sets flags of one, then rings `_bell`, at which the thread sleeps. Whoever steps texts
    empties the inbox; only the thread takes from the bell, so that nobody else can keep it asleep. A SimpleQueue's
    `put` is reentrant, so that a finalizer may call it in the middle of anything.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._begin()

    def _begin(self) -> None:
        """Begin without texts: at first, and in a child of fork()."""
        self._process = os.getpid()
        self._driver = _Turn()
        self._inbox: SimpleQueue[Entry] = SimpleQueue()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._texts: list[Entry] = []
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_waiting = self._is_stopping = False

    def open(self, entry: Entry) -> None:
        """Take on a text; it begins when there is room for it."""
        if os.getpid() != self._process:
            self._begin()  # the texts and the thread are the parent's
        self._inbox.put(entry)
        entry.process = self._process
        if entry.in_background or self._thread:
            self._wake()

    def next(self, entry: Entry) -> Any:
        """The next piece of a text, or an End; steps the text in this thread while it is the only one. Tells how far
        its prompt is read."""
        if entry.process != os.getpid():
            self.open(entry)  # a copy of the parent's, for the child to go on with, or Ctrl-C came before it was opened
        while True:
            try:
                said = entry.queue.get_nowait()
            except Empty:
                if self._step_alone(entry):
                    continue
                self._wake()
                said = entry.queue.get()
            if isinstance(said, Reading):
                said.tell()
            elif said is not _YOURS:
                break
        if not isinstance(said, End):
            self.read(entry, said)
        return said

    def read(self, entry: Entry, piece: Any) -> None:
        """Tell that somebody has read a piece, so that the text may go on."""
        entry.num_read += len(piece.tokens)
        if self._is_waiting:
            self._ring()

    @property
    def in_step(self) -> bool:
        """Whether this thread is in the middle of a step of a text, which waits for it: a policy that generates."""
        return self._driver.is_mine

    def is_stepping(self, entry: Entry) -> bool:
        """Whether this thread is in the middle of a step that this text has a part in, and so cannot wait for it."""
        return self.in_step and entry in self._texts

    def cancel(self, entry: Entry) -> None:
        """End a text after the pass in hand; at once where none is. Waits for nothing."""
        entry.is_cancelled = True
        self._ring()
        if not self._driver.is_mine:
            with self._driver.at_once() as has_turn:
                if has_turn:
                    self._settle()

    def stop(self) -> None:
        """End the thread after the pass in hand, whatever becomes of the texts: the process ends."""
        self._is_stopping = True
        self._ring()
        if self._thread:
            self._thread.join()

    def _step_alone(self, entry: Entry) -> bool:
        """Step a text in this thread if no other text is there, or if another one's step waits for it; returns whether
        it did."""
        if self.in_step:
            self._step(entry)
            return True
        with self._driver.at_once() as has_turn:
            if not has_turn:
                return False
            self._settle()
            if len(self._texts) > 1 or entry.in_background:
                return False
            self._step(entry)
            self._settle()
            return True

    def _step(self, entry: Entry) -> None:
        if entry.is_cancelled:
            self._close(entry)
        self._admit(entry, must=True)
        if entry.live and not entry.is_over:
            self._rounds.play_alone(entry.live)

    def _close(self, entry: Entry, error: BaseException | None = None) -> None:
        if entry.live:
            entry.live.close(error)
        if not entry.is_over:  # it had not begun, or fork() came in the middle of its step, which this process has not
            entry.end(error)

    def _admit(self, entry: Entry, *, must: bool) -> None:
        if entry.live is None and not entry.is_over:
            try:
                admitted = entry.admit(entry, must)
                if isinstance(admitted, Wait):
                    entry.wait = admitted
                else:
                    entry.live = admitted
            except BaseException as error:
                entry.end(error)

    def _settle(self) -> None:
        """Take in new texts, close those that were cancelled, forget those that are over."""
        while True:
            try:
                entry = self._inbox.get_nowait()
            except Empty:
                break
            if entry not in self._texts:  # Ctrl-C may have its reader open it again
                self._texts.append(entry)
        for entry in self._texts:
            if entry.is_cancelled:
                self._close(entry)
        self._texts = [entry for entry in self._texts if not entry.is_over]

    def _wake(self) -> None:
        """See to it that a thread steps the texts."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pystaged", daemon=True)
                thread.start()  # which the system may refuse
                self._thread = thread
                _running.add(self)
        self._ring()

    def _ring(self) -> None:
        """Have the thread, if there is any, look at the inbox and at the entries' flags."""
        if self._bell.empty():  # else it has not looked yet
            self._bell.put(None)

    def _run(self) -> None:
        is_needed = True
        while is_needed:
            with self._driver.when_free():
                try:
                    self._settle()
                    is_needed = not self._is_stopping and not self._hand_over()
                    played = is_needed and self._round()
                except BaseException as error:
                    # A fault of our own; nobody may hang.
                    played = True
                    for entry in self._texts:
                        self._close(entry, error)
            if is_needed and not played:
                self._wait()

    def _hand_over(self) -> bool:
        """Leave the only text, if there is any, to its reader; returns whether the thread may end."""
        if len(self._texts) > 1 or any(entry.in_background for entry in self._texts):
            return False
        with self._starting:
            if not self._inbox.empty():
                return False
            self._thread = None
        for entry in self._texts:
            entry.queue.put(_YOURS)
        return True

    def _round(self) -> bool:
        """Admit texts in the order they came, then play a round; returns whether any text could."""
        waiting = [entry for entry in self._texts if entry.live is None]
        asked = 0
        for entry in waiting:
            if entry.wait is Wait.PROMPT:
                asked += 1
                if asked > _MOST_ASKED:
                    continue
            self._admit(entry, must=False)
            # Who waits for memory is not overtaken, or those that need little would leave nothing for those that need
            # much; who waits for a prompt keeps nobody waiting.
            if entry.live is None and not entry.is_over and entry.wait is Wait.MEMORY:
                break
        ready = self._ready()
        waiting = [entry for entry in waiting if entry.live is None and not entry.is_over]
        if not ready and waiting:
            # What is live waits for its readers, which may wait for this one.
            self._admit(waiting[0], must=True)
            ready = self._ready()
        self._rounds.play(ready)
        return bool(ready)

    def _ready(self) -> list[LiveText]:
        return [
            entry.live
            for entry in self._texts
            if entry.live and not entry.is_over and entry.num_said - entry.num_read < entry.most_unread
        ]

    def _wait(self) -> None:
        """Wait until somebody reads, cancels or opens a text."""
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
