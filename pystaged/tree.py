"""The tree of guessed tokens that one pass of the target verifies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Tokens and the nodes before them; parents come before their children.

    Node 0 is the root: the last emitted token, not yet in the cache. A tree of one node is plain decoding.

    tokens: int32[n]; parents: int32[n], -1 for the root.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]

    @classmethod
    def root(cls, token: int) -> TokenTree:
        """The tree of that one token."""
        return cls(np.array([token], np.int32), np.array([-1], np.int32))

    def __len__(self) -> int:
        return len(self.tokens)
