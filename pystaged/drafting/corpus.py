"""Text sampled from a model, many sequences in one pass: what its n-gram table is counted on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Model, Sampling, Session

_BRANCHES = 16  # sequences that grow side by side


def sample_documents(
    model: Model, start: int, num_tokens: int, *, temperature: float, seed: int = 0
) -> Iterator[NDArray[np.int32]]:
    """Sample sequences that begin after a token, as branches of one tree that deepens with every pass.

    Args:
        start: the token before each sequence, normally the end of text.
        num_tokens: in all sequences together, at least; whole batches are made.
        temperature: 1.5 in Spector & Ré 2023 (arXiv 2308.04623), to see more of what the draft may say.
        seed: the same seed gives the same text; from 0 to 2**32 - 1.

    Yields:
        int32[n], one sequence each.

    Raises:
        ValueError: temperature or seed out of range.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, or all sequences are the same; not {temperature}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, not {seed}")
    session = Session(model)
    # The cells of a batch must fit the context. Branches are short, but trigrams look back two tokens only.
    length = max(2, session.n_ctx // _BRANCHES)
    done = 0
    try:
        while done < num_tokens:
            session.evaluate([start], [-1])
            rows = [0] * _BRANCHES
            samplings = [
                Sampling(temperature, seed=(seed << 32) + done + branch * length) for branch in range(_BRANCHES)
            ]
            batch = np.empty((_BRANCHES, length), np.int32)
            for depth in range(length):
                tokens, _ = session.candidates(rows, 1, samplings)
                batch[:, depth] = tokens[:, 0]
                if depth + 1 < length:
                    session.evaluate(batch[:, depth], rows)
                    rows = list(range(1 + depth * _BRANCHES, 1 + (depth + 1) * _BRANCHES))
            session.discard()
            done += batch.size
            yield from batch
    finally:
        session.close()
