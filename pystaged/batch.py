"""Many texts of an engine for one reader."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pystaged.config import integer
from pystaged.result import GenerationResult, Piece
from pystaged.scheduler import End, Entry, Reading, Scheduler
from pystaged.streams import Stream, Writer

if TYPE_CHECKING:
    from pystaged.engine import Engine

MOST_AT_ONCE = 64  # texts: more gain nothing, and take memory


class Batch:
    """Texts that one reader waits for; they run ahead of it without bound. Not for a policy to use, in the middle of
    a step that would wait for it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._said: SimpleQueue[tuple[Writer, Any]] = SimpleQueue()
        self._entries: dict[Writer, Entry] = {}

    def __len__(self) -> int:
        """Texts that have not ended."""
        return len(self._entries)

    def open(self, writer: Writer) -> None:
        """Begin a text beside the others."""
        entry = self._entries[writer] = Entry(writer.admit, said=_Signed(writer, self._said), most_unread=math.inf)
        self._scheduler.open(entry)

    def next(self) -> tuple[Writer, Piece | None]:
        """Wait for the next piece of any text: whose, and the piece, None at a text's end. Raises what ended a text."""
        writer, said = self._said.get()
        while isinstance(said, Reading):
            said.tell()
            writer, said = self._said.get()
        if not isinstance(said, End):
            return writer, said
        self._entries.pop(writer, None)
        if said.error:
            raise said.error
        return writer, None

    def close(self) -> None:
        """End all texts after the pass in hand, and wait for that."""
        for entry in self._entries.values():
            self._scheduler.cancel(entry)
        # A text that Ctrl-C kept from being opened has no end to wait for.
        while any(entry.process and not entry.is_over for entry in self._entries.values()):
            self._said.get()
        self._entries.clear()


class _Signed:
    """Puts what a text says into a queue that several share, beside its writer."""

    def __init__(self, writer: Writer, said: SimpleQueue[tuple[Writer, Any]]) -> None:
        self._writer, self._said = writer, said

    def put(self, item: Any) -> None:
        self._said.put((self._writer, item))


def results(engine: Engine, writers: Sequence[Writer], n: int = 1) -> Generator[GenerationResult, None, None]:
    """Write n texts of each, many at once; seeds as in `seeded`.

    Yields:
        Results in order, each as soon as it and all before it are there.

    Raises:
        ValueError, TypeError: at once: n is no number above 0.
        Exception: what ended a text; the other ones are cancelled.
    """
    if integer("n", n) < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    return _results(engine, seeded(writers, n))


def seeded(writers: Iterable[Writer], n: int) -> Iterator[Writer]:
    """Each n times, with its seed and those that follow, modulo 2**64; made when they are asked for."""
    for writer in writers:
        yield writer
        for i in range(1, n):
            yield writer.seeded((writer.seed + i) % 2**64)


def pieces(engine: Engine, writers: Iterable[Writer]) -> Generator[tuple[Writer, Piece | None], None, None]:
    """What texts say, as Batch.next gives it, until all have ended; no more than 64 are written at once. Closing it
    ends those that have not."""
    waiting = iter(writers)
    with closing(Batch(engine._scheduler)) as batch:
        while True:
            for writer in islice(waiting, MOST_AT_ONCE - len(batch)):
                batch.open(writer)
            if not len(batch):
                return
            yield batch.next()


def _results(engine: Engine, writers: Iterator[Writer]) -> Generator[GenerationResult, None, None]:
    if engine._scheduler.in_step:
        # A policy waits for these texts, and the thread for the policy.
        yield from (Stream(writer).finish() for writer in writers)
        return
    left, ended = deque[Writer](), set[Writer]()

    def begun() -> Iterator[Writer]:
        for writer in writers:
            left.append(writer)
            yield writer

    with closing(pieces(engine, begun())) as said:
        for writer, piece in said:
            if piece is None:
                ended.add(writer)
            while left and left[0] in ended:
                ended.remove(left[0])
                yield left.popleft().result()
    engine._contexts.tidy()
