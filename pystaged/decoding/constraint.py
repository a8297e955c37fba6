"""Constraints on the tokens of a sequence: the tokens that are allowed next, and those that are forced.

A constraint depends on the tokens after the prompt alone, so drafting does not change a constrained sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder

Mask = NDArray[np.uint32]
"""uint32[words]: one bit for each token, lowest bit first; tokens beyond the last word are forbidden."""

CERTAIN = (0, 0, 0)  # the calibration cell of forced tokens, which is never updated


class Constraint(Protocol):
    """Decides which tokens are allowed after the tokens that were passed to `advance`; the prompt does not count.

    Raises:
        ValueError: from any member, if it cannot decide.
    """

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the sequence is allowed."""
        ...

    def forced(self) -> list[int]:
        """The next tokens as far as each is the only allowed one; may be incomplete."""
        ...

    def mask(self, path: Sequence[int]) -> Mask | None:
        """The tokens allowed after the sequence and `path`; None if `path` is forbidden or ends the sequence."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        ...


def allows(mask: Mask, token: int) -> bool:
    """Whether a mask allows a token."""
    return token >> 5 < len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)


def count_allowed(mask: Mask, without: Iterable[int] = ()) -> int:
    """Number of tokens that a mask allows, not counting `without`, whose tokens must be distinct."""
    return int(np.unpackbits(mask.view(np.uint8)).sum()) - sum(allows(mask, token) for token in without)


def constrained(tree: TokenTree, constraint: Constraint, forced: Sequence[int]) -> tuple[TokenTree, NDArray[np.uint32]]:
    """Add the forced tokens to a tree and cut the forbidden nodes, which could not have been accepted.

    Returns: the new tree of n nodes, and the mask after each node, uint32[n, words].
    """
    builder = TreeBuilder(int(tree.tokens[0]))
    masks = [_checked(constraint.mask([]))]

    def add(parent: int, token: int, score: float, stage: Stage) -> int | None:
        known = builder.children[parent].get(token)
        if known is not None:
            return known
        mask = constraint.mask([*builder.path(parent), token]) if allows(masks[parent], token) else None
        if mask is None:
            return None
        masks.append(mask)
        return builder.add(parent, token, score, stage, CERTAIN)

    last = 0
    for token in forced:
        node = add(last, token, 1.0, Stage.GRAMMAR)
        if node is None:
            break
        last = node
    kept: dict[int, int] = {0: 0}
    nodes = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist(), tree.stages.tolist(), strict=True)
    for i, (token, parent, score, stage) in enumerate(nodes):
        if parent in kept:
            found = add(kept[parent], token, score, Stage(stage))
            if found is not None:
                kept[i] = found
    return builder.build(range(1, len(builder.nodes))), np.stack(masks)


def _checked(mask: Mask | None) -> Mask:
    if mask is None:
        raise ValueError("the constraint forbids the tokens that it was advanced by")
    return mask
