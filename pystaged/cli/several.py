"""Many texts for one reader, who may have enough in the middle."""

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
    """Generate texts together, and write each to standard output as soon as it and those before it are done. After an
    error or Ctrl-C the finished texts are written.

    Args:
        total: how many there are.
        shown: called with a text's number, from 0, and the text; what is to be written of it.

    Returns:
        Tokens of all.

    Raises:
        Exception: what ended a text.
    """
    numbers, done = dict[Text, int](), dict[int, GenerationResult]()  # of those that are not written
    num_written = tokens = 0

    def begun() -> Iterator[Text]:
        for number, sequence in enumerate(sequences):
            numbers[sequence] = number
            yield sequence

    def write(number: int) -> None:
        nonlocal num_written
        with uninterrupted():  # all of it, and once
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
