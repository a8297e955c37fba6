"""The tokens of a text that continues another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Tokenizer

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]


def encode_continuation(tokenizer: Tokenizer, text: str, *, parse_special: bool = True) -> NDArray[np.int32]:
    """The tokens of the continuation of another text, int32[n]: without the vocabulary's initial tokens, and without
    the space that SentencePiece adds. Errors as in Tokenizer.encode."""
    tokens = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    if text and tokenizer.decode(tokens, special=True) == f" {text}":
        begun = tokenizer.encode("\n", add_special=False)
        more = tokenizer.encode(f"\n{text}", add_special=False, parse_special=parse_special)
        if (more[: len(begun)] == begun).all():
            return more[len(begun) :]
    return tokens
