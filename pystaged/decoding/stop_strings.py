"""Decodes the bytes of tokens to text, and ends it at a stop string."""

from __future__ import annotations

import codecs
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pystaged.chat.turn import Block, TurnReader


class TextBuffer:
    """Decodes bytes to text, and holds back the end where a character or a stop string may be incomplete.

    Args:
        stop: strings that end the text and are not part of it.
        reader: of an answer; only what it tells as text is searched for `stop` then, not reasoning or calls.
        ends: strings that end the text wherever they stand.
    """

    def __init__(
        self, stop: tuple[str, ...] = (), reader: TurnReader | None = None, ends: tuple[str, ...] = ()
    ) -> None:
        self._anywhere = _Finder(ends if reader else (*stop, *ends))
        self._shown, self._reader = _Finder(stop if reader else ()), reader
        # A model may emit invalid UTF-8, which becomes replacement characters.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held, self._begin = "", 0  # text held back, and the number of characters before it
        self._read, self._block = 0, -1  # characters that the reader has told of, and its last block
        self.met: str | None = None  # the stop string that ended the text

    def push(self, data: bytes) -> str:
        """Add the bytes of a token; returns the text that is certain now."""
        return self._take(self._decoder.decode(data))

    def finish(self, *, cut: bool = False) -> str:
        """The rest of the text, after the last token.

        Args:
            cut: whether the text was cut off, so that an incomplete character is dropped, not replaced.
        """
        text = self._take("" if cut else self._decoder.decode(b"", final=True), ended=True, cut=cut)
        if self.met is None:
            text, self._held = text + self._held, ""
        return text

    def _take(self, text: str, *, ended: bool = False, cut: bool = False) -> str:
        if self.met is not None:
            return ""
        found = [self._anywhere.find(text, self._begin + len(self._held))]
        self._held += text
        certain = self._anywhere.certain
        if self._reader:
            found += [self._find_shown(*told) for told in self._reader.placed(text, ended=ended, is_cut=cut)]
            certain = min(certain, self._shown.certain, self._read)
        if places := [place for place in found if place]:
            begin, end = min(places)
            text, self._held = self._held[: begin - self._begin], self._held[begin - self._begin :]
            if cut:  # a limit has ended it: the rest might have become a call
                self._held = ""
            else:
                self.met = self._held[: end - begin]
            return text
        text, self._held = self._held[: certain - self._begin], self._held[certain - self._begin :]
        self._begin = certain
        return text

    def _find_shown(self, block: Block, text: str, read: int) -> tuple[int, int] | None:
        """Search new text of a block, after which the reader has read so many characters."""
        if block.index != self._block:
            self._shown.restart()
            self._block = block.index
        if block.kind != "text":
            self._read = read
            return None
        # The reader may have read white space or a mark behind it.
        begin = self._begin + self._held.rfind(text, self._read - self._begin, read - self._begin)
        self._read = begin + len(text)
        return self._shown.find(text, begin)


class _Finder:
    """Finds strings in a text that comes in parts.

    certain: the number of characters of the text before the place where one of the strings may have begun.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._first, self._longest = {each[0] for each in strings}, max(map(len, strings), default=0)
        self.restart()

    def restart(self) -> None:
        """Forget what has begun."""
        self._begun, self.certain = "", sys.maxsize  # the longest end of the text that begins one of the strings

    def find(self, text: str, begin: int) -> tuple[int, int] | None:
        """Where the leftmost string begins and ends, at the same place the shortest, if one ends in a part.

        begin: the number of characters before the part.
        """
        text, begin, end = self._begun + text, begin - len(self._begun), begin + len(text)
        if self._first.isdisjoint(text):
            self._begun, self.certain = "", end
            return None
        found = [(begin + at, begin + at + len(each)) for each in self._strings if (at := text.find(each)) >= 0]
        self._begun = ""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if text[-length] in self._first and any(each.startswith(text[-length:]) for each in self._strings):
                self._begun = text[-length:]
                break
        self.certain = end - len(self._begun)
        return min(found, default=None)
