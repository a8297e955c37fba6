"""Progress of long work, for callbacks."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the task's name, the amount done and the total amount."""


def announced(report: Callable[[str], None]) -> Progress:
    """A Progress that reports one line for each task that begins."""
    begun = set()

    def progress(what: str, _done: int, _total: int) -> None:
        if what not in begun:
            begun.add(what)
            report(what)

    return progress
