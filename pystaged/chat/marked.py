"""Strings that record where each of their characters comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

TEMPLATE = "\0"  # mark of what the template itself writes
MESSAGE = "\1"  # mark of what comes from messages, tools and options
ANSWERS = 2  # code of the first answer's mark


class Marked(str):
    """A string with a mark for each of its characters.

    Methods that cut a string keep the marks. Methods that build a new string return a plain `str`, which the caller
    marks as a whole.

    Args:
        text: any.
        marks: one character for each of the text: TEMPLATE, MESSAGE or an answer's mark.
    """

    __slots__ = ("marks",)
    marks: str

    def __new__(cls, text: str, marks: str) -> Marked:
        made = super().__new__(cls, text)
        made.marks = marks
        return made

    def __reduce__(self) -> tuple[type[Marked], tuple[str, str]]:
        return Marked, (str.__str__(self), self.marks)

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> Marked:
        return Marked(super().__getitem__(key), self.marks[key])

    def __iter__(self) -> Iterator[str]:
        return map(Marked, super().__iter__(), self.marks)

    def lstrip(self, chars: str | None = None, /) -> Marked:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Marked:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> Marked:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> Marked:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Marked:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines, at = [], 0
        for whole, line in zip(super().splitlines(True), super().splitlines(keepends), strict=True):
            lines.append(self[at : at + len(line)])
            at += len(whole)
        return list(lines)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(super().partition(sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(super().rpartition(sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        # An empty `old` inserts `new` between all characters.
        return join(new, self.split(old, count)) if old else super().replace(old, new, count)

    def _cut(self, pieces: Sequence[str], separator: str | None) -> list[str]:
        found: list[str] = []
        at = 0
        for piece in pieces:
            if separator is None:  # only the first piece may begin with white space
                at = self.find(piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + len(separator or "")
        return found

    def _three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        return self[:first], self[first:second], self[second:]


def marks_of(text: str) -> str:
    """The marks of a string; all TEMPLATE for a plain one."""
    return text.marks if isinstance(text, Marked) else TEMPLATE * len(text)


def join(separator: str, parts: Iterable[str]) -> str:
    """`separator.join(parts)`, keeping marks."""
    parts = list(parts)
    text = separator.join(parts)
    if not any(isinstance(part, Marked) for part in (separator, *parts)):
        return text
    return Marked(text, marks_of(separator).join(map(marks_of, parts)))


def mark(value: Any, with_mark: str = MESSAGE) -> Any:
    """Copy plain data with all its strings marked, including dictionary keys; those that have marks keep them.

    Raises:
        TypeError: a value has no form in JSON.
    """
    if isinstance(value, Marked):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        return Marked(text, with_mark * len(text))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {mark(key, with_mark): mark(each, with_mark) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [mark(each, with_mark) for each in value]
    raise TypeError(f"strings, numbers, lists and dictionaries are allowed, not {type(value).__name__}")
