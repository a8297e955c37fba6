"""The tree of a constrained sequence: forced tokens are added to it, forbidden ones are cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.sampling.constraint import Constraint, allows


def constrained(tree: TokenTree, constraint: Constraint, forced: Sequence[int]) -> tuple[TokenTree, NDArray[np.uint32]]:
    """Add the forced tokens to a tree and cut the forbidden nodes, which could not have been accepted.

    Returns: the new tree of n nodes, and the mask after each node, uint32[n, words].
    """
    builder, first = TreeBuilder(int(tree.tokens[0])), constraint.mask([])
    if first is None:
        raise ValueError("the constraint forbids the tokens that it was advanced by")
    masks = [first]

    def add(parent: int, token: int, score: float, stage: Stage) -> int | None:
        known = builder.children[parent].get(token)
        if known is not None:
            return known
        mask = constraint.mask([*builder.path(parent), token]) if allows(masks[parent], token) else None
        if mask is None:
            return None
        masks.append(mask)
        return builder.add(parent, token, score, stage)

    last = 0
    for token in forced:
        if (node := add(last, token, 1.0, Stage.GRAMMAR)) is None:
            break
        last = node
    kept: dict[int, int] = {0: 0}
    nodes = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist(), tree.stages.tolist(), strict=True)
    for i, (token, parent, score, stage) in enumerate(nodes):
        if parent in kept and (found := add(kept[parent], token, score, Stage(stage))) is not None:
            kept[i] = found
    return builder.build(range(1, len(builder.nodes))), np.stack(masks)
