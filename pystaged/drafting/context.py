"""N-grams of the current sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_MAX_ORDER = 4  # tokens of the longest n-gram that is looked up
_LONGER = (16, 8)  # lengths of longer matches, which are sought among the occurrences of that
_WINDOW = 32  # most recent occurrences that a lookup counts, to bound its time


class ContextNgrams:
    """The n-grams of orders 1 to 4 of the committed tokens, and the positions of the tokens that followed them.

    The `tail` of a lookup is the committed tokens, perhaps followed by a guessed path; its last 16 tokens suffice.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        """Number of committed tokens."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Commit tokens, each in constant time."""
        for token in tokens:
            for gram in _suffixes(self._tokens):
                self._followers.setdefault(gram, []).append(len(self._tokens))
            self._tokens.append(int(token))

    def chances(self, tail: Sequence[int], k: int) -> tuple[dict[int, float], int]:
        """The tokens that followed the longest suffix of `tail` that occurred before, among those of 1, 2, 3, 4, 8 and
        16 tokens.

        Returns:
            at most k tokens, the most frequent first, then the most recent, each with count / (occurrences + 1) among
            the 32 most recent occurrences of the last 4 tokens; and the length of the suffix, 0 for no match.

        Raises:
            ValueError: k is below 1.
        """
        if k < 1:
            raise ValueError("k must be at least 1")
        gram = next((gram for gram in _suffixes(tail) if gram in self._followers), ())
        positions, order = self._followers[gram][-_WINDOW:] if gram else [], len(gram)
        for length in _LONGER if order == _MAX_ORDER else ():
            end = list(tail[-length:])
            longer = [position for position in positions if self._tokens[max(0, position - length) : position] == end]
            if longer and len(end) == length:
                positions, order = longer, length
                break
        counts: dict[int, int] = {}
        for position in reversed(positions):
            token = self._tokens[position]
            counts[token] = counts.get(token, 0) + 1
        best = sorted(counts.items(), key=lambda item: -item[1])[:k] if len(counts) > 1 else counts.items()
        return {token: count / (len(positions) + 1) for token, count in best}, order


def _suffixes(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The last 4, 3, 2 and 1 tokens; shorter lists have fewer suffixes."""
    last = tuple(tokens[-_MAX_ORDER:])
    while last:
        yield last
        last = last[1:]
