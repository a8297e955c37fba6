"""The tree of guessed tokens that one pass of the target verifies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pystaged.sampling.constraint import Constraint


class Stage(IntEnum):
    """The proposer of a token: the target, a draft (a model, a head), n-grams, or a grammar that allows no other one.
    CONFIRMED: n-grams guessed it, and the draft then named it, too."""

    TARGET = 0
    DRAFT = 1
    NGRAM = 2
    GRAMMAR = 3
    CONFIRMED = 4


Cell = tuple[int, int, int, int]
"""Key of a guess in the calibration: its source, its rank, a bin of its share, and its support by lookups."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """A tree of n nodes; parents come before their children.

    Node 0 is the root: the last emitted token, not yet in the KV cache. A tree of one node is plain decoding.

    tokens: int32[n]; parents: int32[n], -1 for the root; scores: float32[n], the estimated probability that the node is
    on the target's path; stages: uint8[n], a Stage.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    scores: NDArray[np.float32]
    stages: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_certain(self) -> int:
        """Number of the root and of the tokens that a grammar forces."""
        return 1 + int(self.stages.tolist().count(Stage.GRAMMAR))

    def head(self, length: int) -> TokenTree:
        """The tree of the first `length` nodes."""
        return TokenTree(self.tokens[:length], self.parents[:length], self.scores[:length], self.stages[:length])


@dataclass(slots=True)
class Node:
    """A guess of a growing tree.

    score: estimated probability that it is on the target's path. cells: those that learn whether it is.
    """

    token: int
    parent: int
    depth: int
    score: float
    stage: Stage
    cells: tuple[Cell, ...] = ()


class TreeBuilder:
    """A growing tree, whose siblings have distinct tokens."""

    def __init__(self, root: int) -> None:
        self.nodes = [Node(root, -1, 0, 1.0, Stage.TARGET)]
        self.children: list[dict[int, int]] = [{}]  # by token
        self._ranked: list[int] | None = None

    def add(self, parent: int, token: int, score: float, stage: Stage, cells: tuple[Cell, ...] = ()) -> int:
        """Add a child of `parent` and return it. If one has the token already, it and what is below it get the new
        score, stage and cells."""
        self._ranked = None
        node = self.children[parent].get(token)
        if node is not None:
            known = self.nodes[node]
            factor, known.score = score / known.score, score
            self._scale_below(node, factor)
            known.stage, known.cells = stage, cells
            return node
        node = len(self.nodes)
        self.nodes.append(Node(token, parent, self.nodes[parent].depth + 1, score, stage, cells))
        self.children.append({})
        self.children[parent][token] = node
        return node

    def _scale_below(self, node: int, factor: float) -> None:
        for child in self.children[node].values():
            # A rounded product must not exceed the parent's score: the likeliest nodes are a tree.
            self.nodes[child].score = min(self.nodes[child].score * factor, self.nodes[node].score)
            self._scale_below(child, factor)

    def force(self, tokens: Iterable[int]) -> int:
        """Add the tokens that a grammar forces after the root, one below the other; returns the last node."""
        node = 0
        for token in tokens:
            node = self.add(node, token, 1.0, Stage.GRAMMAR)
        return node

    def ranked(self) -> list[int]:
        """All nodes but the root, the likeliest first and parents before children."""
        if self._ranked is None:
            scores = [-node.score for node in self.nodes]
            self._ranked = sorted(range(1, len(scores)), key=scores.__getitem__)
        return self._ranked

    def path(self, node: int) -> list[int]:
        """Tokens from the child of the root to the node."""
        tokens = []
        while node > 0:
            tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return tokens[::-1]

    def build(self, kept: Sequence[int] = ()) -> TokenTree:
        """The tree of the root and these nodes in this order; a node's parent must be the root or an earlier node."""
        index = {0: 0} | {node: i for i, node in enumerate(kept, 1)}
        nodes = [self.nodes[node] for node in (0, *kept)]
        return TokenTree(
            np.array([node.token for node in nodes], np.int32),
            np.array([-1] + [index[node.parent] for node in nodes[1:]], np.int32),
            np.array([node.score for node in nodes], np.float32),
            np.array([node.stage for node in nodes], np.uint8),
        )


def constrained(tree: TokenTree, constraint: Constraint) -> tuple[TokenTree, NDArray[np.uint32]]:
    """Cut the nodes after which a constraint allows nothing: the end of the text, and guesses that are too complex for
    a grammar. Returns the tree of n nodes that is left, and the tokens allowed after each, uint32[n, words].

    Raises:
        ValueError: it forbids the tokens that it was advanced by.
    """
    paths, places, kept = list[list[int]](), list[int](), list[int]()
    parents, masks = tree.parents.tolist(), list[NDArray[np.uint32]]()
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), parents, strict=True)):
        paths.append([*paths[parent], token] if node else [])
        mask = constraint.mask(paths[node]) if node == 0 or places[parent] >= 0 else None
        places.append(-1 if mask is None else len(kept))
        if mask is not None:
            kept.append(node)
            masks.append(mask)
    if not kept:
        raise ValueError("the constraint forbids the tokens that it was advanced by")
    parents = [-1, *(places[parents[node]] for node in kept[1:])]
    left = TokenTree(tree.tokens[kept], np.array(parents, np.int32), tree.scores[kept], tree.stages[kept])
    return left, np.stack(masks)
