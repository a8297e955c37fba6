"""How much a template may do."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

_MOST_STEPS = 500_000  # blocks entered, operations and calls, each thousand characters of their results
_MOST_SECONDS = 10.0  # of processor time, for steps that take long
_NODE = 16  # characters that take as long as anything in a list


class TooMuchError(Exception):
    """A template takes too many steps, or writes too much."""


class Meter:
    """Counts the work of one rendering.

    Args:
        most_characters: of any text.
    """

    def __init__(self, most_characters: int) -> None:
        self._most_characters = most_characters
        self._steps = 0
        self._deadline = time.thread_time() + _MOST_SECONDS

    def charge(self, size: int = 0) -> None:
        """Take a step that makes something of that size. Raises TooMuchError."""
        self._steps += 1 + size // 1000
        if size > self._most_characters or self._steps > _MOST_STEPS or time.thread_time() > self._deadline:
            raise TooMuchError

    def gather(self, parts: Iterable[str], between: int = 0) -> list[str]:
        """Strings that will be joined, with so many characters between them. Raises TooMuchError."""
        taken: list[str] = []
        size = 0
        for part in parts:
            size += len(part) + between
            self.charge(len(part) + between)
            if size > self._most_characters:
                raise TooMuchError
            taken.append(part)
        return taken

    def measure(self, value: object) -> None:
        """Walk through all of a value before something else does: what holds a list twice is as large as its text.
        Raises TooMuchError."""
        waiting, size = [value], 0
        while waiting:
            each = waiting.pop()
            size += len(each) if isinstance(each, str) else _NODE
            if size > self._most_characters:
                raise TooMuchError
            if isinstance(each, Mapping):
                waiting += [*each, *each.values()]
            elif isinstance(each, Collection) and not isinstance(each, (str, bytes, range)):
                waiting += each
        self.charge(size)
