"""Constraints on the tokens of a sequence: the tokens that are allowed next, and those that are forced.

A constraint depends on the tokens after the prompt alone, so drafting does not change a constrained sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
"""uint32[words]: one bit for each token, lowest bit first; tokens beyond the last word are forbidden."""


class Constraint(Protocol):
    """Decides which tokens are allowed after the tokens that were passed to `advance`; the prompt does not count.

    Raises:
        ValueError: from any member, if it cannot decide.
    """

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the sequence is allowed."""

    def forced(self) -> list[int]:
        """The next tokens as far as each is the only allowed one; may be incomplete."""

    def mask(self, path: Sequence[int]) -> Mask | None:
        """The tokens allowed after the sequence and `path`; None if `path` is forbidden or ends the sequence."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""


def allows(mask: Mask, token: int) -> bool:
    """Whether a mask allows a token."""
    return token >> 5 < len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)


def count_allowed(mask: Mask, without: Iterable[int] = ()) -> int:
    """Number of tokens that a mask allows, not counting `without`, whose tokens must be distinct."""
    return int(np.unpackbits(mask.view(np.uint8)).sum()) - sum(allows(mask, token) for token in without)
