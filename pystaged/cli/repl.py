"""`pystaged repl`: a text that grows by turns."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Any

import typer
from rich.text import Text

import pystaged
from pystaged.cli.console import errors, open_engine, report
from pystaged.cli.options import (
    Colors,
    Device,
    DraftDevice,
    DraftName,
    MaxTokens,
    MinP,
    ModelName,
    Seed,
    ShowTree,
    Temperature,
    Threads,
    TopK,
    TopP,
)
from pystaged.cli.painting import Color, show, summary
from pystaged.config import SamplingConfig

_HELP = """A line you type is added to the text, which the model then continues; an empty line only continues it.
A line that ends with \\ goes on with the next one. Ctrl-C stops the model and keeps what it wrote.
/text   show the text      /undo   take the last turn back      /new    begin a new text
/set NAME VALUE   temperature, top_k, top_p, min_p, seed, max_tokens
/help   show this          /quit   leave, as does Ctrl-D"""


def repl(
    model: ModelName = "house",
    draft: DraftName = "auto",
    device: Device = "cpu",
    draft_device: DraftDevice = "cpu",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    threads: Threads = 0,
    color: Colors = Color.NONE,
    show_tree: ShowTree = False,
) -> None:
    """Write a text in turns with the model, which stays loaded and reads only what is new.

    Example: pystaged repl --temperature 0.8 --top-p 0.95 --color stages
    """
    sampling = SamplingConfig(temperature, top_k, top_p, min_p, seed)
    with open_engine(model, draft, device, draft_device, threads) as engine:
        session = Repl(engine, sampling, max_tokens, color, show_tree=show_tree)
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, PLC0415  gives `input` editing and a history where there is one
            report("type /help for help")
        while (line := _read()) is not None:
            try:
                if not session.take(line):
                    break
            except (ValueError, TypeError) as error:
                errors.print(f"error: {error}", style="red", markup=False)


class Repl:
    """The text so far and how it is continued.

    Args:
        engine: stays open.
        sampling, max_tokens: until /set changes them.
        color, show_tree: as in generate.
    """

    def __init__(
        self, engine: pystaged.Engine, sampling: SamplingConfig, max_tokens: int, color: Color, *, show_tree: bool
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._color = color
        self._show_tree = show_tree
        self._text = ""
        self._earlier: list[str] = []

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
            typer.echo(self._text)
        elif command == "/new":
            self._earlier.append(self._text)
            self._text = ""
        elif command == "/undo":
            if not self._earlier:
                raise ValueError("there is nothing to undo")
            self._text = self._earlier.pop()
        elif command == "/set":
            self._set(words)
        elif command:
            raise ValueError(f"there is no command {command}; /help shows those there are")
        else:
            self._turn(line)
        return True

    def _turn(self, line: str) -> None:
        text = self._text
        if line:
            text += "\n" + line if text and not text.endswith("\n") else line
        stream = self._engine.stream(
            text,
            max_tokens=self._max_tokens,
            temperature=self._sampling.temperature,
            top_k=self._sampling.top_k,
            top_p=self._sampling.top_p,
            min_p=self._sampling.min_p,
            seed=self._sampling.seed,
        )
        written: list[str] = []
        about = Text("stopped", "dim")
        try:
            result = show(stream, self._engine.tokenizer, self._color, show_tree=self._show_tree, keep=written.append)
            about = summary(result.stats, self._color)
            about.append(f"; read {result.stats.prompt_tokens - result.stats.reused_tokens} new tokens")
        except KeyboardInterrupt:
            pass
        self._earlier.append(self._text)
        self._text = text + "".join(written)
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
            self._sampling = replace(self._sampling, **changed)
        else:
            raise ValueError(f"there is nothing called {name}; /help shows what can be set")


def _read() -> str | None:
    """A line from standard input, or several that \\ joins; None at its end."""
    lines: list[str] = []
    while True:
        try:
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
