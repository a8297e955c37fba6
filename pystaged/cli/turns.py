"""Shared by chat and chat --raw: reading lines, turns that Ctrl-C ends, and commands such as /set."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import typer
from rich.text import Text

import pystaged
from pystaged.aliases import KEYWORDS, SETTINGS, meant
from pystaged.cli.console import errors, reading_bar, report, words
from pystaged.cli.generate import stats_table
from pystaged.cli.interrupts import Interrupts
from pystaged.cli.options import Color, SamplingOptions
from pystaged.cli.painting import show, summary, write_wrapped
from pystaged.config import SamplingConfig, TextOptions
from pystaged.files import expanded, whole_file
from pystaged.options import ALL, LOADING, SAMPLING, flags
from pystaged.recommended import LOOP_WORDS, described
from pystaged.result import GenerationResult, Piece
from pystaged.streams import Stream

_QUOTES = '"""'
# Names that /set accepts.
_SETTABLE: dict[str, Any] = {
    name: option.kind
    for name, option in ALL.items()
    if name in {*SAMPLING, "max_tokens", "stop_loops"}
    if option.kind in (int, float, bool)
}

# Options of the command that a running chat cannot change.
_FIXED = {*LOADING, *SAMPLING, "stop", "json_schema", "regex", "grammar"} - _SETTABLE.keys()

Asked = tuple[list[Any], str]
"""A turn: the state before it, and the user's text."""

SWITCH = {"on": True, "off": False}

_HELP = '''Lines between """ and """ form one message; a line that ends with \\ continues on the next one. Only the
former may begin with /. Ctrl-C ends the model's turn and keeps what it wrote.
/clear         begin again              /undo   take the last turn back
/retry         the last turn again, with the next seed          /seed N  same seed, same turn; -1 draws one
/set NAME VALUE   temperature, top_k, repeat_penalty, ..., as the options; max_tokens; stop_loops on, off
/show          show the settings
/text          show the conversation
/save FILE     save it                  /load FILE   continue a saved one
/stats         what each stage did in the last turn; on, off: the speed after each turn
/color on      colour each token by the stage that proposed it; off
/help   show this          /bye   leave, as does Ctrl-D'''


class Turns(ABC):
    """User and model take turns.

    Args:
        engine: an open one, which stays open.
        sampling, max_tokens, stop_loops: initial values, which /set changes; 0 tokens means until the context is full.
        color, show_tree, stop: see generate.
        interrupts: already entered.
        stats: whether to show the speed after each turn.
        constraint: arguments of Engine.generate that constrain each turn.
    """

    _about: str  # explains a line of input, for /help
    _leaving: tuple[str, ...] = ()  # lines without / that say to leave
    _keeps_unanswered = False  # whether the user's text stays if the model wrote nothing

    def __init__(
        self,
        engine: pystaged.Engine,
        sampling: SamplingOptions,
        max_tokens: int,
        color: Color,
        interrupts: Interrupts,
        *,
        show_tree: bool = False,
        stats: bool = False,
        stop: Sequence[str] = (),
        stop_loops: bool = False,
        constraint: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._color = color
        self._interrupts = interrupts
        self._show_tree = show_tree
        self._shows_stats = stats
        self._stop, self._stop_loops = stop, stop_loops
        self._constraint = constraint or {}
        self._so_far: list[Any] = []
        self._earlier: list[tuple[list[Any], Asked | None]] = []  # states to which /undo returns, and their last turns
        self._asked: Asked | None = None  # the last turn
        self._last: GenerationResult | None = None  # its result
        self._made_with: object = None  # the settings that it was made with
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: errors.print(self._about + _HELP, style="dim", markup=False),
            "/clear": lambda _: self._clear(),
            "/undo": lambda _: self._undo(),
            "/retry": lambda _: self._retry(),
            "/text": lambda _: write_wrapped(self._text()),
            "/seed": self._seed,
            "/set": self._set,
            "/show": lambda _: self._show(),
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/color": self._paint,
        }
        self._commands |= {"/?": self._commands["/help"], "/new": self._commands["/clear"]}

    def take(self, line: str) -> bool:
        """Run a line; False when it says to leave.

        Raises:
            ValueError, TypeError, OSError: it cannot be done.
        """
        command, _, words = line.strip().partition(" ")
        if line.strip() in self._leaving:
            return False
        if not line.startswith("/"):
            self.say(line)
        elif command in ("/bye", "/exit", "/quit"):
            return False
        elif command in self._commands:
            self._commands[command](words.strip())
        else:
            likely = meant(command, self._commands)
            hint = f"did you mean {likely}? " if likely else ""
            raise ValueError(f"there is no command {command}; {hint}/help shows those there are")
        return True

    @abstractmethod
    def say(self, text: str) -> None:
        """Take text that is not a command, even if it begins with /. Errors as in take."""

    @abstractmethod
    def _begun(self, said: str) -> list[Any]:
        """The state after the user's text."""

    @abstractmethod
    def _stream(self, begun: list[Any], options: TextOptions) -> Stream:
        """Start the model's turn."""

    @abstractmethod
    def _ended(self, begun: list[Any], pieces: Sequence[Piece]) -> list[Any]:
        """The state after the model's turn."""

    @abstractmethod
    def _text(self) -> str:
        """The state as text."""

    @abstractmethod
    def _saved(self) -> str:
        """The content of a file for /save."""

    @abstractmethod
    def _load_from(self, path: Path) -> str:
        """Continue from a file of /save; returns a phrase that says how long it is. Errors as in take."""

    def _save(self, words: str) -> None:
        path = _file("/save", words)
        with whole_file(path) as part:
            part.write_text(self._saved(), "utf-8")
        report(f"saved {path}")

    def _load(self, words: str) -> None:
        self.resume(_file("/load", words))

    def resume(self, path: Path) -> None:
        """Continue what /save saved. Errors as in take."""
        report(f"loaded {path}: {self._load_from(path)}")

    def greeting(self, name: str) -> str:
        """Lines that name the model, its drafters, and the sampling."""
        model = self._engine.model
        drafts = f"{self._engine.draft_name} and n-grams draft" if self._engine.draft_name else "n-grams draft"
        limit = f"{self._max_tokens} tokens at most" if self._max_tokens else f"context of {self._engine.n_ctx} tokens"
        return (
            f"{name}: {model.architecture}, {model.file_bytes / 1e6:.0f} MB; {drafts}\n"
            f"{described(self._config(self._sampling))}; {limit}; /help for help"
        )

    def answer_once(self, said: str) -> None:
        """Answer one question; errors and Ctrl-C are left to the caller."""
        with reading_bar() as progress:
            stream = self._stream(self._begun(said), self._options(progress))
            result = show(stream, self._engine.tokenizer, self._color, show_tree=self._show_tree, wrap=True)
        self._tell(result, "--max-tokens", "--no-stop-loops")

    def _turn(self, said: str) -> None:
        """Run a turn: the user's text, then the model's."""
        before, asked = self._so_far, self._asked
        self._asked = before, said
        begun, made_with = self._begun(said), self._fixed_by()
        pieces: list[Piece] = []
        try:
            result, about = self._write(lambda progress: self._stream(begun, self._options(progress)), pieces.append)
        except pystaged.ContextFullError:
            here, most = self._engine.n_ctx, self._engine.model.max_context
            more = f", or start with --n-ctx, up to {most}" if most > here else ""
            raise ValueError(
                f"all of it does not fit into the context of {here} tokens: /clear begins again{more}"
            ) from None
        is_done = result is not None and result.finish_reason != "cancelled"
        if pieces or is_done or self._keeps_unanswered:
            self._so_far = self._ended(begun, pieces)
            self._earlier.append((before, asked))
            self._last, self._made_with = result, made_with
        if result and is_done:
            self._tell(result)
        else:
            errors.print(about)

    def _options(self, progress: Callable[[int, int], None]) -> TextOptions:
        return TextOptions(
            max_tokens=self._max_tokens or self._engine.n_ctx,
            sampling=self._config(self._sampling),
            stop=self._stop,
            stop_loops=self._stop_loops,
            progress=progress,
            **cast(TextOptions, self._constraint),
        )

    def _write(
        self, open_stream: Callable[[Callable[[int, int], None]], Stream], keep: Callable[[Piece], object]
    ) -> tuple[GenerationResult | None, Text]:
        """Write a turn while it is generated.

        Args:
            open_stream: starts the turn; called with a callback for the progress of prefill.
            keep: called with each piece that was written.

        Returns:
            The result, cut if Ctrl-C or a lost device ended it, None if it had not begun; and a line about that end.
        """

        def take(piece: Piece) -> None:
            keep(piece)
            self._interrupts.check()

        stream, about = None, Text("stopped", "dim")
        try:
            with self._interrupts.allowed(), reading_bar() as progress:
                stream = open_stream(progress)
                show(stream, self._engine.tokenizer, self._color, show_tree=self._show_tree, keep=take, wrap=True)
        except KeyboardInterrupt:
            pass
        except OSError as error:
            # For example, the device is lost; the text so far is not.
            about = Text(f"error: {words(error)}", "red")
        if stream:
            stream.close()
        return stream.result if stream else None, about

    def _config(self, sampling: SamplingOptions) -> SamplingConfig:
        """What is in force. Raises ValueError for what is out of range."""
        return sampling.config()

    def _fixed_by(self) -> object:
        """The settings that a greedy turn depends on."""
        return self._max_tokens, self._stop_loops, self._sampling.changed(seed=0).given

    def _tell(
        self,
        result: GenerationResult,
        allows_more: str = "/set max_tokens",
        allows_loops: str = "/set stop_loops off",
    ) -> None:
        """Show the speed of a turn if requested, and why it was cut."""
        if self._shows_stats:
            errors.print(speed(result.stats, self._color))
        if result.finish_reason == "loop":
            report(LOOP_WORDS.format(allows_loops))
        if result.finish_reason != "length":
            return
        if len(result.tokens) == self._max_tokens:
            report(f"cut at {self._max_tokens} tokens; {allows_more} allows more")
        else:
            report(f"the context of {self._engine.n_ctx} tokens is full: /clear begins again, --n-ctx allows more")

    def _begin(
        self, so_far: list[Any], earlier: list[tuple[list[Any], Asked | None]], asked: Asked | None = None
    ) -> None:
        """Continue from a state. asked: its last turn, for /retry."""
        self._so_far, self._earlier, self._asked, self._last = so_far, earlier, asked, None

    def _clear(self) -> None:
        self._begin([], [*self._earlier, (self._so_far, self._asked)])
        report("begun again; /undo takes that back")

    def _undo(self) -> None:
        if not self._earlier:
            raise ValueError("there is nothing to undo")
        before, asked = self._earlier[-1]
        self._begin(before, self._earlier[:-1], asked)
        report("taken back")

    def _retry(self) -> None:
        if not self._asked:
            raise ValueError("there is no turn to take again")
        before, said = self._asked
        kept, earlier, asked = self._so_far, self._earlier, self._asked
        is_done = kept is not before and self._last is not None and self._last.finish_reason == "stop"
        if self._config(self._sampling).is_greedy and is_done and self._made_with == self._fixed_by():
            raise ValueError(
                "at temperature 0 the answer would be the same; /set temperature 0.8 makes others possible"
            )
        seed = self._sampling.given.get("seed", -1)
        if seed >= 0:
            self._sampling = self._sampling.changed(seed=(seed + 1) % 2**64)
        self._so_far, self._earlier = before, earlier[: len(earlier) - (kept is not before)]
        self._asked = earlier[-1][1] if kept is not before else None
        try:
            self._turn(said)
        finally:
            if self._so_far is before:  # nothing was written
                self._so_far, self._earlier, self._asked = kept, earlier, asked

    def _stats(self, words: str) -> None:
        if words in ("on", "off"):
            self._shows_stats = words == "on"
            report(f"stats {words}")
        elif words:
            raise ValueError("write /stats, /stats on or /stats off")
        elif self._last is None:
            raise ValueError("there is no answer yet")
        else:
            errors.print(speed(self._last.stats, self._color).append(f"; seed {self._last.seed}"))
            errors.print(stats_table(self._last.stats))

    def _paint(self, words: str) -> None:
        if words not in ("on", "off"):
            raise ValueError("write /color on or /color off")
        self._color = Color.STAGES if words == "on" else Color.NONE
        report(f"color {words}")

    def _seed(self, words: str) -> None:
        if not words:
            raise ValueError("write /seed N, a number; -1 draws one")
        self._set(f"seed {words}")

    def _show(self) -> None:
        loops = "on" if self._stop_loops else "off"
        report(described(self._config(self._sampling)))
        report(f"max_tokens {self._max_tokens}, stop_loops {loops}; a context of {self._engine.n_ctx} tokens")

    def _set(self, words: str) -> None:
        words = words.removeprefix("parameter ")  # as in Ollama
        name, *values = words.split(maxsplit=1) or [""]
        if name == "system" and "/system" in self._commands:
            self._commands["/system"]("".join(values))
            return
        if name in ("think", "nothink") and "/think" in self._commands:
            self._commands["/think"]("off" if name == "nothink" else "".join(values) or "on")
            return
        if name in SETTINGS:
            raise ValueError(f"/set {name}: {SETTINGS[name]}")
        if len(words.split()) != 2:
            raise ValueError("write /set NAME VALUE, such as /set temperature 0.8")
        (value,) = values
        name = _our_name(name)
        kind = _SETTABLE[name]
        try:
            number = SWITCH[value] if kind is bool else kind(value)
        except (KeyError, ValueError):
            wanted = {int: "an integer", float: "a number", bool: "on or off"}[kind]
            raise ValueError(f"{name} must be {wanted}, not {value}") from None
        if name == "stop_loops":
            self._stop_loops = number
            report(f"stop_loops {value}")
            return
        if name == "max_tokens":
            if not -1 <= number < 2**31:
                raise ValueError(f"max_tokens must be at least -1 and below 2**31, not {value}")
            self._max_tokens = max(int(number), 0)
            report(f"max_tokens {value}")
            return
        sampling = self._sampling.changed(**{name: number})
        self._config(sampling)
        self._sampling = sampling
        report(f"seed {value}" if name == "seed" else described(self._config(sampling)))


def _our_name(name: str) -> str:
    """The name of a setting, which may be another program's. Raises ValueError for what cannot be set."""
    ours = KEYWORDS.get(name, name)
    if ours in _SETTABLE:
        return ours
    if ours in _FIXED:
        raise ValueError(f"{name} is fixed when a chat starts, by {flags(ours, ALL[ours])[0]}")
    likely = meant(name, _SETTABLE)
    hint = f"did you mean {likely}?" if likely else f"what can be set is {', '.join(_SETTABLE)}"
    raise ValueError(f"there is nothing called {name}; {hint}")


def _file(command: str, words: str) -> Path:
    if not words:
        raise ValueError(f"write {command} FILE")
    return expanded(words)


def speed(stats: pystaged.GenerationStats, color: Color) -> Text:
    """One line: the speed of a turn, the factor over plain decoding, and the prompt tokens evaluated."""
    line = summary(stats, color)
    line.append(f"; read {stats.prompt_tokens - stats.reused_tokens} of {stats.prompt_tokens} tokens")
    return line


def take_lines(turns: Turns, interrupts: Interrupts, greeting: str = "") -> None:
    """Run lines from standard input until one leaves or the input ends; errors are printed. A terminal is greeted."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415  gives `input` editing and a history where there is one
        report(greeting)
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
    """Read a line from standard input, or several that \\ joins or that stand between triple quotes, and whether they
    are; None at the end of input."""
    lines: list[str] = []
    quoted = False
    while True:
        try:
            with interrupts.allowed():
                line = input((". " if lines else "> ") if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                typer.echo()
            return ("\n".join(lines), quoted) if lines else None
        except KeyboardInterrupt:
            # As in a shell, the typed text is dropped.
            typer.echo()
            if sys.stdin.isatty():
                report("/bye or Ctrl-D leaves")
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
