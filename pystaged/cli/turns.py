"""The conversation of `pystaged chat`: reading lines, turns that Ctrl-C ends, and commands such as /set."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import typer
from rich.text import Text

import pystaged
from pystaged.chat.format import begin
from pystaged.chat.saved import TURN, read_conversation, save_conversation
from pystaged.chat.turn import quoted
from pystaged.cli.console import complain, errors, open_engine, read_question, reading_bar, report, size_words
from pystaged.cli.lines import Lines
from pystaged.cli.options import GRAMMARS, Given, usage
from pystaged.cli.painting import of_context, show, stats_table, summary, tell_cut, write_wrapped
from pystaged.decoding.readers import Stream
from pystaged.loading.names import SMOLLM2
from pystaged.options.aliases import KEYWORDS, SETTINGS, meant
from pystaged.options.config import NO_LIMIT, GenerationConfig, TextOptions
from pystaged.options.recommended import ANSWER_TOKENS, described, toy_words
from pystaged.options.table import ALL, LOADING, SAMPLING, TEXT, flags
from pystaged.options.words import read_system
from pystaged.platform.ctrl_c import Interrupts
from pystaged.platform.files import expanded
from pystaged.platform.memory import loadable_memory
from pystaged.result import GenerationResult, Piece

_SHORT = {"system": str, "think": bool, "color": bool, "stats": bool, "seed": int}  # /NAME is /set NAME
# Names that /set accepts.
_SETTABLE: dict[str, Any] = {
    name: option.kind
    for name, option in ALL.items()
    if name in {*SAMPLING, "max_tokens", "stop_loops"}
    if option.kind in (int, float, bool)
} | _SHORT
_KINDS: dict[Any, str] = {int: "an integer", float: "a number", bool: "on or off", str: "text"}

# Options of the command that a running chat cannot change.
_FIXED = {*LOADING, *SAMPLING, "stop", "json_schema", "regex", "grammar"} - _SETTABLE.keys()

_Messages = list[dict[str, Any]]

_SWITCH = {"on": True, "off": False}
_LEAVING = ("exit", "quit", "bye")
_ALSO = {"/?": "/help", "/new": "/clear"}
_WITHOUT_EFFECT = {"seed": 0, "color": "", "stats": False}  # settings that a greedy turn does not depend on

_HELP = '''A line you type is asked, and the model answers; exit, quit or bye alone leaves.
/system TEXT       say how the model is to answer, @FILE reads it; "" takes that
                   back, without TEXT it is shown
/think on, off     whether a model that can think does so first
Pasted lines are one message, and so are lines between """ and """; a line
that ends with \\ continues on the next one. A line alone may begin with / only
in """. Ctrl-C ends the model's turn and keeps what it wrote.
/clear             forget the conversation
/undo              take the last turn back
/retry             the last turn again, with the next seed
/seed N            same seed, same turn; -1 draws one
/set NAME VALUE    set temperature, top_k, ..., max_tokens, stop_loops
/show              show the settings
/text              show the conversation
/save FILE         save it
/load FILE         continue a saved one
/stats             what each stage did; on, off: the speed after each turn
/color on, off     colour each token by the stage that proposed it
/help              show this
/bye               leave, as does Ctrl-D'''


@dataclass(eq=False)
class Chat:
    """A conversation as messages; a method `_do_NAME` is the command /NAME.

    engine: an open one, which stays open. given: options of the command, which /set changes; max_tokens and stop_loops
    are among them, and 0 tokens means until the context is full; context_overflow, "drop" unless given, says whether
    the model no longer reads the oldest turns where the context is full; stats, whether the speed is shown after each
    turn. interrupts: already entered.
    """

    engine: pystaged.Engine
    given: Given
    interrupts: Interrupts

    def __post_init__(self) -> None:
        self.given = Given({"system": "", "stats": False} | self.given)
        self._num_dropped = 0  # messages that the model no longer reads
        self._files = set[Path]()  # that /save may replace
        self._states: list[_Messages] = [[]]  # /undo returns to the last but one
        self._unanswered: str | None = None  # a question that was taken back, for /retry
        self._last: GenerationResult | None = None  # the result of the last turn
        self._made_with: object = None  # the settings that it was made with

    def take(self, line: str) -> bool:
        """Run a line; False when it says to leave. Raises ValueError, TypeError, OSError."""
        command, words = [*re.split("[ \t]", line.strip(), maxsplit=1), ""][:2]
        command = _ALSO.get(command.lower(), command.lower())
        name, words = command.removeprefix("/"), words.strip()
        run = getattr(self, f"_do_{name}", None)
        is_asked = not line.startswith("/") or ("\n" in line and not (run or name in _SHORT))
        if line.strip() in _LEAVING or (name in _LEAVING and not is_asked):
            return False
        if is_asked:
            self.say(line)
        elif run and not (name in _SHORT and words):
            run(words)
        elif name in _SHORT:
            self._set(name, words)
        else:
            there = [each.replace("_do_", "/") for each in dir(self) if each.startswith("_do_")]
            likely = meant(command, [*there, *_ALSO, *(f"/{word}" for word in (*_SHORT, *_LEAVING))])
            hint = f"did you mean {likely}? " if likely else ""
            raise ValueError(f"there is no command {command}; {hint}/help shows those there are")
        return True

    def say(self, text: str) -> None:
        """Ask text that is not a command, even if it begins with /. Errors as in take."""
        if text.strip():
            self._turn(text)
            if self._unanswered is not None:
                report("the question is taken back; /retry asks it again")

    def greeting(self, name: str) -> str:
        """Lines that name the model, its drafters, and the sampling."""
        model, n_ctx, most = self.engine.model, self.engine.n_ctx, self.given["max_tokens"]
        drafts = f"{self.engine.draft_name} and n-grams draft" if self.engine.draft_name else "n-grams draft"
        limit = f"{most} tokens at most" if 0 < most < n_ctx else f"context of {n_ctx} tokens"
        return (
            f"{name}: {model.architecture}, {size_words(model.file_bytes)}; {drafts}\n"
            f"{described(self.given.sampling(self.engine))}; {limit}; /help for help"
        )

    def answer_once(self, said: str) -> None:
        """Answer one question; errors, such as of cut JSON, and Ctrl-C are left to the caller."""
        with reading_bar() as progress:
            stream = self._stream([*self.messages, {"role": "user", "content": said}], progress)
            result = show(stream, self.given, wrap=True)
        self._tell(result, "--no-stop-loops", "--max-tokens")
        if self.given.get("json_schema") is not None:
            result.json()

    @property
    def messages(self) -> _Messages:
        """Those so far, of user and model in turn."""
        return self._states[-1]

    def _stream(self, begun: _Messages, progress: Callable[[int, int], None]) -> Stream:
        """Start the model's turn. progress: called with that of prefill."""
        options = TextOptions(
            max_tokens=self.given["max_tokens"] or self.engine.n_ctx,
            sampling=self.given.sampling(self.engine),
            progress=progress,
            **cast(TextOptions, self.given.only(["stop", "stop_loops", *GRAMMARS])),
        )
        messages = self._fitting(begun, options["max_tokens"])
        return self.engine.stream_chat(messages, template_options=self.given.of_template(), **options)

    def _fitting(self, begun: _Messages, max_tokens: int) -> _Messages:
        """The messages without the oldest turns, where all do not fit into the context with room for an answer and
        may be dropped."""
        encode = partial(self.engine.chat_format.encode, template_options=self.given.of_template())
        system = [{"role": "system", "content": self.given["system"]}] if self.given["system"] else []
        if self.given.get("context_overflow") == "stop":
            return [*system, *begun]
        n_ctx, first = self.engine.n_ctx, self._num_dropped
        most = n_ctx - min(max_tokens, n_ctx // 4)
        while (length := len(encode([*system, *begun[first:]]))) > most and first + TURN < len(begun):
            first += TURN
            most = min(most, n_ctx // 2)  # what is left is read again, so that happens once in several turns
        if first > self._num_dropped and length <= n_ctx:
            self._num_dropped = first
            report(of_context(self.engine, f"is full: the oldest {first} messages are no longer read"))
        return [*system, *begun[first:]]

    def _turn(self, said: str) -> None:
        """Run a turn: the user's text, then the model's. What is written until Ctrl-C or the loss of a device stays."""
        self._unanswered = said  # until something is written
        begun, made_with = [*self.messages, {"role": "user", "content": said}], self.given | _WITHOUT_EFFECT
        pieces: list[Piece] = []
        stream, failure = None, None

        def take(piece: Piece) -> None:
            pieces.append(piece)
            self.interrupts.check()

        try:
            with self.interrupts.allowed(), reading_bar() as progress:
                stream = self._stream(begun, progress)
                show(stream, self.given, keep=take, wrap=True)
        except KeyboardInterrupt:
            pass
        except OSError as error:
            failure = error
        except pystaged.ContextFullError:
            small = of_context(self.engine, "is too small for what is asked: shorten the question, or write /clear")
            raise ValueError(small) from None
        if stream:
            stream.close()
        result = stream.result if stream else None
        is_done = result is not None and result.finish_reason != "cancelled"
        if pieces or is_done:
            self._states.append([*begun, _answer(pieces)])
            self._last, self._made_with, self._unanswered = result, made_with, None
        if result and is_done:
            self._tell(result, "/set stop_loops off", "/set max_tokens")
        elif failure:
            complain(failure)
        else:
            report("stopped")

    def _tell(self, result: GenerationResult, allows_loops: str, allows_more: str) -> None:
        """Show the speed of a turn if requested, and why it was cut."""
        if self.given["stats"]:
            errors.print(self._speed(result))
        tell_cut(self.engine, result, allows_loops, allows_more)

    def _speed(self, result: GenerationResult) -> Text:
        """One line: the speed of a turn, the factor over plain decoding, and the prompt tokens evaluated."""
        stats = result.stats
        read = f"; read {stats.prompt_tokens - stats.reused_tokens} of {stats.prompt_tokens} tokens"
        return summary(stats, paint=self.given.paints).append(read)

    def _go_to(self, states: list[_Messages]) -> None:
        self._states, self._unanswered, self._last, self._num_dropped = states, None, None, 0

    def _do_help(self, _words: str) -> None:
        report(_HELP)

    def _do_text(self, _words: str) -> None:
        write_wrapped("\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages))

    def _do_save(self, words: str) -> None:
        path = _file("/save", words)
        if path.exists() and path not in self._files:
            self._files.add(path)
            raise ValueError(f"{path} is there already; the same command again replaces it")
        self._files.add(path)
        save_conversation(path, self.given["system"], self.messages, self.engine.tokenizer)
        report(f"saved {path}")

    def _do_load(self, words: str) -> None:
        path = _file("/load", words)
        self.given["system"], messages = read_conversation(path, self.engine.tokenizer)
        self._go_to([messages[:end] for end in range(0, len(messages) + 1, TURN)])
        self._files.add(path)
        report(f"loaded {path}: {len(messages)} messages")

    def _do_clear(self, _words: str) -> None:
        self._go_to([*self._states, []])
        report("the conversation is forgotten; /undo takes that back")

    def _do_undo(self, _words: str) -> None:
        if len(self._states) == 1:
            raise ValueError("there is nothing to undo")
        self._go_to(self._states[:-1])
        report("taken back")

    def _do_retry(self, _words: str) -> None:
        kept, said, is_answered = self._states, self._unanswered, self._unanswered is None
        if said is None:
            if not self.messages:
                raise ValueError("there is no turn to take again")
            said = str(self.messages[-TURN]["content"])
            is_same = self._last is not None and self._last.finish_reason == "stop"
            is_same &= self._made_with == self.given | _WITHOUT_EFFECT
            if is_same and self.given.sampling(self.engine).is_greedy:
                raise ValueError(
                    "at temperature 0 the answer would be the same; /set temperature 0.8 makes others possible"
                )
            self._states = kept[:-1]
        if self.given.get("seed") is not None:
            self.given["seed"] = (self.given["seed"] + 1) % 2**64
        try:
            self._turn(said)
        finally:
            if is_answered and self._unanswered is not None:  # nothing was written
                self._states, self._unanswered = kept, None

    def _do_stats(self, _words: str) -> None:
        if self._last is None:
            raise ValueError("there is no answer yet")
        errors.print(self._speed(self._last).append(f"; seed {self._last.seed}"))
        errors.print(stats_table(self._last.stats))

    def _do_show(self, words: str) -> None:
        if words in ("info", "license", "modelfile", "template"):
            raise ValueError(f"/show {words}: pystaged info MODEL says what there is to know of a model")
        if words == "system":
            self._set("system", "")
            return
        report(described(self.given.sampling(self.engine)))
        report(f"a context of {self.engine.n_ctx} tokens")
        for name, value in self.given.only(("max_tokens", "stop_loops", "think", "system")).items():
            if value != "":
                report(f"{name} {('off', 'on')[value] if isinstance(value, bool) else value}")

    def _do_set(self, words: str) -> None:
        name, *values = re.sub(r"^parameter(\s+|$)", "", words).split(maxsplit=1) or [""]  # as in Ollama
        value = "".join(values)
        if name in ("think", "nothink"):
            name, value = "think", "off" if name == "nothink" else value or "on"
        if name in SETTINGS:
            raise ValueError(f"/set {name}: {SETTINGS[name]}")
        if not name:
            raise ValueError("write /set NAME VALUE, such as /set temperature 0.8")
        self._set(name, value, "/set ")

    def _set(self, name: str, words: str, command: str = "/") -> None:
        """Change a setting, which is written in words; without any the system message is shown. command: what stands
        before its name."""
        name = _our_name(name)
        kind = _SETTABLE[name]
        if name == "system" and not words:
            typer.echo(self.given["system"]) if self.given["system"] else report("there is no system message")
            return
        if not words:
            more = "; -1 draws one" if name == "seed" else ""
            raise ValueError(f"write {command}{name} VALUE, {_KINDS[kind]}{more}")
        try:
            value = _SWITCH[words] if kind is bool else kind(words)
        except (KeyError, ValueError):
            raise ValueError(f"{name} must be {_KINDS[kind]}, not {words}") from None
        if name == "max_tokens":
            if not -1 <= value < 2**31:
                raise ValueError(f"max_tokens must be at least -1 and below 2**31, not {words}")
            value = max(value, 0)
        elif name == "color":
            value = "stages" if value else "none"
        elif name == "system":
            value = "" if words == '""' else read_system(words)
        elif name == "think" and "enable_thinking" not in self.engine.chat_format.variables():
            raise ValueError("this model's chat template cannot switch thinking on or off")
        given = Given(self.given | {name: None if (name, value) == ("seed", -1) else value})
        sampling = given.sampling(self.engine)
        self.given = given
        if name == "system":
            report("the system message is set" if value else "there is no system message any more")
        else:
            report(described(sampling) if name in SAMPLING and name != "seed" else f"{name} {words}")


def _answer(pieces: Sequence[Piece]) -> dict[str, Any]:
    text = "".join(piece.text for piece in pieces)
    message: dict[str, Any] = {"role": "assistant", "content": quoted(text)}
    if message["content"] == text:
        message["tokens"] = [token for piece in pieces for token in piece.tokens]
    return message


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


def converse(model: str | None, question: str | None, given: Given, resume: Path | None) -> None:
    """Answer one question, or run what is typed in a terminal; see `chat`."""
    model = SMOLLM2 if model is None else model  # what the bundled pair writes is no answer
    given["max_tokens"] = max(given.get("max_tokens", ANSWER_TOKENS), 0)
    given.setdefault("stop_loops", True)
    with usage():
        GenerationConfig(**given.only([*TEXT, *SAMPLING]) | {"max_tokens": given["max_tokens"] or NO_LIMIT})
    if resume is not None:
        if given["system"]:
            raise ValueError("a saved conversation has its own system message; leave out --system or --resume")
        read_conversation(expanded(resume))  # fails now, not after the model is loaded
    if question is not None or not sys.stdin.isatty():
        question = read_question("-" if question is None else question)
    begin()
    with open_engine(model, given) as engine, Interrupts() as interrupts:
        if question is not None and not question.strip():
            raise ValueError("nothing is asked: the question is empty")
        # Raises for options that cannot be used; the stream is not read.
        engine.stream(" ", **cast(TextOptions, given.only([*GRAMMARS, *SAMPLING]) | {"min_tokens": 0}))
        session = Chat(engine, given, interrupts)
        if resume is not None:
            session._do_load(str(resume))
        if question is None:
            toy = toy_words(engine.tokenizer.metadata, loadable_memory())
            report("\n".join(filter(None, [session.greeting(model), toy])))
            take_lines(session, interrupts)
            return
        with interrupts.allowed():
            session.answer_once(question)


def take_lines(chat: Chat, interrupts: Interrupts) -> None:
    """Run the lines typed in a terminal until one leaves or the input ends; errors are printed."""
    lines = Lines(interrupts)
    try:
        while (read := lines.read()) is not None:
            text, is_quoted = read
            try:
                if is_quoted:
                    chat.say(text)
                elif not chat.take(text):
                    break
            except (ValueError, TypeError, OSError) as error:
                complain(error)
    finally:
        lines.keep()
