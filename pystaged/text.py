"""Between texts and tokens: bytes to text that can be shown as it comes, and texts that go on."""

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
    """The tokens of a text that goes on with another, int32[n]: without what comes before texts, and without the space
    that SentencePiece puts there. Errors as in Tokenizer.encode."""
    tokens = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    if text and tokenizer.decode(tokens, special=True) == f" {text}":
        begun = tokenizer.encode("\n", add_special=False)
        more = tokenizer.encode(f"\n{text}", add_special=False, parse_special=parse_special)
        if (more[: len(begun)] == begun).all():
            return more[len(begun) :]
    return tokens


class TextBuffer:
    """Text so far, held back where a character or a stop string may still be incomplete.

    Args:
        stop: strings that end the text; they do not become part of it.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stops = _stops(stop)
        # A model may write invalid UTF-8; then, as in a terminal, a replacement character stands for it.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held, self._state = "", 0  # of the stop strings, after what is held
        self.met: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.met is not None

    def push(self, data: bytes) -> str:
        """Take the bytes of a token; returns the text that is now certain."""
        return self._take(self._decoder.decode(data))

    def finish(self, *, cut: bool = False) -> str:
        """The rest, when no more tokens come.

        Args:
            cut: the model would have gone on: the beginning of a character is no part of the text.
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
            if length and (begin is None or end - length < begin):  # of two that begin together the shorter one
                begin, stop_end = end - length, end
        self._held += text
        if begin is not None:
            self.met = self._held[begin:stop_end]
            return self._held[:begin]
        certain = len(self._held) - self._stops.depth[self._state]
        text, self._held = self._held[:certain], self._held[certain:]
        return text


class _Stops:
    """Finds strings in a text as it comes, by the automaton of Aho and Corasick: its state is the longest end of the
    text with which a string begins.

    depth, longest: by state, the length of that end, and of the longest string that it ends with, 0 for none.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: dict[int, int] = {}  # by state and character
        self._shorter = array("i", [0])  # by state, that of its longest end with which a string begins
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


_stops = lru_cache(8)(_Stops)  # texts of one request share theirs
