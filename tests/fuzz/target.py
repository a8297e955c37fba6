"""What is fuzzed: how its input is damaged, and how it is read."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One input.

    Args:
        words: what is wrong with it.
        size: bytes.
        use: reads it; raises one of the target's refusals where it is of no use.
    """

    words: str
    size: int
    use: Callable[[], object]


class Target(ABC):
    """Something that reads what it does not trust.

    Args:
        folder: for files; nobody else writes there. Its `path` is for the input.
    """

    refusals: tuple[type[Exception], ...] = (ValueError, OSError)

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "damaged"

    @abstractmethod
    def sound(self) -> Iterator[Case]:
        """Input that nothing is wrong with."""

    @abstractmethod
    def case(self, r: random.Random) -> Case:
        """A damaged input, drawn from `r` alone."""

    def use(self, data: Any, *how: Any) -> None:
        """Read an input."""
        raise NotImplementedError

    def of(self, words: str, data: bytes, *how: Any) -> Case:
        """A case of bytes that are used so."""
        return Case(words, len(data), partial(self.use, data, *how))


def short(data: bytes | str) -> str:
    """The beginning of what is too long to be shown."""
    return repr(data if len(data) <= 200 else data[:200])
