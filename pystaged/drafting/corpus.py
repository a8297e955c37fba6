"""Text sampled from a model, many sequences in one pass: what its n-gram table is counted on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Model, Sampling, Session, Work, run

_SHARE = 16  # sequences that a context has room for: short ones, but trigrams look back two tokens only
_SIDE_BY_SIDE = 64  # sequences in one pass


def sample_documents(
    model: Model, start: int, num_tokens: int, *, temperature: float, seed: int = 0
) -> Iterator[NDArray[np.int32]]:
    """Sample sequences that begin after a token.

    Args:
        start: the token before each sequence, normally the end of text.
        num_tokens: in all sequences together, at least; they come by sixteens.
        temperature: 1.5 in Spector & Ré 2023 (arXiv 2308.04623), to see more of what the draft may say.
        seed: the same seed gives the same text; from 0 to 2**32 - 1.

    Yields:
        int32[n], one sequence each.

    Raises:
        ValueError: at once: temperature or seed out of range.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, or all sequences are the same; not {temperature}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, not {seed}")
    return _sampled(model, start, num_tokens, temperature, seed)


def _sampled(model: Model, start: int, num_tokens: int, temperature: float, seed: int) -> Iterator[NDArray[np.int32]]:
    sessions = [Session(model)]
    length = max(2, sessions[0].n_ctx // _SHARE)
    number = _SHARE * -(-num_tokens // (_SHARE * length))
    sessions += [Session(model) for _ in range(1, min(_SIDE_BY_SIDE, number))]
    try:
        for first in range(0, number, len(sessions)):
            samplings = [
                Sampling(temperature, seed=(seed << 32) + length * document)
                for document in range(first, min(first + len(sessions), number))
            ]
            texts = np.full((len(samplings), length + 1), start, np.int32)
            for session in sessions:
                session.truncate(0)
            for depth in range(length):
                works = [
                    Work.verify(session, [token], [-1], sampling)
                    for session, token, sampling in zip(sessions, texts[:, depth].tolist(), samplings, strict=False)
                ]
                texts[:, depth + 1] = [found[1][0] for found in run(works) if found]
            yield from texts[:, 1:]
    finally:
        for session in sessions:
            session.close()
