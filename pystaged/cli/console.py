"""Shared by the commands: messages and progress bars on standard error, models by name, standard input."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.table import Table

    from pystaged import Engine
    from pystaged.cli.options import Given
    from pystaged.loading.progress import Progress

_LONG = 1.0  # seconds after which progress is shown
_ANY_WIDTH = 10_000  # characters


class _Errors(Console):
    def on_broken_pipe(self) -> None:
        """Ignore that standard error is closed, so that the text is still written."""
        self.quiet = True


# In a terminal rich breaks lines between words; elsewhere lines stay whole.
errors = _Errors(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def print_table(table: Table | Text) -> None:
    """Print a line, or a table without borders, to standard output; none is cut. In a terminal a line breaks between
    words, and a table where the terminal breaks it."""
    out = Console(highlight=False)
    if not (isinstance(table, Text) and out.is_terminal):
        out = Console(width=_ANY_WIDTH, soft_wrap=True, highlight=False)
    out.print(table)


def report(line: str) -> None:
    """Print a message on standard error."""
    errors.print(line, style="dim", markup=False)


def complain(error: Exception | str) -> None:
    """Print an error on standard error."""
    errors.print(Text.assemble(("error: ", "bold red"), words(error)))


def warn_of_strangers(host: str, words: str) -> None:
    """Print a warning on standard error if others than this machine reach an address."""
    with suppress(ValueError):
        if host == "localhost" or ip_address(host).is_loopback:
            return
    errors.print(f"[bold yellow]warning:[/bold yellow] {words}")


def words(error: Exception | str) -> str:
    """An error's message; for an OSError, its file and reason without number and quotes."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def size_words(num_bytes: int) -> str:
    """A number of bytes in words, such as "98 MB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


@contextmanager
def progress_bars(more: str = "") -> Iterator[Progress]:
    """Progress bars on standard error, one for each task; more: what is said of a task after its bar."""
    from rich import progress as rich_progress  # noqa: PLC0415

    columns = (*rich_progress.Progress.get_default_columns(), rich_progress.TextColumn(more))
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


@contextmanager
def late_bar(words: str, more: str, **fields: Any) -> Iterator[tuple[Callable[..., None], Callable[[], None]]]:
    """A bar between words with fields of its task, shown after a second if standard error is a terminal. Yields a
    function that takes what is done, the total or None, and fields, and one that hides the bar until the next call."""
    from rich import progress as rich_progress  # noqa: PLC0415

    columns = (rich_progress.TextColumn(words), rich_progress.BarColumn(), rich_progress.TextColumn(more))
    bar = rich_progress.Progress(
        *columns, console=errors, transient=True, disable=not errors.is_terminal, redirect_stdout=False
    )
    task, begin = bar.add_task("", total=None, **fields), time.monotonic()

    def show(done: float, total: float | None, **fields: Any) -> None:
        if time.monotonic() - begin > _LONG:
            bar.tasks[0].total = total  # update takes no None
            bar.update(task, completed=done, **fields)
            bar.start()

    def hide() -> None:
        if bar.live.is_started:  # otherwise rich 13 writes an empty line without a terminal
            bar.stop()

    try:
        yield show, hide
    finally:
        hide()


@contextmanager
def reading_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar for a prefill; call it with the tokens evaluated and the tokens to evaluate."""
    more = "{task.completed} of {task.total} tokens, {task.fields[speed]:.0f} per second"
    with late_bar("reading the prompt", more, speed=0.0) as (show, hide):
        begin = time.monotonic()

        def progress(done: int, total: int) -> None:
            if done == total:
                hide()
            else:
                show(done, total, speed=done / max(1e-9, time.monotonic() - begin))

        yield progress


def model_name(name: str | None) -> str | Path:
    """The path of the model that an option names, None for the default one. A hub id that is not in the cache is
    downloaded."""
    from pystaged.loading import names  # noqa: PLC0415

    model = names.default_model(report) if name is None else names.packaged_name(name)
    if model == "bundled":
        return model
    with progress_bars() as progress:
        return names.resolve(model, progress)


def draft_name(name: str) -> str | Path:
    """The path of the draft that an option names; see model_name. Raises ValueError for a number of tokens."""
    if name.isdecimal() and not Path(name).exists():
        raise ValueError(
            f"--draft names a model, not a number such as {name}: how many tokens are guessed is chosen at each step"
        )
    return name if name in ("auto", "none") else model_name(name)


def open_engine(model: str | None, given: Given, *, long_context: bool = False) -> Engine:
    """Load a model with a command's options; long_context and errors as in pystaged.load."""
    from pystaged import load  # noqa: PLC0415
    from pystaged.options.table import LOADING  # noqa: PLC0415

    options = given.only(LOADING) | {"draft": draft_name(given["draft"])}
    path = model_name(model)
    is_screen = errors.file.isatty() and not errors.is_dumb_terminal
    with errors.status("[dim]loading the model ...", spinner_style="dim") if is_screen else nullcontext():
        errors.show_cursor(True)  # it would stay hidden if the process were killed meanwhile
        return load(path, **cast(Any, options), long_context=long_context, report=report)


def read_prompt(prompt: str) -> str:
    """The prompt of a command; - reads it from standard input, without the new line at its end. Raises ValueError if it
    is not UTF-8."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    try:
        text.encode()
    except UnicodeEncodeError:
        what = "standard input is not UTF-8" if prompt == "-" else "the prompt is not valid Unicode text"
        is_ascii = sys.getfilesystemencoding() != "utf-8"
        raise ValueError(what + is_ascii * "; the locale is the cause, LC_ALL=C.UTF-8 is one that helps") from None
    return text


def read_question(question: str) -> str:
    """As read_prompt; input that is piped into the command stands before the question."""
    if question == "-" or sys.stdin.isatty():
        return read_prompt(question)
    read_prompt(question)  # to check it
    hint = threading.Timer(_LONG, report, ["waiting for the end of standard input; < /dev/null leaves it out"])
    hint.daemon = True
    hint.start()
    try:
        given = read_prompt("-").rstrip("\n")
    except OSError:  # closed
        given = ""
    finally:
        hint.cancel()
    return f"{given}\n\n{question}" if given.strip() else question
