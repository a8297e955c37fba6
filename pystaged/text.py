"""Conversion between text and tokens: continuations, incremental decoding, stop strings."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Tokenizer

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]


def encode_continuation(tokenizer: Tokenizer, text: str, *, parse_special: bool = True) -> NDArray[np.int32]:
    """The tokens of the continuation of another text, int32[n]: without the vocabulary's initial tokens, and without
    the space that SentencePiece adds. Errors as in Tokenizer.encode."""
    tokens = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    if text and tokenizer.decode(tokens, special=True) == f" {text}":
        begun = tokenizer.encode("\n", add_special=False)
        more = tokenizer.encode(f"\n{text}", add_special=False, parse_special=parse_special)
        if (more[: len(begun)] == begun).all():
            return more[len(begun) :]
    return tokens


class TextBuffer:
    """Decodes bytes to text, and holds back the end where a character or a stop string may be incomplete.

    Args:
        stop: strings that end the text and are not part of it.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stops = _stops(stop)
        # A model may emit invalid UTF-8, which becomes replacement characters.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held, self._state = "", 0  # text held back, and the automaton's state after it
        self.met: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.met is not None

    def push(self, data: bytes) -> str:
        """Add the bytes of a token; returns the text that is certain now."""
        return self._take(self._decoder.decode(data))

    def finish(self, *, cut: bool = False) -> str:
        """The rest of the text, after the last token.

        Args:
            cut: whether the text was cut off, so that an incomplete character is dropped, not replaced.
        """
        text = self._take("" if cut else self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        begin = None
        for end, character in enumerate(text, len(self._held) + 1):
            self._state = self._stops.after(self._state, character)
            length = self._stops.longest[self._state]
            if length and (begin is None or end - length < begin):  # the leftmost; at the same place the shortest
                begin, stop_end = end - length, end
        self._held += text
        if begin is not None:
            self.met = self._held[begin:stop_end]
            return self._held[:begin]
        certain = len(self._held) - self._stops.depth[self._state]
        text, self._held = self._held[:certain], self._held[certain:]
        return text


class _Stops:
    """Finds strings in a stream of characters by the automaton of Aho and Corasick. Its state is the longest suffix of
    the text that is a prefix of a string.

    depth: by state, the length of that suffix; longest: by state, that of the longest string that it ends with, or 0.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: dict[int, int] = {}  # by state and character
        self._shorter = array("i", [0])  # by state, the state of its longest proper suffix (failure link)
        self.depth, self.longest = array("i", [0]), array("i", [0])
        states = dict.fromkeys(strings, 0)
        for depth in range(1, max(map(len, strings), default=0) + 1):
            states = {string: state for string, state in states.items() if len(string) >= depth}
            for string, before in states.items():
                key = before << 21 | ord(string[depth - 1])
                if key not in self._next:
                    shorter = self.after(self._shorter[before], string[depth - 1]) if before else 0
                    self._next[key] = len(self.depth)
                    self._shorter.append(shorter)
                    self.depth.append(depth)
                    self.longest.append(self.longest[shorter])
                states[string] = state = self._next[key]
                if len(string) == depth:
                    self.longest[state] = depth

    def after(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (found := self._next.get(state << 21 | ord(character))) is None and state:
            state = self._shorter[state]
        return found or 0


_stops = lru_cache(8)(_Stops)  # shared by the sequences of one request
