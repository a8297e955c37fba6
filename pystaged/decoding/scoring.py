"""How likely a model finds a text, from the passes that decoding makes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session

_ROWS = 64  # of one pass


def score(session: Session, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """The log-probability of each token after those before it.

    Args:
        session: empty; it holds the text afterwards.
        tokens: int32[n].

    Returns:
        float64[n], natural log; NaN for the first, before which there is nothing.

    Raises:
        ContextFullError: more tokens than positions.
    """
    found = np.full(len(tokens), np.nan)
    for first in range(0, len(tokens), _ROWS):
        rows = tokens[first : first + _ROWS]
        chain = np.arange(len(rows), dtype=np.int32)
        session.evaluate(rows, chain - 1)
        for i in range(min(len(rows), len(tokens) - 1 - first)):
            logits = session.logits(i).astype(np.float64)
            top = logits.max()
            found[first + i + 1] = logits[tokens[first + i + 1]] - top - np.log(np.exp(logits - top).sum())
        session.commit(chain)
    return found
