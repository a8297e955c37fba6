"""`pystaged chat`: a conversation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.text import Text

import pystaged
from pystaged._core import Tokenizer
from pystaged.chat.messages import marked_messages
from pystaged.cli.console import errors, open_engine, read_prompt, reading_bar, report
from pystaged.cli.generate import stats_table
from pystaged.cli.interrupts import Interrupts
from pystaged.cli.options import (
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
    usage,
)
from pystaged.cli.painting import show, summary
from pystaged.cli.turns import Turns, take_lines
from pystaged.config import NO_LIMIT, GenerationConfig, SamplingConfig, TextOptions
from pystaged.files import expanded, read_small, whole_file
from pystaged.loading.names import SMOLLM2
from pystaged.recommended import ANSWER_TOKENS, LOOP_WORDS, described
from pystaged.result import GenerationResult, Piece
from pystaged.streams import Stream

_MOST_BYTES = 64 << 20  # of a saved conversation

_HELP = '''A line you type is asked, and the model answers. Lines between """ and """ are one question; a line that
ends with \\ goes on with the next one. Only the former may begin with /. Ctrl-C ends an answer and keeps what was
written of it.
/system TEXT   say how the model is to answer; "" takes that back, without TEXT it is shown
/clear         begin again, with the same system message
/retry         answer the last question again, with the next seed        /seed N  same seed, same answer; -1 draws one
/set NAME VALUE   temperature, top_k, repeat_penalty, ..., as the options; max_tokens (0: what the context has room for)
/save FILE     keep the conversation       /load FILE   go on with a kept one
/stats         what each stage did for the last answer; on, off: a line on speed after each one
/color on      paint by who proposed each token; off
/help   show this          /bye   leave, as does Ctrl-D'''


@grouped
def chat(
    model: ModelArgument = None,
    *,
    named: ModelToo = None,
    system: System = "",
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", "-n", min=0, help="New tokens at most; 0 for as many as the context has room for."
        ),
    ] = ANSWER_TOKENS,
    think: Think = None,
    stop: Stop = None,
    stop_loops: StopLoops = None,
    grammars: GrammarOptions,
    sampling: SamplingOptions,
    loading: LoadOptions,
    stats: Annotated[bool, typer.Option(help="Say after each answer how fast it was, and against plain.")] = False,
    color: Colors = Color.NONE,
    show_tree: ShowTree = False,
) -> None:
    """Talk with a model, which answers as its own chat template has it, stays loaded and reads only what is new.

    The model is smollm2 unless you name another, and sampling what its makers recommend. Piped input is one question.

    Example: pystaged chat smollm2 --temperature 0.7 --top-p 0.9

    Example: pystaged chat smollm2 --system "Answer in one sentence." < question.txt
    """
    constraint = grammars.options()
    with usage():
        limit = max_tokens or NO_LIMIT
        GenerationConfig(max_tokens=limit, sampling=sampling.config(), stop=stop or (), **constraint)
    name = either(model, named)
    name = SMOLLM2 if name is None else name  # what the bundled pair writes is no answer
    question = None if sys.stdin.isatty() else read_prompt("-").removesuffix("\n")
    if question is not None and not question.strip():
        raise ValueError("nothing is asked: standard input is empty")
    with open_engine(name, loading) as engine, Interrupts() as interrupts:
        # Refuses what cannot be used; nobody reads it.
        engine.stream(" ", sampling=replace(sampling.config(), min_tokens=0), **constraint)
        session = Chat(
            engine,
            sampling,
            max_tokens,
            color,
            interrupts,
            show_tree=show_tree,
            system=system,
            think=think,
            stats=stats,
            stop=stop or (),
            stop_loops=stop_loops is not False,
            constraint=constraint,
        )
        report(f"{engine.model.name}: {described(sampling.config(engine.recommended_sampling))}")
        if question is None:
            take_lines(session, interrupts)
            return
        with interrupts.allowed():
            session.answer_once(question)


class Chat(Turns):
    """A conversation so far.

    Arguments as in Turns and of the command; constraint: what each answer must be, as Engine.chat takes it.
    """

    _least_tokens = 0

    def __init__(
        self,
        engine: pystaged.Engine,
        sampling: SamplingOptions,
        max_tokens: int,
        color: Color,
        interrupts: Interrupts,
        *,
        show_tree: bool = False,
        system: str = "",
        think: bool | None = None,
        stats: bool = False,
        stop: Sequence[str] = (),
        stop_loops: bool = True,
        constraint: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(engine, sampling, max_tokens, color, interrupts, show_tree=show_tree)
        self._system = system
        self._stop, self._stop_loops = stop, stop_loops
        self._constraint = constraint or {}
        self._options = {} if think is None else {"enable_thinking": think}
        self._shows_stats = stats
        self._messages: list[dict[str, Any]] = []
        self._asked: tuple[list[dict[str, Any]], str] | None = None  # the last question, and what was before it
        self._last: GenerationResult | None = None  # the last answer
        self._made_with: object = None  # what may be set, and fixed that
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: errors.print(_HELP, style="dim", markup=False),
            "/system": self._set_system,
            "/clear": lambda _: self._begin([]),
            "/retry": lambda _: self._retry(),
            "/seed": self._seed,
            "/set": lambda words: self._set(words.split()),
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/color": self._paint,
        }

    def take(self, line: str) -> bool:
        command, _, words = line.strip().partition(" ")
        if command in ("/bye", "/exit", "/quit"):
            return False
        if command in self._commands:
            self._commands[command](words.strip())
        elif command.startswith("/"):
            raise ValueError(f"there is no command {command}; /help shows those there are")
        elif command:
            self.say(line)
        return True

    def say(self, text: str) -> None:
        if text.strip():
            self._ask(text)

    def answer_once(self, question: str) -> None:
        """Write the answer to a question; errors and Ctrl-C are the caller's."""
        with reading_bar() as progress:
            stream = self._stream([{"role": "user", "content": question}], progress)
            result = show(stream, self._engine.tokenizer, self._color, show_tree=self._show_tree)
        self._tell(result, "--max-tokens")

    def _stream(self, messages: list[dict[str, Any]], progress: Callable[[int, int], None]) -> Stream:
        begun = [{"role": "system", "content": self._system}] if self._system else []
        options = TextOptions(
            max_tokens=self._max_tokens or self._engine.n_ctx,
            sampling=self._config(self._sampling),
            stop=self._stop,
            stop_loops=self._stop_loops,
            progress=progress,
            **cast(TextOptions, self._constraint),
        )
        return self._engine.stream_chat([*begun, *messages], template_options=self._options, **options)

    def _ask(self, question: str) -> None:
        before = self._messages
        self._asked = before, question
        messages, made_with = [*before, {"role": "user", "content": question}], self._fixed_by()
        pieces: list[Piece] = []
        try:
            result, about = self._write(lambda progress: self._stream(messages, progress), pieces.append)
        except pystaged.ContextFullError:
            here, most = self._engine.n_ctx, self._engine.model.max_context
            more = f", or start with --n-ctx, up to {most}" if most > here else ""
            raise ValueError(
                f"the conversation does not fit into the context of {here} tokens: /clear begins again{more}"
            ) from None
        is_done = result is not None and result.finish_reason != "cancelled"
        if result and (pieces or is_done):
            tokens = [token for piece in pieces for token in piece.tokens]
            self._messages = [*messages, {"role": "assistant", "content": "".join(pieces), "tokens": tokens}]
            self._last, self._made_with = result, made_with
        if result and is_done:
            self._tell(result)
        else:
            errors.print(about)

    def _config(self, sampling: SamplingOptions) -> SamplingConfig:
        return sampling.config(self._engine.recommended_sampling)

    def _fixed_by(self) -> object:
        """What fixes the greedy answer to a question, besides what was said before it."""
        return self._system, self._max_tokens, replace(self._sampling, seed=0)

    def _begin(self, messages: list[dict[str, Any]]) -> None:
        """Go on from these messages."""
        self._messages, self._asked, self._last = messages, None, None
        if messages:
            self._asked = messages[:-2], messages[-2]["content"]

    def _tell(self, result: GenerationResult, allows_more: str = "/set max_tokens") -> None:
        """Show the numbers of an answer if that is wished, and why it ends where it does."""
        if self._shows_stats:
            errors.print(speed(result.stats, self._color))
        if result.finish_reason == "loop":
            report(f"{LOOP_WORDS}; --no-stop-loops lets it go on")
        if result.finish_reason != "length":
            return
        if len(result.tokens) == self._max_tokens:
            report(f"cut at {self._max_tokens} tokens; {allows_more} allows more")
        else:
            report("the context is full: /clear begins again, --n-ctx allows more")

    def _retry(self) -> None:
        if not self._asked:
            raise ValueError("there is no question to answer again")
        before, question = self._asked
        kept = self._messages
        is_done = len(kept) > len(before) and self._last is not None and self._last.finish_reason == "stop"
        if self._config(self._sampling).is_greedy and is_done and self._made_with == self._fixed_by():
            raise ValueError(
                "at temperature 0 the answer would be the same; /set temperature 0.8 makes others possible"
            )
        if self._sampling.seed is not None and self._sampling.seed >= 0:
            self._sampling = replace(self._sampling, seed=(self._sampling.seed + 1) % 2**64)
        self._messages = before
        try:
            self._ask(question)
        finally:
            if len(self._messages) == len(before):  # nothing was written
                self._messages = kept

    def _seed(self, words: str) -> None:
        if not words:
            raise ValueError("write /seed N, a number; -1 draws one")
        self._set(["seed", words])

    def _set_system(self, words: str) -> None:
        if words == '""':
            self._system = ""
        elif words:
            self._system = words
        elif self._system:
            typer.echo(self._system)
        else:
            report("there is no system message")

    def _stats(self, words: str) -> None:
        if words in ("on", "off"):
            self._shows_stats = words == "on"
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

    def _save(self, words: str) -> None:
        if not words:
            raise ValueError("write /save FILE")
        path = expanded(words)
        kept = {
            "vocabulary": self._engine.tokenizer.fingerprint,
            "system": self._system,
            "messages": self._messages,
        }
        with whole_file(path) as part:
            part.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", "utf-8")
        report(f"saved {path}")

    def _load(self, words: str) -> None:
        if not words:
            raise ValueError("write /load FILE")
        path = expanded(words)
        self._system, messages = read_conversation(path, self._engine.tokenizer)
        self._begin(messages)
        report(f"loaded {path}: {len(self._messages)} messages")


def read_conversation(path: Path, tokenizer: Tokenizer) -> tuple[str, list[dict[str, Any]]]:
    """System message and messages of a saved conversation; without tokens, if they are another vocabulary's.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
    """
    try:
        kept = json.loads(read_small(path, _MOST_BYTES).decode("utf-8"))
        system, messages = kept["system"], kept["messages"]
        turns = [("user", "assistant")[number % 2] for number in range(len(messages))]
        if not isinstance(system, str) or [message["role"] for message in messages] != turns or len(turns) % 2:
            raise TypeError("user and assistant do not take turns")
        if not all(isinstance(message["content"], str) for message in messages):
            raise TypeError("a content is no text")
        if messages:
            marked_messages(messages)
        is_ours = kept.get("vocabulary") == tokenizer.fingerprint
        for message in messages if is_ours else ():
            _check_tokens(message.get("tokens", []), tokenizer.num_tokens)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no conversation that was saved with /save: {error}") from None
    fields = ("role", "content", "tokens") if is_ours else ("role", "content")
    return system, [{name: message[name] for name in fields if name in message} for message in messages]


def _check_tokens(tokens: Any, num_tokens: int) -> None:
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise TypeError("the tokens of a message are no list of integers")
    for token in tokens:
        if not 0 <= token < num_tokens:
            raise ValueError(f"token {token} is outside of the vocabulary of {num_tokens}")


def speed(stats: pystaged.GenerationStats, color: Color) -> Text:
    """One line on an answer: its speed, that against plain decoding, and what was read for it."""
    line = summary(stats, color)
    line.append(f"; read {stats.prompt_tokens - stats.reused_tokens} of {stats.prompt_tokens} tokens")
    return line
