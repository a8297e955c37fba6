"""Where a text has become a loop."""

from __future__ import annotations

import numpy as np

_LONGEST = 512  # tokens of a span that is looked for
_TIMES = 3
_LEAST = 128  # tokens that repeat in all, so that a row of zeros or a refrain is none


class LoopFinder:
    """Tells when the last tokens of a text are one span over and over: of 1 to 512 tokens, three times or more, 128
    tokens or more in all. It depends on the tokens alone, not on the steps they came in."""

    def __init__(self) -> None:
        spans = np.arange(1, _LONGEST + 1)
        # Of each span: the tokens that must equal those one span before.
        self._needed = np.maximum(_TIMES * spans, _LEAST) - spans
        self._equal = np.zeros(_LONGEST, np.int64)
        self._before = np.full(_LONGEST, -1, np.int64)  # latest first

    def push(self, token: int) -> bool:
        """Take the next token; returns whether the text is a loop now."""
        self._equal = np.where(self._before == token, self._equal + 1, 0)
        self._before[1:] = self._before[:-1].copy()
        self._before[0] = token
        return bool((self._equal >= self._needed).any())
