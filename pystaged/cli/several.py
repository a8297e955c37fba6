"""Many texts for one reader, who may have enough in the middle."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing

import typer

from pystaged import Engine, GenerationResult
from pystaged.batch import pieces
from pystaged.cli.console import counter, report
from pystaged.cli.interrupts import uninterrupted
from pystaged.streams import Writer


def write_in_order(
    engine: Engine, writers: Sequence[Writer], shown: Callable[[int, GenerationResult], str]
) -> list[GenerationResult]:
    """Write texts at once, and each to standard output as soon as it and those before it are done. Where something
    ends that, Ctrl-C too, all that are done.

    Args:
        shown: called with a text's number, from 0, and the text; what is to be written of it.

    Returns:
        All of them.

    Raises:
        Exception: what ended a text.
    """
    numbers = {writer: number for number, writer in enumerate(writers)}
    left, done, tokens = deque(range(len(writers))), dict[int, GenerationResult](), 0

    def write(number: int) -> None:
        with uninterrupted():  # all of it, and once
            hide()
            typer.echo(shown(number, done[number]))
            sys.stdout.flush()
            left.remove(number)

    with counter() as (count, hide):
        try:
            with closing(pieces(engine, writers)) as said:
                for writer, piece in said:
                    if piece is None:
                        done[numbers[writer]] = writer.result()
                    else:
                        tokens += len(piece.tokens)
                    while left and left[0] in done:
                        write(left[0])
                    count(len(done), len(writers), tokens)
        except BaseException:
            for number in sorted(done.keys() & set(left)):
                write(number)
            report(f"{len(done)} of {len(writers)} texts are done")
            raise
    return [done[number] for number in range(len(writers))]
