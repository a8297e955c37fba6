"""Readers of texts: a stream of one, and several in order. Each waits on a queue; see async_stream for event loops."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from math import inf
from queue import SimpleQueue

from pystaged.decoding.scheduler import Scheduler
from pystaged.decoding.text import Item, Text
from pystaged.result import GenerationResult, Piece

MOST_AT_ONCE = 64  # texts; more gain no speed and take memory


class Stream(Iterator[Piece]):
    """Iterator of the pieces of one text. To stop early, close it from any thread, use it as a context manager,
    or drop it.

    A thread of the engine decodes all texts in batches. A text pauses while 256 tokens are unread.

    Args:
        then: called once, at the end or when the stream is dropped.
    """

    def __init__(self, text: Text, then: Callable[[], None] = lambda: None) -> None:
        # The scheduler holds the text, never the stream, so that a stream is freed as soon as it is dropped.
        self.text = text
        self._scheduler: Scheduler = text.scheduler
        self._queue = SimpleQueue[tuple[Text, Item]]()
        self._then = weakref.finalize(self, then)
        self._turn = threading.RLock()  # a signal handler may read or close it while its thread does
        self._over = False

    def __next__(self) -> Piece:
        self._scheduler.check_caller()
        try:
            with self._turn:
                if self._over:
                    raise StopIteration
                while callable(item := self._get()):
                    report(item)
                if item is None:
                    raise StopIteration if self.text.error is None else self.text.error
                self._scheduler.note_read(self.text, item)
        except BaseException:
            self.close()
            raise
        if self.text.is_cancelled:
            self.close()
        return item

    def _get(self) -> Item:
        """The next item of the text."""
        if not self.text.is_open:
            weakref.finalize(self, self._scheduler.cancel, self.text).atexit = False
            self._scheduler.open(self.text, self._queue)
        # If an earlier read of the end was interrupted, there is no item any more.
        item = None if self.text.is_over and self._queue.empty() else self._queue.get()[1]
        if item is None:
            self._over = True
            self._queue.put((self.text, None))  # for a read that this one has interrupted
        return item

    @property
    def result(self) -> GenerationResult:
        """The whole result, once the stream is exhausted or closed. Raises RuntimeError before."""
        if self.text.is_cancelled and not self._over:
            self.close()
        if not self._over:
            raise RuntimeError("the stream has not been read to its end")
        return self.text.result()

    def finish(self) -> GenerationResult:
        """Read the rest and return the whole result."""
        with self:
            for _ in self:
                pass
            return self.result

    def close(self) -> None:
        """Stop after the current step. If another thread is reading, or a policy calls this inside the step, the result
        is complete after that step."""
        self._scheduler.cancel(self.text)
        if self._scheduler.can_wait and self._turn.acquire(blocking=False):
            try:
                while (self.text.queue or self.text.is_over) and not self._over:  # once it was opened
                    self._get()
                self._over = True
            finally:
                self._turn.release()
        if self._over:
            self._then()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def report(progress: Callable[[], object]) -> None:
    """Call the user's function."""
    try:
        progress()
    except (StopIteration, StopAsyncIteration) as error:  # a reader would take it for the end
        raise RuntimeError(f"{type(error).__name__} was raised by `progress`") from error


def pieces(texts: Iterable[Text], most: int | None = None) -> Generator[tuple[Text, Piece | None], None, None]:
    """Decode texts, which run ahead of this reader without bound. Closing the generator ends them, and waits for their
    ends if the caller can.

    Args:
        most: number that is decoded at once, 64 by default.

    Yields:
        A text and its next piece, None at its end.

    Raises:
        Exception: the error that ended a text.
        RuntimeError: as Scheduler.check_caller.
    """
    waiting, running = iter(texts), set[Text]()
    queue = SimpleQueue[tuple[Text, Item]]()
    try:
        while True:
            for text in islice(waiting, (most or MOST_AT_ONCE) - len(running)):
                running.add(text)
                text.scheduler.open(text, queue, inf)
            if not running:
                return
            next(iter(running)).scheduler.check_caller()
            text, item = queue.get()
            if callable(item):
                report(item)
                continue
            if item is None:
                running.discard(text)
                if text.error is not None:
                    raise text.error
            yield text, item
    finally:
        for text in running:
            text.scheduler.cancel(text)
        # A text that Ctrl-C kept from being opened never ends.
        begun = [text for text in running if text.is_open]
        while any(not text.is_over and text.scheduler.can_wait for text in begun):
            queue.get()


def results(texts: Iterable[Text], most: int | None = None) -> Generator[GenerationResult, None, None]:
    """Decode texts together, as `pieces` does.

    Yields:
        Results in order, each as soon as it and all before it are complete.

    Raises:
        Exception: the error that ended a text; the others are cancelled.
    """
    left, ended = deque[Text](), set[Text]()

    def begun() -> Iterator[Text]:
        for text in texts:
            left.append(text)
            yield text

    with closing(pieces(begun(), most)) as found:
        for text, piece in found:
            if piece is None:
                ended.add(text)
            while left and left[0] in ended:
                ended.remove(left[0])
                yield left.popleft().result()
