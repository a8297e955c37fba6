"""`pystaged repl`: a text that grows by turns."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import typer

import pystaged
from pystaged.cli.console import errors, open_engine
from pystaged.cli.interrupts import Interrupts
from pystaged.cli.options import (
    Color,
    Colors,
    LoadOptions,
    MaxTokens,
    ModelArgument,
    ModelToo,
    SamplingOptions,
    ShowTree,
    Stop,
    either,
    grouped,
    usage,
)
from pystaged.cli.turns import Turns, take_lines
from pystaged.config import GenerationConfig
from pystaged.result import Piece

_HELP = """A line you type is added to the text, which the model then continues; an empty line only continues it.
A line that ends with \\ goes on with the next one. Ctrl-C stops the model and keeps what it wrote.
/text   show the text      /undo   take the last turn back      /new    begin a new text
/set NAME VALUE   temperature, top_k, top_p, min_p, seed, repeat_penalty, ..., as the options; max_tokens
/help   show this          /quit   leave, as does Ctrl-D"""


@grouped
def repl(
    model: ModelArgument = None,
    *,
    named: ModelToo = None,
    max_tokens: MaxTokens = 64,
    stop: Stop = None,
    sampling: SamplingOptions,
    loading: LoadOptions,
    color: Colors = Color.NONE,
    show_tree: ShowTree = False,
) -> None:
    """Write a text in turns with a model, which stays loaded and reads only what is new.

    Example: pystaged repl --temperature 0.8 --top-p 0.95 --color stages
    """
    with usage():
        GenerationConfig(max_tokens=max_tokens, sampling=sampling.config(), stop=stop or ())
    with open_engine(either(model, named), loading) as engine, Interrupts() as interrupts:
        session = Repl(engine, sampling, max_tokens, color, interrupts, show_tree=show_tree, stop=stop or ())
        take_lines(session, interrupts)


class Repl(Turns):
    """The tokens so far, which each turn continues. Arguments as in Turns."""

    def __init__(
        self,
        engine: pystaged.Engine,
        sampling: SamplingOptions,
        max_tokens: int,
        color: Color,
        interrupts: Interrupts,
        *,
        show_tree: bool,
        stop: Sequence[str] = (),
    ) -> None:
        super().__init__(engine, sampling, max_tokens, color, interrupts, show_tree=show_tree)
        self._stop = stop
        self._tokens: list[int] = []
        self._earlier: list[list[int]] = []

    def take(self, line: str) -> bool:
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
            self.say(line)
        return True

    def _text(self) -> str:
        """What the tokens say, without the beginning of a character at their end."""
        data = b"".join(map(self._engine.tokenizer.token_bytes, self._tokens))
        return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)

    def say(self, line: str) -> None:
        before, tokens = self._tokens, list(self._tokens)
        if line:
            begun = "\n" if before and not self._text().endswith("\n") else ""
            # What the vocabulary puts before a text stands there once.
            tokens += self._engine.encode(begun + line, add_special=not before).tolist()
        prompt = list(tokens)

        def keep(piece: Piece) -> None:
            tokens.extend(piece.tokens)

        _, about = self._write(
            lambda progress: self._engine.stream(
                prompt,
                max_tokens=self._max_tokens,
                stop=self._stop,
                sampling=self._sampling.config(),
                progress=progress,
            ),
            keep,
        )
        self._earlier.append(before)
        self._tokens = tokens
        errors.print(about)
