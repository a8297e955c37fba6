"""Shared by the commands: messages and progress bars on standard error, models by name, standard input."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID
    from rich.table import Table

    from pystaged import Engine
    from pystaged.cli.options import LoadOptions
    from pystaged.loading.progress import Progress


_LONG = 1.0  # seconds after which progress is shown
_ANY_WIDTH = 10_000  # characters


class _Errors(Console):
    def on_broken_pipe(self) -> None:
        """Ignore that standard error is closed, so that the text is still written."""
        self.quiet = True


# In a terminal rich breaks lines between words; elsewhere lines stay whole.
errors = _Errors(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def print_table(table: Table) -> None:
    """Print a table without borders to standard output; the terminal wraps long lines, and none is cut."""
    Console(width=_ANY_WIDTH, soft_wrap=True, highlight=False).print(table)


def report(line: str) -> None:
    """Print a message on standard error."""
    errors.print(line, style="dim", markup=False)


def words(error: Exception) -> str:
    """An error's message; for an OSError, its file and reason without number and quotes."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Progress bars on standard error, one for each task."""
    from rich import progress as rich_progress  # noqa: PLC0415

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    bars = rich_progress.Progress(*columns, console=errors)
    tasks: dict[str, TaskID] = {}

    def progress(what: str, done: int, total: int) -> None:
        bars.start()  # only now, because even an empty bar writes a line
        if what not in tasks:
            tasks[what] = bars.add_task(escape(what), total=total)
        bars.update(tasks[what], completed=done, total=total)

    try:
        yield progress
    finally:
        if tasks:
            bars.stop()


def _hide(bar: Bar) -> None:
    if bar.live.is_started:  # otherwise rich 13 writes an empty line without a terminal
        bar.stop()


@contextmanager
def reading_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar for a prefill that takes more than a second, if standard error is a terminal; call it with the
    tokens evaluated and the tokens to evaluate."""
    from rich import progress as rich_progress  # noqa: PLC0415

    columns = (
        rich_progress.TextColumn("reading the prompt"),
        rich_progress.BarColumn(),
        rich_progress.TextColumn("{task.completed} of {task.total} tokens, {task.fields[speed]:.0f} per second"),
    )
    bar = rich_progress.Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    task = bar.add_task("", speed=0.0)
    begin = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal begin
        if done == 0:
            begin = time.monotonic()
        seconds = time.monotonic() - begin
        if done == total:
            _hide(bar)
        elif seconds > _LONG:
            bar.update(task, completed=done, total=total, speed=done / seconds)
            bar.start()

    try:
        yield progress
    finally:
        _hide(bar)


@contextmanager
def counter() -> Iterator[tuple[Callable[[int, int, int], None], Callable[[], None]]]:
    """A progress bar for several sequences, after a second, if standard error is a terminal. Call the first function
    with finished sequences, all sequences, and tokens; the second hides the bar until the next call."""
    from rich import progress as rich_progress  # noqa: PLC0415

    columns = (
        rich_progress.TextColumn("{task.completed} of {task.total} texts are done"),
        rich_progress.BarColumn(),
        rich_progress.TextColumn("{task.fields[tokens]} tokens"),
    )
    bar = rich_progress.Progress(
        *columns, console=errors, transient=True, disable=not errors.is_terminal, redirect_stdout=False
    )
    task = bar.add_task("", tokens=0)
    begin = time.monotonic()

    def count(done: int, total: int, tokens: int) -> None:
        if time.monotonic() - begin > _LONG:
            bar.update(task, completed=done, total=total, tokens=tokens)
            bar.start()

    try:
        yield count, lambda: _hide(bar)
    finally:
        _hide(bar)


def model_name(name: str | None) -> str | Path:
    """The path of the model that an option names, None for the default one. A hub id that is not in the cache is
    downloaded."""
    from pystaged.loading import names  # noqa: PLC0415

    name = names.default_model(report) if name is None else name
    if name == "bundled":
        return name
    with progress_bars() as progress:
        return names.resolve(name, progress)


def draft_name(name: str) -> str | Path:
    """The path of the draft that an option names; see model_name. Raises ValueError for a number of tokens."""
    if name.isdecimal() and not Path(name).exists():
        raise ValueError(
            f"--draft names a model, not a number such as {name}: how many tokens are guessed is chosen at each step"
        )
    return name if name in ("auto", "none") else model_name(name)


def open_engine(model: str | None, options: LoadOptions, *, long_context: bool = False) -> Engine:
    """Load a model with a command's options; long_context and errors as in pystaged.load."""
    from pystaged import load  # noqa: PLC0415

    given = cast(Any, options.given | {"draft": draft_name(options.given["draft"])})
    return load(model_name(model), **given, long_context=long_context, report=report)


def read_prompt(prompt: str) -> str:
    """The prompt of a command; - reads it from standard input. Raises ValueError if that is not UTF-8."""
    if prompt != "-":
        return prompt
    text = sys.stdin.read()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("standard input is not UTF-8") from None
    return text
