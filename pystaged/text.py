"""Between texts and tokens: bytes to text that can be shown as it comes, and texts that go on."""

from __future__ import annotations

import codecs

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Tokenizer


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
        self._stop = stop
        # A model may write invalid UTF-8; then, as in a terminal, a replacement character stands for it.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.met: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.met is not None

    def push(self, data: bytes) -> str:
        """Take the bytes of a token; returns the text that is now certain."""
        self._held += self._decoder.decode(data)
        return self._release(final=False)

    def finish(self, *, cut: bool = False) -> str:
        """The rest, when no more tokens come.

        Args:
            cut: the model would have gone on: the beginning of a character is no part of the text.
        """
        if not self.stopped and not cut:
            self._held += self._decoder.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        if self.stopped:
            return ""
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.met = min(found)
            return self._held[:at]
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        end = len(self._held) - keep
        text, self._held = self._held[:end], self._held[end:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
