"""Text that arrives in pieces, read by parsers: generators that yield events, and None where they need more text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Literal, TypeVar

Kind = Literal["text", "reasoning", "call", "arguments", "end"]
Event = tuple[Kind, str]
"""A kind with its text: a part of the answer's text or reasoning; the name of a called tool; a part of the call's
arguments, which are JSON; the end of a call."""
_T = TypeVar("_T")
Parser = Generator[Event | None, None, _T]


class Source:
    """The text that has arrived and is not read yet.

    ended: whether no more will arrive. is_cut: whether that was not the model's will; what may then begin a mark in or
    behind a call does. has_cut: whether a call was cut behind its name. trimmed: the white space that `until` left out
    last.
    """

    def __init__(self) -> None:
        self.text = self.trimmed = ""
        self.ended = self.is_cut = self.has_cut = False

    def take(self, count: int) -> str:
        """Read characters."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def more(self, *, drops: bool = False) -> Parser[bool]:
        """Wait for more text; returns whether there may be some. drops: what is there is nothing if it was cut."""
        if self.ended:
            self.text = "" if drops and self.is_cut else self.text
            return False
        yield None
        return True

    def space(self) -> Parser[str]:
        """Read white space; returns it."""
        found: list[str] = []
        while True:
            words = self.text.lstrip()
            found.append(self.take(len(self.text) - len(words)))
            if self.text or not (yield from self.more()):
                return "".join(found)

    def starts(self, *marks: str, drops: bool = True) -> Parser[bool]:
        """Whether one of some marks comes next. drops: a mark that is cut is nothing."""
        while not self.text.startswith(marks):
            is_begun = any(mark.startswith(self.text) for mark in marks)
            if not is_begun or not (yield from self.more(drops=drops)):
                return False
        return True

    def takes(self, mark: str) -> Parser[bool]:
        """Read a mark if it comes next; returns whether it did."""
        if not (yield from self.starts(mark)):
            return False
        self.take(len(mark))
        return True

    def until(
        self,
        marks: Sequence[str],
        kind: Kind,
        spelled: Callable[[str], str] = str,
        *,
        trims: bool = False,
        drops: bool = False,
        then: Sequence[str] = (),
    ) -> Parser[str]:
        """Pass on the text before the first of some marks, and read that mark; returns it, or "" at the end.

        Args:
            kind: of the events.
            spelled: converts each part of the text.
            trims: leave out white space at the end.
            drops: leave out a mark that is cut, as always in arguments.
            then: texts, one of which must follow a mark after white space, unless all text ends there; another mark is
                text.
        """
        held: list[str] = []  # white space
        while True:
            found = min(((at, mark) for mark in marks if (at := self.text.find(mark)) >= 0), default=None)
            certain = found[0] if found else len(self.text) - self._begun(marks)
            words = self.take(certain)
            if trims:
                kept = words.rstrip()
                space, words = words[len(kept) :], ""
                if kept:
                    words = "".join([*held, kept])
                    held.clear()
                held.append(space)
            if words:
                yield kind, spelled(words)
            if found:
                self.trimmed, mark = "".join(held), self.take(len(found[1]))
                if not then:
                    return mark
                space = yield from self.space()
                is_end = (yield from self.starts(*then)) or not self.text
                self.text = space + self.text
                if is_end:
                    return mark
                yield kind, spelled(mark)
                continue
            if not (yield from self.more()):
                begun = self.take(len(self.text))
                if (rest := "".join([*held, begun])) and not (begun and self.is_cut and (drops or kind == "arguments")):
                    yield kind, spelled(rest)
                return ""

    def collected(self, marks: Sequence[str], then: Sequence[str] = ()) -> Parser[tuple[str, str]]:
        """Read the text before the first of some marks, and that mark; returns both, with "" for no mark. then: as in
        `until`."""
        words: list[str] = []
        parser = self.until(marks, "text", drops=True, then=then)
        while True:
            try:
                event = next(parser)
            except StopIteration as done:
                return "".join(words), done.value
            if event is None:
                yield None
            else:
                words.append(event[1])

    def _begun(self, marks: Sequence[str]) -> int:
        """The number of characters at the end that may begin a mark."""
        longest = min(len(self.text), max(map(len, marks), default=1) - 1)
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if any(mark.startswith(self.text[-size:]) for mark in marks)), 0)
