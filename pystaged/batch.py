"""Many texts of an engine for one reader."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from math import inf
from queue import SimpleQueue
from typing import Any

from pystaged.result import GenerationResult, Piece
from pystaged.scheduler import Scheduler
from pystaged.sequence import End, PrefillProgress, Sequence
from pystaged.streams import Stream

MOST_AT_ONCE = 64  # texts: more gain nothing, and take memory


class Batch:
    """Sequences that one reader waits for; they run ahead of it without bound. Not for a policy to use, in the middle
    of a step that would wait for it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._said: SimpleQueue[tuple[Sequence, Any]] = SimpleQueue()
        self._open: set[Sequence] = set()

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self._open)

    def open(self, sequence: Sequence) -> None:
        """Begin a sequence beside the others."""
        self._open.add(sequence)
        self._scheduler.open(sequence, lambda said: self._said.put((sequence, said)), inf)

    def next(self) -> tuple[Sequence, Piece | None]:
        """Wait for the next piece of any: whose, and the piece, None at an end. Raises what ended a text."""
        sequence, said = self._said.get()
        while isinstance(said, PrefillProgress):
            said.report()
            sequence, said = self._said.get()
        if not isinstance(said, End):
            return sequence, said
        self._open.discard(sequence)
        if said.error:
            raise said.error
        return sequence, None

    def close(self) -> None:
        """End all after the pass in hand, and wait for that, but where the collector closes it in the thread."""
        for sequence in self._open:
            self._scheduler.cancel(sequence)
        # One that Ctrl-C kept from being opened has no end to wait for, nor has one of the process that forked this.
        here = [sequence for sequence in self._open if sequence.process == os.getpid()]
        while not self._scheduler.in_step and any(sequence.end is None for sequence in here):
            self._said.get()
        self._open.clear()


def pieces(scheduler: Scheduler, sequences: Iterable[Sequence]) -> Generator[tuple[Sequence, Piece | None], None, None]:
    """What sequences say, as Batch.next gives it, until all have ended; no more than 64 are written at once. Closing it
    ends those that have not."""
    waiting = iter(sequences)
    with closing(Batch(scheduler)) as batch:
        while True:
            for sequence in islice(waiting, MOST_AT_ONCE - len(batch)):
                batch.open(sequence)
            if not len(batch):
                return
            yield batch.next()


def results(scheduler: Scheduler, sequences: Iterator[Sequence]) -> Generator[GenerationResult, None, None]:
    """Write sequences, many at once.

    Yields:
        Results in order, each as soon as it and all before it are there.

    Raises:
        Exception: what ended a text; the other ones are cancelled.
    """
    if scheduler.in_step:
        # A policy waits for these texts, and the thread for the policy.
        yield from (Stream(scheduler, sequence).finish() for sequence in sequences)
        return
    left, ended = deque[Sequence](), set[Sequence]()

    def begun() -> Iterator[Sequence]:
        for sequence in sequences:
            left.append(sequence)
            yield sequence

    with closing(pieces(scheduler, begun())) as said:
        for sequence, piece in said:
            if piece is None:
                ended.add(sequence)
            while left and left[0] in ended:
                ended.remove(left[0])
                yield left.popleft().result()
