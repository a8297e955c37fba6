"""Embeddings of texts, from a model's last hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Model, Session, Work, run
from pystaged.decoding.requests import MOST_ROWS

Pooling = Literal["mean", "cls", "last"]
_OF_FILE: dict[str, Pooling] = {"1": "mean", "2": "cls", "3": "last"}  # as GGUF files number them


def pooling_of(metadata: Any) -> Pooling:
    """The pooling that a model's file names, else "mean"."""
    family = metadata.get("general.architecture", "")
    return _OF_FILE.get(metadata.get(f"{family}.pooling_type", ""), "mean")


def embed(model: Model, tokens: Sequence[NDArray[np.int32]], pooling: Pooling, normalize: bool) -> NDArray[np.float32]:
    """Embed texts, one after the other; see Engine.embed. Raises ValueError for a model on RPC servers."""
    if pooling not in _OF_FILE.values():
        raise ValueError(f'pooling must be "mean", "cls" or "last", not {pooling!r}')
    if not isinstance(model, Model):
        raise ValueError("RPC servers compute no embeddings; load the model on a device of this machine")
    found = np.zeros((len(tokens), model.width))
    for i, text in enumerate(tokens):
        session = Session(model, len(text))
        try:
            for first in range(0, len(text), MOST_ROWS):
                (rows,) = run([Work.embed(session, text[first : first + MOST_ROWS])])
                if pooling == "mean":
                    found[i] += rows.sum(0, np.float64) / len(text)
                elif pooling == "last" or first == 0:
                    found[i] = rows[-1 if pooling == "last" else 0]
        finally:
            session.close()
    if normalize:
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return found.astype(np.float32)
