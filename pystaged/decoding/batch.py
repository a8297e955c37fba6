"""Batches of sequences that one reader waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from math import inf
from queue import SimpleQueue
from typing import Any

from pystaged.decoding.scheduler import Scheduler
from pystaged.decoding.sequence import End, PrefillProgress, Sequence
from pystaged.result import GenerationResult, Piece

MOST_AT_ONCE = 64  # sequences; more gain no speed and take memory


class Batch:
    """Sequences that one reader waits for; they run ahead of it without bound."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._said: SimpleQueue[tuple[Sequence, Any]] = SimpleQueue()
        self._open: set[Sequence] = set()

    def __len__(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._open)

    def open(self, sequence: Sequence) -> None:
        """Add a sequence to the batch and begin it."""
        self._open.add(sequence)
        self._scheduler.open(sequence, lambda said: self._said.put((sequence, said)), inf)

    def next(self) -> tuple[Sequence, Piece | None]:
        """Wait for the next piece: returns its sequence and the piece, None at an end. Raises the error of an end, and
        RuntimeError as Scheduler.check_caller."""
        self._scheduler.check_caller()
        sequence, said = self._said.get()
        while isinstance(said, PrefillProgress):
            said.report()
            sequence, said = self._said.get()
        if not isinstance(said, End):
            return sequence, said
        self._open.discard(sequence)
        if said.error is not None:
            raise said.error
        return sequence, None

    def close(self) -> None:
        """End all sequences after the current pass, and wait for their ends if the caller can."""
        for sequence in self._open:
            self._scheduler.cancel(sequence)
        # A sequence that Ctrl-C kept from being opened never ends.
        begun = [sequence for sequence in self._open if sequence.is_open]
        while self._scheduler.can_wait and any(sequence.end is None for sequence in begun):
            self._said.get()
        self._open.clear()


def pieces(scheduler: Scheduler, sequences: Iterable[Sequence]) -> Generator[tuple[Sequence, Piece | None], None, None]:
    """Decode sequences, at most 64 at once, and yield as Batch.next returns, until all have ended. Closing the
    generator ends them."""
    waiting = iter(sequences)
    with closing(Batch(scheduler)) as batch:
        while True:
            for sequence in islice(waiting, MOST_AT_ONCE - len(batch)):
                batch.open(sequence)
            if not len(batch):
                return
            yield batch.next()


def results(scheduler: Scheduler, sequences: Iterator[Sequence]) -> Generator[GenerationResult, None, None]:
    """Decode sequences in batches.

    Yields:
        Results in order, each as soon as it and all before it are complete.

    Raises:
        Exception: the error that ended a sequence; the others are cancelled.
    """
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
