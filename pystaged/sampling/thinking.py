"""A model's reasoning as a constraint: its budget of tokens, and a grammar that begins after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pystaged._core import Tokenizer
from pystaged.sampling.constraint import Constraint, Mask


@dataclass(frozen=True)
class Reasoning:
    """How an answer reasons.

    begin, end: the marks around reasoning. closing: the tokens that are written when the budget is spent; they contain
    the end mark. is_open: whether the prompt ends inside of reasoning. budget: maximum tokens of it, None for no limit.
    """

    begin: bytes
    end: bytes
    closing: tuple[int, ...]
    is_open: bool
    budget: int | None


@dataclass(frozen=True)
class _Place:
    """A place in the answer. length: tokens of reasoning so far. closed: how many of the closing tokens are written.
    tail: the bytes that may have begun a mark. phase: before reasoning, inside, closing, or after it."""

    phase: str
    length: int = 0
    closed: int = 0
    tail: bytes = b""


class ReasoningConstraint:
    """Limits reasoning, and leaves what follows it to another constraint.

    begins: number of tokens before those that the other constraint limits; None while none is.

    Args:
        after: constraint of the tokens after the reasoning, None for none. Without an open reasoning it holds from the
            first token on.
    """

    def __init__(self, reasoning: Reasoning, after: Constraint | None, tokenizer: Tokenizer) -> None:
        self._reasoning, self._after, self._tokenizer = reasoning, after, tokenizer
        self._ends = frozenset(tokenizer.end_tokens.tolist())
        phase = "inside" if reasoning.is_open else "before" if after is None else "after"
        self._place = self._settled(_Place(phase))
        self.begins: int | None = 0 if phase == "after" else None
        self._length = 0
        self._all, self._unended = _mask(tokenizer.num_tokens), _mask(tokenizer.num_tokens, self._ends)

    @property
    def is_complete(self) -> bool:
        return self._place.phase == "after" and self._after is not None and self._after.is_complete

    def forced(self) -> list[int]:
        if self._place.phase == "closing":
            return list(self._reasoning.closing[self._place.closed :])
        return self._after.forced() if self._place.phase == "after" and self._after is not None else []

    def mask(self, path: Sequence[int]) -> Mask | None:
        place, rest = self._follow(path)
        if path and path[-1] in self._ends and (self._after is None or place.phase != "after"):
            return None
        if place.phase == "closing":
            return _only(self._reasoning.closing[place.closed], self._all)
        if self._after is None:
            return self._all
        if place.phase != "after":
            return self._unended
        mask = self._after.mask(rest)
        words = len(self._all)  # of a mask with fewer, those that are missing forbid their tokens
        return None if mask is None else np.pad(mask[:words], (0, max(0, words - len(mask))))

    def advance(self, tokens: Sequence[int]) -> None:
        self._place, rest = self._follow(tokens)
        self._length += len(tokens)
        if self._after is not None:
            if self.begins is None and self._place.phase == "after":
                self.begins = self._length - len(rest)
            if rest:
                self._after.advance(rest)

    def _follow(self, path: Sequence[int]) -> tuple[_Place, list[int]]:
        """The place after a path, and the part of the path that is after the reasoning."""
        place = self._place
        for i, token in enumerate(path):
            if place.phase == "after":
                return place, list(path[i:])
            place = self._settled(self._next(place, token))
        return place, []

    def _next(self, place: _Place, token: int) -> _Place:
        reasoning = self._reasoning
        if place.phase == "closing":
            closed = place.closed + 1
            return replace(place, closed=closed) if closed < len(reasoning.closing) else _Place("after")
        tail = place.tail + self._tokenizer.token_bytes(token, special=True)
        if place.phase == "before":
            words = tail.lstrip()
            if words.startswith(reasoning.begin):
                return _Place("inside")
            return replace(place, tail=tail) if reasoning.begin.startswith(words) else _Place("after")
        if reasoning.end in tail:
            return _Place("after")
        return replace(place, length=place.length + 1, tail=tail[1 - len(reasoning.end) :])

    def _settled(self, place: _Place) -> _Place:
        budget = self._reasoning.budget
        spent = place.phase == "inside" and budget is not None and place.length >= budget
        return _Place("closing") if spent else place


def _mask(num_tokens: int, without: Iterable[int] = ()) -> Mask:
    """A mask of all tokens but some."""
    bits = np.zeros(-(-num_tokens // 32) * 32, np.uint8)
    bits[:num_tokens] = 1
    bits[list(without)] = 0
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _only(token: int, like: Mask) -> Mask:
    """A mask of one token."""
    mask = np.zeros_like(like)
    mask[token >> 5] = 1 << (token & 31)
    return mask
