"""Estimates a Katz-backoff trigram from text: the discounted counts, and the best words of every context.

Katz, "Estimation of probabilities from sparse data for the language model component of a speech recognizer", 1987.
An order's n-grams are packed into int64: context * vocab_size + word, where the context is packed likewise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_VOCABULARY = 2**21 - 1  # three tokens pack into one int64
_RELIABLE_COUNT = 5  # Katz's k: larger counts are not discounted

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KatzTrigram:
    """The head of the backed-off distribution of every known context, down to its last seen word.

    Words outside a head have the shorter context's probability times `backoffs`.

    older, newer: int64[rows], the context's tokens + 1, 0 for none; ascending, the empty context first.
    lengths: int64[rows], the sizes of the heads, which are concatenated in tokens: int64[n] and probabilities:
    float64[n], descending in a head, ties to the lowest id. backoffs: float64[rows].
    """

    num_tokens: int
    older: _Ints
    newer: _Ints
    lengths: _Ints
    tokens: _Ints
    probabilities: _Floats
    backoffs: _Floats


def estimate(
    documents: Iterable[NDArray[np.integer]], *, vocab_size: int, max_successors: int, min_count: int
) -> KatzTrigram:
    """Count n-grams inside each document and estimate the heads, of at most `max_successors` words each.

    Trigrams seen less than `min_count` times are dropped; their probability goes to the backoff.

    Raises:
        ValueError: there is no text, or a document is not integer[n] inside the vocabulary.
    """
    text, begins = _join(documents, vocab_size)
    uniform, zeros = np.full(vocab_size, 1 / vocab_size), np.zeros(vocab_size, np.int64)
    levels = [_Level(0, np.arange(vocab_size), uniform, zeros, zeros[:1], zeros[:1], np.zeros(1))]
    for order in (1, 2, 3):
        grams = _pack(text, begins, order, vocab_size)
        levels.append(_discount(grams, levels[-1], vocab_size, min_count if order == 3 else 1))
    heads = [_Heads(zeros, levels[0].grams, uniform, np.ones(vocab_size, np.bool_))]
    for level, widths in zip(levels[1:], _widths(levels, vocab_size, max_successors), strict=True):
        heads.append(_rank(level, heads[-1], widths, vocab_size, max_successors))
    heads[1].stored[:max_successors] = True  # unigrams have no shorter context to back off to
    return KatzTrigram(
        num_tokens=len(text),
        older=np.concatenate([level.contexts // vocab_size + (level.order == 3) for level in levels[1:]]),
        newer=np.concatenate([level.contexts % vocab_size + (level.order > 1) for level in levels[1:]]),
        lengths=np.concatenate([np.bincount(head.rows[head.stored]) for head in heads[1:]]),
        tokens=np.concatenate([head.tokens[head.stored] for head in heads[1:]]),
        probabilities=np.concatenate([head.probabilities[head.stored] for head in heads[1:]]),
        backoffs=np.concatenate([level.backoffs for level in levels[1:]]),
    )


@dataclass(frozen=True, slots=True)
class _Level:
    """The Katz model of one order: P(word | context) of the kept n-grams, and the backoff factors of the contexts.

    grams: int64[n], ascending; probabilities: float64[n]; rows: int64[n], the context of each.
    contexts: int64[c], ascending; above: int64[c], the row of the shorter context; backoffs: float64[c].
    """

    order: int
    grams: _Ints
    probabilities: _Floats
    rows: _Ints
    contexts: _Ints
    above: _Ints
    backoffs: _Floats

    def find(self, grams: _Ints) -> tuple[_Ints, NDArray[np.bool_]]:
        """Indices of n-grams, and whether they were kept."""
        found = np.minimum(np.searchsorted(self.grams, grams), len(self.grams) - 1)
        return found, self.grams[found] == grams


@dataclass(frozen=True, slots=True)
class _Heads:
    """The most probable words of each context of a level, one context after another, backed-off words included.

    rows: int64[n], the context; tokens: int64[n]; probabilities: float64[n], descending in a row;
    stored: bool[n], the words for the table.
    """

    rows: _Ints
    tokens: _Ints
    probabilities: _Floats
    stored: NDArray[np.bool_]


def _join(documents: Iterable[NDArray[np.integer]], vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Concatenate the documents, and flag the first token of each."""
    parts = [part for part in map(np.asarray, documents) if part.size]
    if not parts:
        raise ValueError("there is no text to count")
    for part in parts:
        if part.ndim != 1 or part.dtype.kind not in "iu":
            raise ValueError(f"a document must be integer[n], not {part.dtype}{list(part.shape)}")
        if part.min() < 0 or part.max() >= vocab_size:
            raise ValueError(f"a document has a token id outside the vocabulary of {vocab_size}")
    begins = np.zeros(sum(map(len, parts)), np.bool_)
    begins[np.cumsum([0, *map(len, parts[:-1])])] = True
    return np.concatenate(parts, dtype=np.int32), begins


def _pack(text: NDArray[np.int32], begins: NDArray[np.bool_], order: int, vocab_size: int) -> _Ints:
    """Pack every n-gram that lies inside a document into one number."""
    count = max(len(text) - order + 1, 0)
    grams = np.zeros(count, np.int64)
    inside = np.ones(count, np.bool_)
    for shift in range(order):
        grams = grams * vocab_size + text[shift : shift + count]
        if shift:
            inside &= ~begins[shift : shift + count]
    return grams[inside]


def _shares(counts: _Ints) -> _Floats:
    """The share of a count r that its n-gram keeps, by min(r, 6): Good-Turing for r <= 5 (Katz 1987), else 1.

    Where the counts of counts are too irregular for Good-Turing, half a count is subtracted instead.
    """
    limit = _RELIABLE_COUNT
    occurring = np.bincount(np.minimum(counts, limit + 2), minlength=limit + 3).astype(np.float64)
    r = np.arange(1, limit + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        common = (limit + 1) * occurring[limit + 1] / occurring[1]
        turing = ((r + 1) * occurring[r + 1] / (r * occurring[r]) - common) / (1 - common)
    return np.concatenate(([1], np.where((turing > 0) & (turing < 1), turing, 1 - 0.5 / r), [1]))


def _discount(text_grams: _Ints, shorter: _Level, vocab_size: int, min_count: int) -> _Level:
    """Discount the counts of one order, and give the freed probability to the words that were not kept."""
    grams, counts = np.unique(text_grams, return_counts=True)
    every_context, every_row = np.unique(grams // vocab_size, return_inverse=True)
    every_total = np.bincount(every_row, counts)
    kept = counts >= min_count
    remaining = (counts * _shares(counts)[np.minimum(counts, _RELIABLE_COUNT + 1)])[kept]
    grams = grams[kept]
    contexts, rows = np.unique(grams // vocab_size, return_inverse=True)
    above = np.searchsorted(shorter.contexts, contexts % vocab_size ** max(shorter.order - 1, 0))
    below, _ = shorter.find(grams % vocab_size ** max(shorter.order, 1))

    retained = np.bincount(rows, remaining, len(contexts))
    complete = np.bincount(rows, minlength=len(contexts)) == vocab_size
    totals = every_total[np.searchsorted(every_context, contexts)]
    # If nothing is freed, the total gets one more count, so that no word is impossible (SRILM does this too).
    totals = np.where(complete, retained, totals + (retained >= totals))
    unseen = np.where(complete, 1, 1 - np.bincount(rows, shorter.probabilities[below], len(contexts)))
    backoffs = np.where(complete, 0, (1 - retained / totals) / unseen)
    return _Level(shorter.order + 1, grams, remaining / totals[rows], rows, contexts, above, backoffs)


def _widths(levels: list[_Level], vocab_size: int, max_successors: int) -> tuple[_Ints, _Ints, _Ints]:
    """Number of words to rank in each context of orders 1, 2 and 3, enough for the longer contexts.

    All words that a context has seen may be among the best of the shorter one, so it needs that many more from there.
    """
    _, _, bigrams, trigrams = levels
    pairs = np.full(len(trigrams.contexts), max_successors)
    singles = np.full(len(bigrams.contexts), max_successors)
    np.maximum.at(singles, trigrams.above, pairs + np.bincount(trigrams.rows, minlength=len(pairs)))
    return np.array([vocab_size]), singles, pairs


def _rank(level: _Level, above: _Heads, widths: _Ints, vocab_size: int, max_successors: int) -> _Heads:
    """Merge the seen words of each context with the backed-off head of the shorter context."""
    begins, ends = (np.searchsorted(above.rows, level.above, side) for side in ("left", "right"))
    lengths = np.minimum(ends - begins, widths + np.bincount(level.rows, minlength=len(widths)))
    backed_rows, index = _ranges(begins, lengths)
    _, is_kept = level.find(level.contexts[backed_rows] * vocab_size + above.tokens[index])
    backed_rows, index = backed_rows[~is_kept], index[~is_kept]

    rows = np.concatenate((level.rows, backed_rows))
    tokens = np.concatenate((level.grams % vocab_size, above.tokens[index]))
    backed = level.backoffs[backed_rows] * above.probabilities[index]
    probabilities = np.concatenate((level.probabilities, backed))
    best = np.lexsort((tokens, -probabilities, rows))
    rows = rows[best]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    is_seen = best < len(level.rows)
    last_seen = np.zeros(len(widths), np.int64)
    np.maximum.at(last_seen, rows[is_seen], rank[is_seen])
    stored = (rank < max_successors) & (rank <= last_seen[rows])
    wanted = rank < widths[rows]
    best = best[wanted]
    return _Heads(rows[wanted], tokens[best], probabilities[best], stored[wanted])


def _ranges(begins: _Ints, lengths: _Ints) -> tuple[_Ints, _Ints]:
    """Concatenate ranges begin, begin + 1, ...: the range's number, and the value, of each element."""
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    return numbers, np.arange(len(numbers)) + (begins - np.cumsum(lengths) + lengths)[numbers]
