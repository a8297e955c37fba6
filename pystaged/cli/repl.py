"""`pystaged repl`: a text that grows by turns."""

from __future__ import annotations

import codecs
import contextlib
import sys
from dataclasses import replace
from typing import Any

import typer
from rich.text import Text

import pystaged
from pystaged.cli.console import errors, open_engine, reading_bar, report
from pystaged.cli.interrupts import Interrupts
from pystaged.cli.options import (
    Color,
    Colors,
    LoadOptions,
    MaxTokens,
    ModelName,
    SamplingOptions,
    ShowTree,
    grouped,
)
from pystaged.cli.painting import show, summary
from pystaged.result import Piece

_HELP = """A line you type is added to the text, which the model then continues; an empty line only continues it.
A line that ends with \\ goes on with the next one. Ctrl-C stops the model and keeps what it wrote.
/text   show the text      /undo   take the last turn back      /new    begin a new text
/set NAME VALUE   temperature, top_k, top_p, min_p, seed, max_tokens
/help   show this          /quit   leave, as does Ctrl-D"""


@grouped
def repl(
    *,
    model: ModelName = "house",
    max_tokens: MaxTokens = 64,
    sampling: SamplingOptions,
    loading: LoadOptions,
    color: Colors = Color.NONE,
    show_tree: ShowTree = False,
) -> None:
    """Write a text in turns with the model, which stays loaded and reads only what is new.

    Example: pystaged repl --temperature 0.8 --top-p 0.95 --color stages
    """
    sampling.config()
    with open_engine(model, loading) as engine, Interrupts() as interrupts:
        session = Repl(engine, sampling, max_tokens, color, interrupts, show_tree=show_tree)
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, PLC0415  gives `input` editing and a history where there is one
            report("type /help for help")
        while (line := _read(interrupts)) is not None:
            try:
                if not session.take(line):
                    break
            except (ValueError, TypeError) as error:
                errors.print(f"error: {error}", style="red", markup=False)


class Repl:
    """The tokens so far and how they are continued.

    Args:
        engine: stays open.
        sampling, max_tokens: until /set changes them.
        color, show_tree: as in generate.
        interrupts: entered.
    """

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
        self._tokens: list[int] = []
        self._earlier: list[list[int]] = []

    def take(self, line: str) -> bool:
        """Do what a line says; False when it says to leave.

        Raises:
            ValueError, TypeError: it cannot be done.
        """
        command, *words = line.split() if line.startswith("/") else [""]
        if command == "/quit":
            return False
        if command == "/help":
            errors.print(_HELP, style="dim", markup=False)
        elif command == "/text":
            typer.echo(self._text())
        elif command == "/new":
            self._earlier.append(self._tokens)
            self._tokens = []
        elif command == "/undo":
            if not self._earlier:
                raise ValueError("there is nothing to undo")
            self._tokens = self._earlier.pop()
        elif command == "/set":
            self._set(words)
        elif command:
            raise ValueError(f"there is no command {command}; /help shows those there are")
        else:
            self._turn(line)
        return True

    def _text(self) -> str:
        """What the tokens say, without the beginning of a character at their end."""
        data = b"".join(map(self._engine.tokenizer.token_bytes, self._tokens))
        return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)

    def _turn(self, line: str) -> None:
        before, tokens = self._tokens, list(self._tokens)
        if line:
            begun = "\n" if before and not self._text().endswith("\n") else ""
            # What the vocabulary puts before a text stands there once.
            tokens += self._engine.encode(begun + line, add_special=not before).tolist()
        prompt = list(tokens)

        def keep(piece: Piece) -> None:
            tokens.extend(piece.tokens)
            self._interrupts.check()

        about = Text("stopped", "dim")
        try:
            with self._interrupts.allowed(), reading_bar() as progress:
                stream = self._engine.stream(
                    prompt, max_tokens=self._max_tokens, sampling=self._sampling.config(), progress=progress
                )
                result = show(stream, self._engine.tokenizer, self._color, show_tree=self._show_tree, keep=keep)
                about = summary(result.stats, self._color)
                about.append(f"; read {result.stats.prompt_tokens - result.stats.reused_tokens} new tokens")
        except KeyboardInterrupt:
            pass
        except OSError as error:
            # Of a device that is lost, say; the text so far is not.
            about = Text(f"error: {error}", "red")
        self._earlier.append(before)
        self._tokens = tokens
        errors.print(about)

    def _set(self, words: list[str]) -> None:
        try:
            name, value = words
            number = float(value) if name in ("temperature", "top_p", "min_p") else int(value)
        except ValueError as error:
            raise ValueError("write /set NAME VALUE, such as /set temperature 0.8") from error
        if name == "max_tokens":
            self._max_tokens = int(number)
        elif name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            changed: dict[str, Any] = {name: number}
            sampling = replace(self._sampling, **changed)
            sampling.config()
            self._sampling = sampling
        else:
            raise ValueError(f"there is nothing called {name}; /help shows what can be set")


def _read(interrupts: Interrupts) -> str | None:
    """A line from standard input, or several that \\ joins; None at its end."""
    lines: list[str] = []
    while True:
        try:
            with interrupts.allowed():
                line = input((". " if lines else "> ") if sys.stdin.isatty() else "")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            # As in a shell: what was typed is dropped.
            typer.echo()
            lines = []
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])
