"""Estimates a trigram with backoff from text: discounted counts of the likeliest words of every context.

Katz, "Estimation of probabilities from sparse data for the language model component of a speech recognizer", 1987.
An order's n-grams are packed into int64: context * vocab_size + word, where the context is packed likewise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LARGEST_VOCABULARY = 2**21 - 1  # three tokens pack into one int64
_DISCOUNT = 0.5  # taken from each count; predicts texts better than Katz's discounts by Good and Turing

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


class KatzTrigram(NamedTuple):
    """The likeliest words after every known context, the empty one first. Words that it was not seen with have the
    shorter context's probability times `backoffs`.

    contexts: int64[rows], ascending: 0, then v + 1 after v, then (u + 1) * (vocab_size + 1) + v + 1 after u, v.
    lengths: int64[rows], numbers of words, which are concatenated in tokens: int64[n] and probabilities: float64[n],
    descending in a row, ties to the lowest id. backoffs: float64[rows].
    """

    num_tokens: int
    contexts: _Ints
    lengths: _Ints
    tokens: _Ints
    probabilities: _Floats
    backoffs: _Floats


def estimate(
    documents: Iterable[NDArray[np.integer]], *, vocab_size: int, max_successors: int, min_count: int
) -> KatzTrigram:
    """Count n-grams inside each document, and keep the `max_successors` likeliest words after each context.

    Trigrams seen less than `min_count` times are dropped; their probability goes to the backoff.

    Raises:
        ValueError: there is no text, or it is outside the vocabulary.
    """
    text = _join(documents, vocab_size)
    none = np.zeros(0, np.int64)
    level = _Level(0, np.arange(vocab_size), np.full(vocab_size, 1 / vocab_size), none, none, np.zeros(0))
    found = []
    for order in (1, 2, 3):
        level = _discount(_pack(text, order, vocab_size), level, vocab_size, min_count if order == 3 else 1)
        older, newer = np.divmod(level.contexts, vocab_size)
        contexts = (older + (order == 3)) * (vocab_size + 1) + newer + (order > 1)
        words = level.best(vocab_size, max_successors)
        lengths, tokens = np.bincount(level.rows[words]), level.grams[words] % vocab_size
        found.append((contexts, lengths, tokens, level.probabilities[words], level.backoffs))
    return KatzTrigram(int(np.count_nonzero(text >= 0)), *map(np.concatenate, zip(*found, strict=True)))


@dataclass(frozen=True, slots=True)
class _Level:
    """The model of one order: P(word | context) of the kept n-grams, and the backoff factors of the contexts.

    grams: int64[n], ascending; probabilities: float64[n]; rows: int64[n], the context of each.
    contexts: int64[c], ascending; backoffs: float64[c].
    """

    order: int
    grams: _Ints
    probabilities: _Floats
    rows: _Ints
    contexts: _Ints
    backoffs: _Floats

    def best(self, vocab_size: int, most: int) -> _Ints:
        """Indices of the likeliest words of each context, at most so many of each."""
        order = np.lexsort((self.grams % vocab_size, -self.probabilities, self.rows))
        rank = np.arange(len(order)) - np.searchsorted(self.rows, self.rows)
        return order[rank < most]


def _join(documents: Iterable[NDArray[np.integer]], vocab_size: int) -> NDArray[np.int32]:
    """The documents, each of them followed by -1, and -1."""
    parts = [part for part in map(np.asarray, documents) if part.size]
    if not parts:
        raise ValueError("there is no text to count")
    for part in parts:
        if part.min() < 0 or part.max() >= vocab_size:
            raise ValueError(f"a document has a token id outside the vocabulary of {vocab_size}")
    return np.concatenate([*(np.append(part.astype(np.int32), -1) for part in parts), [-1]], dtype=np.int32)


def _pack(text: NDArray[np.int32], order: int, vocab_size: int) -> _Ints:
    """Pack every n-gram that lies inside a document into one number."""
    windows = np.lib.stride_tricks.sliding_window_view(text, order)
    packed: _Ints = windows[windows.min(axis=1) >= 0] @ vocab_size ** np.arange(order)[::-1]
    return packed


def _discount(text_grams: _Ints, shorter: _Level, vocab_size: int, min_count: int) -> _Level:
    """Discount the counts of one order, and give the freed probability to the words that were not kept."""
    grams, counts = np.unique(text_grams, return_counts=True)
    every_context, every_row = np.unique(grams // vocab_size, return_inverse=True)
    every_total = np.bincount(every_row, counts)
    kept = counts >= min_count
    grams, remaining = grams[kept], counts[kept] - _DISCOUNT
    contexts, rows = np.unique(grams // vocab_size, return_inverse=True)
    below = np.searchsorted(shorter.grams, grams % vocab_size ** max(shorter.order, 1))

    retained = np.bincount(rows, remaining, len(contexts))
    complete = np.bincount(rows, minlength=len(contexts)) == vocab_size
    totals = np.where(complete, retained, every_total[np.searchsorted(every_context, contexts)])
    unseen = np.where(complete, 1, 1 - np.bincount(rows, shorter.probabilities[below], len(contexts)))
    backoffs = np.where(complete, 0, (1 - retained / totals) / unseen)
    return _Level(shorter.order + 1, grams, remaining / totals[rows], rows, contexts, backoffs)
