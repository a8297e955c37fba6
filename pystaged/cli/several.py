"""Write several texts in order, as they are done, also if Ctrl-C ends them early."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import typer

from pystaged import GenerationResult
from pystaged.batch import pieces
from pystaged.cli.console import counter, report
from pystaged.cli.interrupts import uninterrupted
from pystaged.scheduler import Scheduler
from pystaged.sequence import Sequence as Text


def write_in_order(
    scheduler: Scheduler, sequences: Iterable[Text], total: int, shown: Callable[[int, GenerationResult], str]
) -> int:
    """Generate sequences together, and write each to standard output as soon as it and those before it are done. After
    an error or Ctrl-C the finished ones are written.

    Args:
        total: number of sequences.
        shown: called with a sequence's number, from 0, and its result; returns the text to write.

    Returns:
        Number of tokens of all sequences.

    Raises:
        Exception: the error that ended a sequence.
    """
    numbers, done = dict[Text, int](), dict[int, GenerationResult]()  # of sequences not yet written
    num_written = tokens = 0

    def begun() -> Iterator[Text]:
        for number, sequence in enumerate(sequences):
            numbers[sequence] = number
            yield sequence

    def write(number: int) -> None:
        nonlocal num_written
        with uninterrupted():  # completely, and once
            hide()
            typer.echo(shown(number, done.pop(number)))
            sys.stdout.flush()
            num_written += 1

    with counter() as (count, hide):
        try:
            with closing(pieces(scheduler, begun())) as said:
                for sequence, piece in said:
                    if piece is None:
                        done[numbers.pop(sequence)] = sequence.result()
                    else:
                        tokens += len(piece.tokens)
                    while num_written in done:
                        write(num_written)
                    count(num_written + len(done), total, tokens)
        except BaseException:
            for number in sorted(done):
                write(number)
            report(f"{num_written} of {total} texts are done")
            raise
    return tokens
