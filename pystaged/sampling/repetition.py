"""Detection of sequences that repeat themselves."""

from __future__ import annotations

import numpy as np

_LONGEST = 512  # tokens of the longest span
_TIMES = 3
_LEAST = 128  # fewest tokens of all repetitions, so that a row of zeros or a refrain is no loop


class LoopFinder:
    """Detects when the last tokens repeat one span of 1 to 512 tokens at least three times, over at least 128 tokens.
    The result depends on the tokens alone, not on the steps that emitted them."""

    def __init__(self) -> None:
        spans = np.arange(1, _LONGEST + 1)
        # For each length of span: number of tokens that must equal the token one span before.
        self._needed = np.maximum(_TIMES * spans, _LEAST) - spans
        self._equal = np.zeros(_LONGEST, np.int64)
        self._before = np.full(_LONGEST, -1, np.int64)  # latest first

    def push(self, token: int) -> bool:
        """Add the next token; returns whether the sequence is in a loop now."""
        self._equal = np.where(self._before == token, self._equal + 1, 0)
        self._before[1:] = self._before[:-1].copy()
        self._before[0] = token
        return bool((self._equal >= self._needed).any())
