"""Proposers that look tokens up: n-grams of the sequence, an n-gram table, and recycled candidates of the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pystaged._core import RecycledCandidates
from pystaged.decoding.cost import PassCost
from pystaged.drafting.calibration import CONTEXT, RECYCLED, TABLE
from pystaged.drafting.context import ContextNgrams
from pystaged.drafting.proposer import Proposal, Proposer
from pystaged.drafting.table import NgramTable

_CANDIDATES = 8  # per node, of the sequence's n-grams and of the table
_KEPT_LOOKUPS = 1024  # cached lookups of a table, which repeat often
_TIMED_TEXT = 64  # fewest tokens whose reading takes long enough to be timed


class Lookup(Proposer):
    """A proposer that depends on the last tokens alone."""

    def after(self, tail: list[int]) -> Proposal:
        """Propose tokens after a sequence whose last tokens are `tail`."""
        raise NotImplementedError


class RecycledProposer(Lookup):
    """Proposes the target's own candidates after the same tokens in earlier passes, of all sequences."""

    recycled: RecycledCandidates

    def __init__(self, recycled: RecycledCandidates) -> None:
        self.recycled = recycled

    def after(self, tail: list[int]) -> Proposal:
        chances, known = self.recycled.chances(tail[-2] if len(tail) > 1 else -1, tail[-1])
        return Proposal(chances, RECYCLED[known])


class TableProposer(Lookup):
    """Proposes by a Katz trigram counted on the draft's text (Spector & Ré 2023)."""

    def __init__(self, table: NgramTable) -> None:
        self._vocab_size = table.vocab_size
        k = min(_CANDIDATES, table.max_successors)

        @lru_cache(_KEPT_LOOKUPS)
        def look_up(*last: int) -> dict[int, float]:
            tokens, logprobs = table.candidates(last, k)
            return dict(zip(tokens.tolist(), np.exp(logprobs).tolist(), strict=True))

        self._look_up = look_up

    def after(self, tail: list[int]) -> Proposal:
        last = tail[-2:]
        return Proposal(self._look_up(*last) if max(last) < self._vocab_size else {}, TABLE)


class ContextProposer(Lookup):
    """Proposes the tokens that followed the longest matching n-gram in the sequence or its prediction.

    Args:
        read: processor seconds to read a number of tokens, refined here; None counts 0.
    """

    def __init__(self, read: PassCost | None = None) -> None:
        self._read = read
        self._grams = ContextNgrams()
        self._text: list[int] = []  # the prediction, then the sequence

    def start(self, context: NDArray[np.int32], prediction: Sequence[int]) -> None:
        self._text = [*prediction, *context.tolist()]
        self._grams = ContextNgrams()

    def advance(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    def end(self) -> None:
        self._text, self._grams = [], ContextNgrams()

    @property
    def is_ready(self) -> bool:
        return self._unread == 0

    def lag(self) -> float:
        unread = self._unread
        return self._read(unread) if self._read and unread else 0.0

    def catch_up(self, seconds: float = math.inf) -> None:
        known, unread = len(self._grams), self._unread
        if self._read and seconds < math.inf:
            unread = min(unread, int(seconds / self._read(1)))
        begin = self.meter()
        self._grams.extend(self._text[known : known + max(0, unread)])
        if self._read and unread >= _TIMED_TEXT:
            self._read.observe(unread, 0, self.meter() - begin)

    def after(self, tail: list[int]) -> Proposal:
        chances, order = self._grams.chances(tail, _CANDIDATES)
        return Proposal(chances, CONTEXT[order])

    @property
    def _unread(self) -> int:
        """Number of tokens whose n-grams are not known yet."""
        return len(self._text) - len(self._grams)


@dataclass(frozen=True, slots=True)
class NgramCost:
    """Processor seconds of lookups by number of nodes, with the Python around them, and of reading by number of tokens.

    The initial values are those of a laptop; they are refined while running.
    """

    lookup: PassCost = field(default_factory=lambda: PassCost({1: 5e-5}))
    read: PassCost = field(default_factory=lambda: PassCost({1: 2e-6}))


def lookups(
    table: NgramTable | None = None, recycled: RecycledCandidates | None = None, cost: NgramCost | None = None
) -> list[Lookup]:
    """The lookups in the order of mixing: those whose source is not None, and n-grams of the sequence. Without a cost,
    the time of reading tokens counts 0."""
    return [
        *([RecycledProposer(recycled)] if recycled else []),
        *([TableProposer(table)] if table else []),
        ContextProposer(cost.read if cost else None),
    ]
