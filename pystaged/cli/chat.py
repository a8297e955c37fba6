"""`pystaged chat`: a conversation with a model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pystaged._core import Tokenizer
from pystaged.chat.format import begin
from pystaged.chat.messages import marked_messages
from pystaged.chat.turn import quoted
from pystaged.cli.console import open_engine, read_prompt, report
from pystaged.cli.interrupts import Interrupts
from pystaged.cli.options import (
    LIMIT_HELP,
    Color,
    Colors,
    GrammarOptions,
    LoadOptions,
    ModelArgument,
    ModelToo,
    SamplingOptions,
    ShowTree,
    Stop,
    StopLoops,
    System,
    Think,
    either,
    grouped,
    read_system,
    usage,
)
from pystaged.cli.raw import Raw
from pystaged.cli.turns import SWITCH, Turns, take_lines
from pystaged.config import NO_LIMIT, GenerationConfig, SamplingConfig, TextOptions
from pystaged.files import expanded, read_small
from pystaged.loading.names import SMOLLM2
from pystaged.recommended import ANSWER_TOKENS
from pystaged.result import Piece
from pystaged.streams import Stream

_MOST_BYTES = 64 << 20  # of a saved conversation


@grouped
def chat(
    model: ModelArgument = None,
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="QUESTION", help="Answer this and leave; - reads it from standard input.", show_default=False
        ),
    ] = None,
    *,
    named: ModelToo = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue a text in turns with the model, without messages and template.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Continue a conversation saved with /save; with --prompt-cache it is not read again.",
            show_default=False,
        ),
    ] = None,
    system: System = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=-1,
            help=f"{LIMIT_HELP}; 2048 unless given, 64 with --raw.",
            show_default=False,
        ),
    ] = None,
    think: Think = None,
    stop: Stop = None,
    stop_loops: StopLoops = None,
    grammars: GrammarOptions,
    sampling: SamplingOptions,
    loading: LoadOptions,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats/--no-stats",
            "--verbose",
            help="Show after each answer its speed, and how much faster than plain decoding it was.",
        ),
    ] = False,
    color: Colors = Color.NONE,
    show_tree: ShowTree = False,
) -> None:
    """Chat with a model, using its chat template. The model stays loaded; each turn evaluates new tokens only.

    The model is smollm2 unless you name another, and sampling is what its makers recommend. Piped input is one
    question; with --raw, which is greedy, each line is a turn.

    Example: pystaged chat smollm2 "Why is the sky blue?"

    Example: pystaged chat smollm2 --temperature 0.7 --top-p 0.9

    Example: pystaged chat smollm2 --system "Answer in one sentence." < question.txt

    Example: pystaged chat smollm2 --system @instructions.txt

    Example: pystaged chat bundled --raw --color stages
    """
    constraint = grammars.options()
    if named is not None and question is None:
        model, question = None, model
    alone = model if named is None and question is None else None
    if alone and re.search(r"[ ?!]|^-$", alone) and not expanded(alone).exists():
        raise typer.BadParameter(f"{model!r} is no model; a question comes after one: chat smollm2 {model!r}")
    if raw and (system or think is not None):
        raise typer.BadParameter("--system and --think do not apply to --raw")
    limit = (64 if raw else ANSWER_TOKENS) if max_tokens is None else max(max_tokens, 0)
    with usage():
        GenerationConfig(max_tokens=limit or NO_LIMIT, sampling=sampling.config(), stop=stop or (), **constraint)
    name = either(model, named)
    name = SMOLLM2 if name is None else name  # what the bundled pair writes is no answer
    if question is not None:
        question = read_prompt(question)
    elif not raw and not sys.stdin.isatty():
        question = read_prompt("-").removesuffix("\n")
    if not raw:
        begin()
    with open_engine(name, loading) as engine, Interrupts() as interrupts:
        if question is not None and not question.strip():
            raise ValueError("nothing is asked: the question is empty")
        # Raises for options that cannot be used; the stream is not read.
        engine.stream(" ", sampling=replace(sampling.config(), min_tokens=0), **constraint)
        options: dict[str, Any] = {"show_tree": show_tree, "stats": stats, "stop": stop or (), "constraint": constraint}
        options["stop_loops"] = not raw if stop_loops is None else stop_loops
        common = (engine, sampling, limit, color, interrupts)
        session = Raw(*common, **options) if raw else Chat(*common, system=system, think=think, **options)
        if resume is not None:
            if system:
                raise ValueError("a saved conversation has its own system message; leave out --system or --resume")
            session.resume(expanded(resume))
        if question is None:
            take_lines(session, interrupts, session.greeting(name))
            return
        with interrupts.allowed():
            session.answer_once(question)


class Chat(Turns):
    """A conversation as messages.

    Arguments as in Turns; system: the system message; think: whether models that can think do so.
    """

    _leaving = ("exit", "quit", "bye")
    _about = """A line you type is asked, and the model answers; exit, quit or bye alone leaves, as /bye does.
/system TEXT   say how the model is to answer, @FILE reads it; "" takes that back, without TEXT it is shown
/think on, off   whether a model that can think does so first
"""

    def __init__(self, *arguments: Any, system: str = "", think: bool | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._system = system
        self._template_options = {} if think is None else {"enable_thinking": think}
        self._commands |= {"/system": self._set_system, "/think": self._set_think}

    def _show(self) -> None:
        super()._show()
        if self._system:
            report(f"system message: {self._system}")
        for is_on in self._template_options.values():
            report(f"think {'on' if is_on else 'off'}")

    def say(self, text: str) -> None:
        if text.strip():
            self._turn(text)

    def _begun(self, said: str) -> list[dict[str, Any]]:
        return [*self._so_far, {"role": "user", "content": said}]

    def _stream(self, begun: list[dict[str, Any]], options: TextOptions) -> Stream:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return self._engine.stream_chat([*system, *begun], template_options=self._template_options, **options)

    def _ended(self, begun: list[dict[str, Any]], pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        text = "".join(piece.text for piece in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": quoted(text)}
        if message["content"] == text:
            message["tokens"] = [token for piece in pieces for token in piece.tokens]
        return [*begun, message]

    def _text(self) -> str:
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self._so_far)

    def _config(self, sampling: SamplingOptions) -> SamplingConfig:
        return sampling.config(self._engine.recommended_sampling)

    def _fixed_by(self) -> object:
        return self._system, self._template_options, super()._fixed_by()

    def _set_system(self, words: str) -> None:
        if words:
            self._system = "" if words == '""' else read_system(words)
            report("the system message is set" if self._system else "there is no system message any more")
        elif self._system:
            typer.echo(self._system)
        else:
            report("there is no system message")

    def _set_think(self, words: str) -> None:
        if words not in SWITCH:
            raise ValueError("write /think on or /think off")
        self._template_options = {"enable_thinking": SWITCH[words]}
        report(f"think {words}")

    def _saved(self) -> str:
        vocabulary = self._engine.tokenizer.fingerprint
        kept = {"vocabulary": vocabulary, "system": self._system, "messages": self._so_far}
        return json.dumps(kept, ensure_ascii=False, indent=1) + "\n"

    def _load_from(self, path: Path) -> str:
        self._system, messages = read_conversation(path, self._engine.tokenizer)
        asked = [None, *((messages[:i], messages[i]["content"]) for i in range(0, len(messages), 2))]
        earlier = [(messages[: 2 * i], turn) for i, turn in enumerate(asked[:-1])]
        self._begin(messages, earlier, asked[-1])
        return f"{len(messages)} messages"


def read_conversation(path: Path, tokenizer: Tokenizer) -> tuple[str, list[dict[str, Any]]]:
    """Read the system message and the messages of a saved conversation; tokens of another vocabulary are dropped.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a saved conversation.
    """
    try:
        kept = json.loads(read_small(path, _MOST_BYTES).decode("utf-8"))
        system, messages = kept["system"], kept["messages"]
        turns = [("user", "assistant")[number % 2] for number in range(len(messages))]
        if not isinstance(system, str) or [message["role"] for message in messages] != turns or len(turns) % 2:
            raise TypeError("user and assistant do not alternate")
        if not all(isinstance(message["content"], str) for message in messages):
            raise TypeError("a message's content is not text")
        if messages:
            marked_messages(messages)
        is_ours = kept.get("vocabulary") == tokenizer.fingerprint
        for message in messages if is_ours else ():
            _check_tokens(message.get("tokens", []), tokenizer.num_tokens)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a conversation saved with /save: {error}") from None
    fields = ("role", "content", "tokens") if is_ours else ("role", "content")
    return system, [{name: message[name] for name in fields if name in message} for message in messages]


def _check_tokens(tokens: Any, num_tokens: int) -> None:
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise TypeError("the tokens of a message are not a list of integers")
    for token in tokens:
        if not 0 <= token < num_tokens:
            raise ValueError(f"token {token} is outside the vocabulary of {num_tokens} tokens")
