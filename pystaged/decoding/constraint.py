"""What a text must be, whatever the model would like: the tokens that may come next, and those that must.

A constraint is a function of the tokens after the prompt, as the model's own choice is, so a constrained text is the
same however it is drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder

Mask = NDArray[np.uint32]
"""uint32[words]: a bit for each token, the first in the lowest one; tokens beyond the last word are forbidden."""

CERTAIN = (0, 0, 0)  # the calibration cell of tokens that must come: nothing is learnt from them


class Constraint(Protocol):
    """Says what may follow the text that `advance` has told it of, tokens after the prompt alone.

    Raises:
        ValueError: every member, where it cannot tell.
    """

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end of the text."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as they are known: a mask of each allows no other one."""
        ...

    def mask(self, path: Sequence[int]) -> Mask | None:
        """What may follow the text and a path after it; None where the path itself may not, or ends the text."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow the text, which goes on with these tokens."""
        ...


def allows(mask: Mask, token: int) -> bool:
    """Whether a token is among those of a mask."""
    return token >> 5 < len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)


def count_allowed(mask: Mask, without: Iterable[int] = ()) -> int:
    """How many tokens a mask has, besides some, each of which is named once."""
    return int(np.unpackbits(mask.view(np.uint8)).sum()) - sum(allows(mask, token) for token in without)


def constrained(tree: TokenTree, constraint: Constraint, forced: Sequence[int]) -> tuple[TokenTree, NDArray[np.uint32]]:
    """What a constraint leaves of a tree, behind tokens that must come, and the mask of each node, uint32[n, words].

    What is cut could never have been accepted.
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
        raise ValueError("the constraint does not allow the text that it was told of")
    return mask
