"""How far long work has come, for those who watch."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""


def announced(report: Callable[[str], None]) -> Progress:
    """Progress as lines of text, one for each thing that begins."""
    begun = set()

    def progress(what: str, _done: int, _total: int) -> None:
        if what not in begun:
            begun.add(what)
            report(what)

    return progress
