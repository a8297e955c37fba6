"""A parallel draft model, which proposes several tokens in one pass (PARD, An et al. 2025, arXiv 2504.18583).

It was trained to predict tokens i, i + 1, ... from the text before i followed by copies of a mask token. Its prediction
of a later token does not depend on the tokens between, so all nodes of one depth of a tree have the same candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pystaged._core import Session
from pystaged.decoding.cost import PassCost
from pystaged.decoding.requests import Propose
from pystaged.drafting.calibration import DRAFT, LATER
from pystaged.drafting.model import ModelProposer
from pystaged.drafting.proposer import Candidates, GrowingTree
from pystaged.sampling.constraint import allows

PLACES = 1 + len(LATER)  # tokens that one pass proposes


def draft_proposer(
    session: Session, mask: int = -1, cost: PassCost | None = None, substitutes: Mapping[int, int] | None = None
) -> ModelProposer:
    """The proposer of a draft model, a parallel one if it has a mask token (-1 for none). Arguments as in
    ParallelModelProposer."""
    if mask < 0:
        return ModelProposer(session, cost, substitutes)
    return ParallelModelProposer(session, mask, cost, substitutes)


class ParallelModelProposer(ModelProposer):
    """Proposes for all depths of a tree by one pass.

    Args:
        mask: id of the mask token, which is the draft's and never part of a text.
        session, cost, substitutes: as in ModelProposer.
    """

    _places = PLACES

    def __init__(
        self, session: Session, mask: int, cost: PassCost | None = None, substitutes: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(session, cost, substitutes)
        self._mask = mask
        self._first = 0  # depth of the first node to expand
        self._found: list[Candidates] = []  # candidates after that node, and after each mask token

    def price(self, num_nodes: int) -> float:
        del num_nodes
        return 0.0 if self._rows else super().price(PLACES)

    def request(self, tree: GrowingTree, nodes: Sequence[int]) -> Propose | None:
        if self._is_lost or self._rows:
            return None
        self._first = tree.nodes[nodes[0]].depth
        masks = [self._mask] * (min(PLACES, tree.deepest - self._first) - 1)
        return self._evaluate(tree, nodes[:1], masks)

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> list[Candidates]:
        return [self._at(tree, node) for node in nodes]

    def _keep(self, found: list[Candidates]) -> None:
        self._found = found
        for place, candidates in enumerate(found[1:]):
            candidates.source = LATER[place]

    def _forget(self) -> None:
        super()._forget()
        self._found = []

    def _at(self, tree: GrowingTree, node: int) -> Candidates:
        """The candidates for the depth of a node, without those that the constraint forbids there."""
        place = tree.nodes[node].depth - self._first
        if place >= len(self._found):
            return Candidates({}, DRAFT)
        found = self._found[place]
        if place == 0 or not tree.constraint:
            return found
        mask = tree.constraint.mask(tree.path(node))
        scores = {} if mask is None else {token: score for token, score in found.scores.items() if allows(mask, token)}
        return Candidates(scores, found.source)
