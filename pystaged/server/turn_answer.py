"""The answer of an assistant: reasoning, text and calls; base of the interfaces that speak in messages."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from pystaged.chat.turn import Block, TurnReader
from pystaged.result import GenerationResult, Piece
from pystaged.sequence import Sequence as Text
from pystaged.server import answer_types
from pystaged.server.answer import Answer
from pystaged.server.request_types import StreamOptions, TextRequest
from pystaged.server.state import State
from pystaged.server.tools import Manner


@dataclass(frozen=True)
class Turns:
    """The answers to a request: their sequences, the first seed, and how they are read."""

    sequences: list[Text]
    seed: int
    manner: Manner


class TurnAnswer(Answer):
    """An answer that is split into blocks. An interface says how a block begins, goes on and ends.

    readers: by sequence.
    """

    def __init__(self, state: State, request: TextRequest, turns: Turns) -> None:
        super().__init__(state, request, turns.sequences, turns.seed)
        self.readers = [turns.manner.reader() for _ in turns.sequences]
        self._open: list[Block | None] = [None for _ in turns.sequences]
        self._counted: dict[int, tuple[int, int]] = {}  # characters and tokens of blocks of reasoning, by their id

    def opened(self, i: int, block: Block) -> list[dict[str, Any]]:
        """The parts for the beginning of a block of sequence i."""
        del i, block
        return []

    @abstractmethod
    def more(self, i: int, block: Block, text: str) -> list[dict[str, Any]]:
        """The parts for new text of a block."""

    def closed(self, i: int, block: Block, result: GenerationResult | None) -> list[dict[str, Any]]:
        """The parts for the end of a block; result: of the answer, if it has ended."""
        del i, block, result
        return []

    @abstractmethod
    def ending(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        """The parts after the last block."""

    def read(self, i: int, result: GenerationResult) -> TurnReader:
        """Read a whole answer."""
        reader = self.readers[i]
        reader.push(result.text)
        reader.finish()
        return reader

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        return self._told(i, self.readers[i].push(piece.text)) if piece.text else []

    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        parts = self._told(i, self.readers[i].finish())
        last = self._open[i]
        return [*parts, *(self.closed(i, last, result) if last else []), *self.ending(i, result)]

    def call_id(self, prefix: str, i: int, block: Block) -> str:
        """The id of a call."""
        return f"{prefix}_{self.key[:8]}{i}_{block.index}"

    def _told(self, i: int, found: Iterable[tuple[Block, str]]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for block, text in found:
            last = self._open[i]
            if block is not last:
                parts += self.closed(i, last, None) if last else []
                parts += self.opened(i, block)
                self._open[i] = block
            if text:
                parts += self.more(i, block, text)
        return parts

    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, by encoding the text, but at most those written. While the reasoning
        grows, up to a ninth of its text is not counted yet, so that it is not tokenized again for each token."""
        total = 0
        for reader in self.readers:
            for block in reader.of_kind("reasoning"):
                length, tokens = self._counted.get(id(block), (0, 0))
                if len(block.text) > (length * 9 // 8 if reader.may_grow(block) else length):
                    tokens = len(self.tokenizer.encode(block.text, add_special=False, parse_special=False))
                    self._counted[id(block)] = len(block.text), tokens
                total += tokens
        return min(total, sum(each.new_tokens for each in self.stats()))

    def usage(self) -> answer_types.Usage:
        found, tokens = super().usage(), self.reasoning_tokens()
        if tokens:
            details: Any = found.get("completion_tokens_details", {})
            found["completion_tokens_details"] = details | {"reasoning_tokens": tokens}
        return found


def is_begun(words: str) -> bool:
    """Whether a text is JSON, or the beginning of it."""
    try:
        from_json(words, allow_partial=True)
    except ValueError:
        return False
    return True


def read_arguments(words: str) -> dict[str, Any]:
    """The arguments of a call, as far as they were written."""
    try:
        found = from_json(words or "{}", allow_partial="trailing-strings")
    except ValueError:
        try:
            found = json.loads(words)  # allows halves of surrogate pairs
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


class EventAnswer(TurnAnswer):
    """The answer with one sequence and named events, as in /v1/responses and /v1/messages."""

    mark = b""
    names_events = True
    whole_kind = part_kind = ""

    @property
    def _options(self) -> StreamOptions:
        return StreamOptions()

    def whole(self, choices: list[dict[str, Any]], figures: dict[str, Any]) -> Any:
        del figures
        return choices[0]

    def framed(self, part: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        del figures
        return part
