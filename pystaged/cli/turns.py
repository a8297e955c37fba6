"""What sessions share: reading lines, writing answers that Ctrl-C ends, and what may be set in between."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

import typer
from rich.text import Text

import pystaged
from pystaged.cli.console import errors, reading_bar, report, words
from pystaged.cli.interrupts import Interrupts
from pystaged.cli.options import Color, SamplingOptions
from pystaged.cli.painting import show, summary
from pystaged.config import SamplingConfig
from pystaged.result import GenerationResult, Piece
from pystaged.streams import Stream

_QUOTES = '"""'
# What /set sets, of SamplingOptions and besides.
_SETTABLE: dict[str, type[int] | type[float]] = {
    **{name: kind for name, kind in get_type_hints(SamplingConfig).items() if kind in (int, float)},
    "max_tokens": int,
}

OpenStream = Callable[[Callable[[int, int], None]], Stream]
"""Called with what is to be told of a prompt that is being read."""


class Turns(ABC):
    """A model that is told things in turns.

    Args:
        engine: stays open.
        sampling, max_tokens: until /set changes them.
        color, show_tree: as in generate.
        interrupts: entered.
    """

    _least_tokens = 1

    def __init__(
        self,
        engine: pystaged.Engine,
        sampling: SamplingOptions,
        max_tokens: int,
        color: Color,
        interrupts: Interrupts,
        *,
        show_tree: bool,
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._color = color
        self._interrupts = interrupts
        self._show_tree = show_tree

    @abstractmethod
    def take(self, line: str) -> bool:
        """Do what a line says; False when it says to leave.

        Raises:
            ValueError, TypeError, OSError: it cannot be done.
        """

    @abstractmethod
    def say(self, text: str) -> None:
        """Take a text that is no command, whatever it begins with. Raises as take."""

    def _write(self, open_stream: OpenStream, keep: Callable[[Piece], object]) -> tuple[GenerationResult | None, Text]:
        """Write an answer as it comes.

        Args:
            open_stream: begins it.
            keep: called with each piece that was written.

        Returns:
            The whole, or what there was when Ctrl-C or a device that is lost ended it, None where it had not begun; and
            a line about it.
        """

        def take(piece: Piece) -> None:
            keep(piece)
            self._interrupts.check()

        stream, about = None, Text("stopped", "dim")
        try:
            with self._interrupts.allowed(), reading_bar() as progress:
                stream = open_stream(progress)
                written = show(stream, self._engine.tokenizer, self._color, show_tree=self._show_tree, keep=take)
                about = summary(written.stats, self._color)
                about.append(f"; read {written.stats.prompt_tokens - written.stats.reused_tokens} new tokens")
        except KeyboardInterrupt:
            pass
        except OSError as error:
            # Of a device that is lost, say; the text so far is not.
            about = Text(f"error: {words(error)}", "red")
        if stream:
            stream.close()
        return stream.result if stream else None, about

    def _config(self, sampling: SamplingOptions) -> SamplingConfig:
        """What is in force. Raises ValueError for what is out of range."""
        return sampling.config()

    def _set(self, words: list[str]) -> None:
        if len(words) != 2:
            raise ValueError("write /set NAME VALUE, such as /set temperature 0.8")
        name, value = words
        if name not in _SETTABLE:
            raise ValueError(f"there is nothing called {name}; what can be set is {', '.join(_SETTABLE)}")
        try:
            number = _SETTABLE[name](value)
        except ValueError:
            wanted = "an integer" if _SETTABLE[name] is int else "a number"
            raise ValueError(f"{name} must be {wanted}, not {value}") from None
        if name == "max_tokens":
            if not self._least_tokens <= number < 2**31:
                raise ValueError(f"max_tokens must be at least {self._least_tokens} and below 2**31, not {value}")
            self._max_tokens = int(number)
            return
        changed: dict[str, Any] = {name: number}
        sampling = replace(self._sampling, **changed)
        self._config(sampling)
        self._sampling = sampling


def take_lines(turns: Turns, interrupts: Interrupts) -> None:
    """Take lines from standard input until one says to leave, or it ends; what cannot be done is said."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415  gives `input` editing and a history where there is one
        report("type /help for help")
    while (read := _read(interrupts)) is not None:
        text, is_quoted = read
        try:
            if is_quoted:
                turns.say(text)
            elif not turns.take(text):
                break
        except (ValueError, TypeError, OSError) as error:
            errors.print(f"error: {words(error)}", style="red", markup=False)


def _read(interrupts: Interrupts) -> tuple[str, bool] | None:
    """A line from standard input, or several that \\ joins or that stand between triple quotes, and whether they do;
    None at its end."""
    lines: list[str] = []
    quoted = False
    while True:
        try:
            with interrupts.allowed():
                line = input((". " if lines else "> ") if sys.stdin.isatty() else "")
        except EOFError:
            return ("\n".join(lines), quoted) if lines else None
        except KeyboardInterrupt:
            # As in a shell: what was typed is dropped.
            typer.echo()
            lines, quoted = [], False
            continue
        if not lines and line.lstrip().startswith(_QUOTES):
            quoted, line = True, line.lstrip()[len(_QUOTES) :]
        if quoted:
            if line.rstrip().endswith(_QUOTES):
                return "\n".join([*lines, line.rstrip()[: -len(_QUOTES)]]).strip("\n"), True
            lines.append(line)
        elif line.endswith("\\"):
            lines.append(line[:-1])
        else:
            return "\n".join([*lines, line]), False
