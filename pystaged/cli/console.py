"""What the commands share: the console of standard error, and words of their options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

import pystaged
from pystaged.loading import convert, names

errors = Console(stderr=True, highlight=False, soft_wrap=True)


def report(line: str) -> None:
    """Say on standard error what is being done."""
    errors.print(line, style="dim", markup=False)


@contextmanager
def progress_bars() -> Iterator[convert.Progress]:
    """A bar on standard error for each thing that is being done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=errors)
    tasks: dict[str, TaskID] = {}

    def progress(what: str, done: int, total: int) -> None:
        bars.start()  # not before there is something to show: even an empty one writes a line
        if what not in tasks:
            tasks[what] = bars.add_task(escape(what), total=total)
        bars.update(tasks[what], completed=done, total=total)

    try:
        yield progress
    finally:
        if tasks:
            bars.stop()


def model_name(name: str) -> str | Path:
    """The model an option names, downloaded first where it is a hub id that is not in the cache."""
    if name == "house":
        return name
    with progress_bars() as progress:
        return names.resolve(name, progress)


def draft_name(name: str) -> str | Path | None:
    """The same for a draft; 'none' is None."""
    if name == "none":
        return None
    return name if name == "auto" else model_name(name)


def open_engine(model: str, draft: str, device: str, draft_device: str, threads: int) -> pystaged.Engine:
    """The engine that a command's options ask for; errors as in pystaged.load."""
    return pystaged.load(
        model_name(model),
        draft=draft_name(draft),
        device=device,
        draft_device=draft_device,
        num_threads=threads,
        report=report,
    )
