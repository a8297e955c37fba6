"""Proposers that look tokens up: n-grams of the text, an n-gram table, and recycled candidates of the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from pystaged._core import RecycledCandidates
from pystaged.drafting.calibration import CONTEXT, RECYCLED, TABLE
from pystaged.drafting.proposer import Proposal, Proposer
from pystaged.drafting.table import NgramTable

TAIL = 16  # last tokens of a text on which a lookup depends
_LONGEST = 4  # tokens of the longest n-gram of the text that is looked up
_LONGER = (TAIL, 8)  # where the last 4 tokens match, these lengths are also tried
_WINDOW = 32  # most recent occurrences that a lookup counts, to bound its time
_CANDIDATES = 8  # per node, of the text's n-grams and of the table
_KEPT_LOOKUPS = 1024  # cached lookups of a table, which repeat often
# Processor seconds on a laptop: of a lookup with the Python around it, refined while running; of reading a token.
LOOKUP_SECONDS, READ_SECONDS = 5e-5, 2e-6


class Lookup(Proposer):
    """A proposer that depends on the last tokens alone.

    recycled: the candidates that it looks up and that learn from the target's rows, or None.
    """

    recycled: RecycledCandidates | None = None

    def after(self, tail: list[int]) -> Proposal:
        """Propose tokens after a text whose last tokens are `tail`."""
        raise NotImplementedError


class RecycledProposer(Lookup):
    """Proposes the target's own candidates after the same tokens in earlier passes, of all texts."""

    def __init__(self, recycled: RecycledCandidates) -> None:
        self.recycled, self._chances = recycled, recycled.chances

    def after(self, tail: list[int]) -> Proposal:
        chances, known = self._chances(tail[-2] if len(tail) > 1 else -1, tail[-1])
        return Proposal(chances, RECYCLED[known])


class TableProposer(Lookup):
    """Proposes by a trigram with backoff, counted on the draft's text (Spector & Ré 2023)."""

    def __init__(self, table: NgramTable) -> None:
        self._after = lru_cache(_KEPT_LOOKUPS)(lambda *last: table.after(last, _CANDIDATES))

    def after(self, tail: list[int]) -> Proposal:
        return Proposal(self._after(*tail[-2:]), TABLE)


class ContextProposer(Lookup):
    """Proposes the tokens that followed the longest n-gram, of 1, 2, 3, 4, 8 or 16 tokens, that ends the text and
    occurred before in it or in its prediction."""

    def __init__(self) -> None:
        self._tokens: list[int] = []  # of the prediction, then of the text
        self._num_read = 0  # those whose n-grams are known
        self._followers: dict[tuple[int, ...], list[int]] = {}  # positions after each n-gram of 1 to 4 tokens

    def start(self, context: NDArray[np.int32], prediction: Sequence[int]) -> None:
        self._tokens, self._num_read, self._followers = [*prediction, *context.tolist()], 0, {}

    def advance(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def end(self) -> None:
        self._tokens, self._num_read, self._followers = [], 0, {}

    @property
    def is_ready(self) -> bool:
        return self._num_read == len(self._tokens)

    def lag(self) -> float:
        return READ_SECONDS * (len(self._tokens) - self._num_read)

    def catch_up(self, seconds: float = math.inf) -> None:
        first, tokens = self._num_read, self._tokens
        self._num_read = int(min(len(tokens), first + max(0.0, seconds / READ_SECONDS)))
        for position in range(first, self._num_read):
            last = tuple(tokens[max(0, position - _LONGEST) : position])
            for i in range(len(last)):
                self._followers.setdefault(last[i:], []).append(position)

    def after(self, tail: list[int]) -> Proposal:
        """At most 8 tokens, the most frequent first, then the most recent, each with count / (occurrences + 1) among
        the 32 most recent occurrences of the last 4 tokens."""
        last, positions, order = tuple(tail[-_LONGEST:]), list[int](), 0
        while last and not positions:
            positions, order = self._followers.get(last, [])[-_WINDOW:], len(last)
            last = last[1:]
        if not positions:
            return Proposal({}, CONTEXT[0])
        for length in _LONGER if order == _LONGEST else ():
            end = tail[-length:]
            longer = [position for position in positions if self._tokens[max(0, position - length) : position] == end]
            if longer and len(end) == length:
                positions, order = longer, length
                break
        counts: dict[int, int] = {}
        for position in reversed(positions):
            token = self._tokens[position]
            counts[token] = counts.get(token, 0) + 1
        best = sorted(counts.items(), key=itemgetter(1), reverse=True) if len(counts) > 1 else counts.items()
        chances = {token: count / (len(positions) + 1) for token, count in islice(best, _CANDIDATES)}
        return Proposal(chances, CONTEXT[order])


def lookups(table: NgramTable | None = None, recycled: RecycledCandidates | None = None) -> list[Lookup]:
    """The lookups in the order of mixing: those that are given, and n-grams of the text."""
    return [
        *([RecycledProposer(recycled)] if recycled else []),
        *([TableProposer(table)] if table else []),
        ContextProposer(),
    ]
