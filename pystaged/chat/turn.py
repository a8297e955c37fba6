"""Split a model's answer into reasoning, text and calls of tools while it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from pystaged._core import Tokenizer
from pystaged.chat.calls import HARMONY, HARMONY_MARKS, HERMES, CallForm, Schemas, form_of, is_json
from pystaged.chat.marked import join
from pystaged.chat.messages import REASONING, Message, marked_messages
from pystaged.chat.source import Kind, Parser, Source

_PIECE = 4096  # characters that are read at once
_ENOUGH = 32  # tokens at a prompt's end that may hold the mark that begins reasoning


class Thinking(NamedTuple):
    """The marks around a model's reasoning."""

    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that may be control tokens."""
        if self == CHANNELS:
            return HARMONY_MARKS
        return self.begin.removesuffix("thought"), self.end

    @property
    def closing(self) -> str:
        """The text that ends reasoning at its limit."""
        if self == CHANNELS:
            return f"{self.end}<|start|>assistant<|channel|>final<|message|>"
        return f"\n{self.end}\n\n" if self.end == "</think>" else self.end

    def begins(self, answer: str) -> bool:
        """Whether an answer begins with reasoning."""
        return answer.lstrip().startswith(self.begin)

    def opens(self, prompt: str) -> bool:
        """Whether a prompt ends where reasoning begins."""
        return prompt.rstrip().endswith(self.begin)


Begun = Literal["thinking", "reasoning", "text"] | None
"""Where an answer begins: where its reasoning does, in the middle of that or of its text; None for its beginning."""
CHANNELS = Thinking("<|channel|>analysis<|message|>", "<|end|>")
"""gpt-oss's reasoning: messages in a channel of their own, among others."""
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|start|>")  # gpt-oss's
_THINKING = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<|channel>thought", "<channel|>"),
)


@dataclass(frozen=True)
class Dialect:
    """How a model writes tool calls and reasoning.

    form: of calls. thinking: marks of reasoning, None if the model has none. controls: the marks that are control
    tokens, with their ids; an answer's text contains them only if asked for.
    """

    form: CallForm
    thinking: Thinking | None
    controls: dict[str, int]

    @classmethod
    def of(cls, template: str, tokenizer: Tokenizer, knows_tools: bool = True) -> Dialect:
        """The dialect that a chat template is written in; without tools of its own, calls are in the Hermes form."""
        form = form_of(template) if knows_tools else HERMES
        thinking = next((each for each in _THINKING if each.end in template), None)
        thinking = CHANNELS if form is HARMONY or CHANNELS.begin in template else thinking
        controls: dict[str, int] = {}
        for mark in (*form.marks, *(thinking.marks if thinking else ())):
            tokens = tokenizer.encode(mark, add_special=False).tolist()
            if len(tokens) == 1 and tokenizer.is_control(tokens[0]):
                controls[mark] = tokens[0]
        return cls(form, thinking, controls)

    def begun(self, prompt: Sequence[int], tokenizer: Tokenizer, answer: Message | None = None) -> Begun:
        """Where the answer to a prompt begins. answer: the message that the prompt ends with."""
        text = prefill_of(marked_messages([answer])[0], self.thinking) if answer else ""
        if text.strip():
            if not (self.thinking and self.thinking.begins(text)):
                return "text"
            if self.thinking == CHANNELS:
                head, _, said = text.rpartition("<|message|>")
                if any(end in said for end in _MESSAGE_ENDS):
                    return None
                return "reasoning" if head.endswith("analysis") else "text"
            return "text" if self.thinking.end in text else "reasoning"
        end = tokenizer.decode(prompt[-_ENOUGH:], special=True)
        return "thinking" if self.thinking and self.thinking.opens(end) else None


@dataclass
class Block:
    """A part of an answer.

    index: among the answer's blocks. text: of a call, its arguments, normally JSON. name: of the called tool. is_whole:
    whether a call's arguments are complete.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    name: str = ""
    is_whole: bool = False


class TurnReader:
    """Splits one answer.

    Text is passed on at once, except what may be the beginning of a mark, and white space before it.

    Args:
        thinking: marks of reasoning; None to leave it in the text.
        begun: where the answer begins.
        form: of calls; None to leave them in the text.
        schemas: of the tools' arguments.
    """

    def __init__(
        self,
        thinking: Thinking | None = None,
        begun: Begun = None,
        form: CallForm | None = None,
        schemas: Schemas = MappingProxyType({}),
    ) -> None:
        self.blocks: list[Block] = []
        self._source, self._length = Source(), 0
        self._parser = _turn(self._source, thinking, begun, form, schemas)

    def push(self, text: str) -> list[tuple[Block, str]]:
        """Add to the answer; returns what is certain: blocks, which may be new or go on, each with its new text."""
        return [(block, new) for block, new, _ in self.placed(text)]

    def finish(self, *, is_cut: bool = False) -> list[tuple[Block, str]]:
        """End the answer; returns the rest, as push does. is_cut: whether a limit ended it, perhaps within a mark."""
        return [(block, new) for block, new, _ in self.placed("", ended=True, is_cut=is_cut)]

    def placed(self, text: str, *, ended: bool = False, is_cut: bool = False) -> list[tuple[Block, str, int]]:
        """As push, and as finish if it has ended; each also with the number of characters that are read by then."""
        told: list[tuple[Block, str, int]] = []
        for begin in range(0, len(text), _PIECE):  # reading a token copies what is behind it
            piece = text[begin : begin + _PIECE]
            self._source.text += piece
            self._length += len(piece)
            told += self._read()
        self._source.ended, self._source.is_cut = self._source.ended or ended, is_cut
        return [*told, *self._read()] if ended else told

    def may_grow(self, block: Block) -> bool:
        """Whether a block may get more text."""
        return block is self.blocks[-1] and not self._source.ended

    def of_kind(self, kind: Literal["reasoning", "text", "call"]) -> list[Block]:
        """The blocks of a kind."""
        return [block for block in self.blocks if block.kind == kind]

    def _read(self) -> Iterator[tuple[Block, str, int]]:
        for event in self._parser:
            if event is None:
                return
            kind, text = event
            last = self.blocks[-1] if self.blocks else None
            if kind == "end":
                self.blocks[-1].is_whole = True
                continue
            if kind == "call":
                self.blocks.append(Block("call", len(self.blocks), name=text))
                text = ""
            elif kind != "arguments" and (last is None or last.kind != kind):
                self.blocks.append(Block(kind, len(self.blocks)))
            self.blocks[-1].text += text
            yield self.blocks[-1], text, self._length - len(self._source.text)


def prefill_of(message: Message, thinking: Thinking | None) -> str:
    """What a message holds of an answer that is to be continued: its text, or else its reasoning behind the mark."""
    content, reasoning = message.get("content") or "", next((message[k] for k in REASONING if message.get(k)), "")
    text: str = content if isinstance(content, str) else join("\n", [part["text"] for part in content])
    if reasoning and thinking and not text.strip():
        return join("", [thinking.begin, "" if thinking == CHANNELS else "\n", reasoning])
    return text


def calls_of(text: str) -> list[Block]:
    """The whole calls of an answer in the Hermes form whose arguments are valid JSON."""
    reader = TurnReader(form=HERMES)
    reader.push(text)
    reader.finish()
    return [block for block in reader.of_kind("call") if block.is_whole and is_json(block.text)]


def quoted(answer: str) -> str:
    """An answer as a message's content; for gpt-oss, whose template refuses channels, only its text."""
    if not answer.startswith("<|channel|>"):
        return answer
    reader = TurnReader(CHANNELS)
    reader.push(answer)
    reader.finish()
    return "".join(block.text for block in reader.of_kind("text"))


def _turn(
    source: Source, thinking: Thinking | None, begun: Begun, form: CallForm | None, schemas: Schemas
) -> Parser[None]:
    if thinking == CHANNELS:
        yield from _messages(source, begun, form, schemas)
        return
    if thinking and begun != "text" and (begun or (yield from _begins(source, thinking.begin))):
        if begun != "reasoning":
            yield from source.space()
        yield from source.until((thinking.end,), "reasoning", trims=True)
        yield from source.space()
    if form is None:
        yield from source.until((), "text")
        return
    if form.at_start and begun != "text" and (yield from _begins(source, "{", takes=False)):
        yield from form.parse(source, form, schemas)
    while mark := (yield from source.until(form.begins, "text", trims=True)):
        space, is_inside = source.trimmed, mark == "<function="
        source.text = mark + source.text if is_inside else source.text
        if (yield from form.parse(source, form, schemas)):
            yield from source.space()
        elif not source.has_cut:
            source.text = source.text.removeprefix(mark) if is_inside else source.text
            yield "text", space + mark


def _messages(source: Source, begun: Begun, form: CallForm | None, schemas: Schemas) -> Parser[None]:
    """gpt-oss's messages: each has a header, which says its channel and to whom it is."""
    marks = ("<|message|>", *(HARMONY.begins if form is HARMONY else ()))
    while begun or (yield from _begins(source, "<|channel|>", "<|start|>", "<|message|>", "to=", takes=False)):
        if begun:
            header, mark = "final" if begun == "text" else "analysis", "<|message|>"
            begun = None
        else:
            header, mark = yield from source.collected(marks)
        if mark in HARMONY.begins:
            if not (yield from HARMONY.parse(source, HARMONY, schemas)):
                if not source.has_cut:
                    yield "text", mark
                break
        elif mark:
            kind: Kind = "reasoning" if header.endswith("analysis") else "text"
            if (yield from source.until(_MESSAGE_ENDS, kind)) == "<|start|>":
                source.text = "<|start|>" + source.text  # where control tokens are left out, it ends the message, too
        else:
            return  # nothing follows the header
    yield from source.until((), "text")


def _begins(source: Source, *marks: str, takes: bool = True) -> Parser[bool]:
    """Whether one of some marks comes next, after white space; if so, read it, which then is the only one."""
    space = yield from source.space()
    found = yield from source.starts(*marks, drops=False)
    source.text = source.text[len(marks[0]) :] if found and takes else space + source.text
    return found
