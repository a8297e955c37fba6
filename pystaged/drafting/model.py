"""Draft models, which propose by passes over their own context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import common_prefix
from pystaged.decoding.requests import AnyRequest, Propose, Read
from pystaged.drafting.calibration import DRAFT, LATER
from pystaged.drafting.proposer import Candidates, GrowingTree, PassProposer
from pystaged.sampling.constraint import Constraint

_LONGEST_PREFIX_ROWS = 16  # most unread tokens that are read in the root's pass rather than by prefill
PLACES = 1 + len(LATER)  # tokens that a parallel draft proposes in one pass


class ModelProposer(PassProposer):
    """Evaluates the requested nodes in one pass and ranks the draft's candidates under the text's sampling.

    Args:
        session, cost: as in PassProposer.
        substitutes: the draft's token for each token of the target that the draft lacks or has with another meaning;
            those tokens are never proposed.
    """

    _places = 1  # tokens that a pass proposes

    def __init__(
        self, session: Session, cost: PassCost | None = None, substitutes: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(session, cost)
        self._substitutes = substitutes or {}
        self._tree: GrowingTree | None = None  # the current one
        self._rows = dict[int, int]()  # pending rows of its nodes
        self._after: dict[int, Candidates] = {}  # what it names, by node

    def start(self, context: NDArray[np.int32], _prediction: Sequence[int]) -> None:
        read = self._spelled(context[:-1].tolist())
        self._length = self.session.rewind(common_prefix(self.session.tokens, np.array(read, np.int32)))
        self._unread = read[self._length :]
        self._root = int(context[-1])
        self._is_lost = False
        self._forget()

    def end(self) -> None:
        self._unread = []

    @property
    def is_ready(self) -> bool:
        return len(self._unread) <= _LONGEST_PREFIX_ROWS and not self._is_lost

    def most_levels(self) -> float:
        # A row for the root, and one for each level but the last; a parallel draft has more.
        room = min(self.session.n_ctx - self._length, self.session.most_pending - self._places)
        return room - len(self._unread)

    def catch_up(self, seconds: float = math.inf) -> Read | None:
        count = len(self._unread)
        if not count or self._is_lost or count > self.session.n_ctx - self._length:
            return None
        count = self._fitting(count, seconds)
        return Read(self.session, self._length, np.array(self._unread[:count], np.int32)) if count else None

    def request(self, tree: GrowingTree, nodes: Sequence[int]) -> Propose | None:
        is_over = self._is_lost or all(node in self._after for node in nodes)
        return None if is_over else self._evaluate(tree, nodes)

    def propose(self, _tree: GrowingTree, nodes: Sequence[int]) -> list[Candidates]:
        return [self._after.get(node) or Candidates({}, DRAFT) for node in nodes]

    def keep(self, request: AnyRequest) -> None:
        assert self._tree
        for key, tokens, scores in zip(self._asked, *request.result, strict=True):
            # Filters may leave fewer candidates.
            known = zip(tokens, scores, strict=True)
            good = {token: score for token, score in known if token >= 0 and token not in self._substitutes}
            self._after[key] = Candidates(good, DRAFT)

    def _evaluate(self, tree: GrowingTree, nodes: Sequence[int], more: Sequence[int] = ()) -> Propose:
        """The pass over nodes, and after the last one over the tokens `more`, which are no part of the text."""
        self._asked, self._tree = nodes, tree
        tokens, parents, before = list[int](), list[int](), range(0)
        first = self.session.num_pending  # asked once: on RPC servers each question is a call
        if not self._rows:  # the first pass also has the unread tokens, the root, and forced tokens after it
            tokens += self._unread
            parents += range(-1, len(tokens) - 1)
            before = range(nodes[0])
        for node in (*before, *nodes):
            parents.append(self._rows[tree.nodes[node].parent] if node else len(tokens) - 1)
            self._rows[node] = first + len(tokens)
            tokens += self._spelled([tree.nodes[node].token])
        parents += range(len(tokens) - 1, len(tokens) + len(more) - 1)
        tokens += more
        judged = len(nodes) + len(more)
        masks = self._masks(tree.constraint, tree, judged) if tree.constraint else None
        k, sampling = tree.num_candidates, tree.sampling.native
        return Propose(self.session, self._length, tokens, parents, judged, k, sampling, masks)

    def _masks(self, constraint: Constraint, tree: GrowingTree, num_rows: int) -> NDArray[np.uint32]:
        """Allowed tokens after each node, uint32[num_rows, words]; all of the draft's after further rows, and where it
        has none of those that are allowed."""
        words, rest = divmod(self.session.vocab_size, 32)
        masks = np.zeros((num_rows, words + 1), np.uint32)
        for row, node in zip(masks, self._asked, strict=False):
            if (found := constraint.mask(tree.path(node))) is not None:
                row[: len(found)] = found[: words + 1]
        masks[:, words] &= (1 << rest) - 1
        masks[~masks.any(axis=1)] = [0xFFFFFFFF] * words + [(1 << rest) - 1]
        return masks

    def advance(self, tokens: Sequence[int]) -> None:
        emitted = self._spelled([self._root, *tokens])
        if self._tree is None:
            self._unread += emitted[:-1]
        else:
            rows, node = list(range(len(self._unread))), 0
            for token in tokens:  # the last one is the next root, which is not committed yet
                if node not in self._rows:
                    break
                rows.append(self._rows[node])
                node = self._tree.children[node].get(token, -1)
            self.session.commit(rows)
            self._length += len(rows)
            self._unread = emitted[len(rows) - len(self._unread) : -1]
        self._root = tokens[-1]
        self._forget()

    def _reading(self, cost: PassCost, unread: int) -> float:
        if unread <= _LONGEST_PREFIX_ROWS:
            return super()._reading(cost, unread)
        return cost.prefill(unread, self._length)

    def _forget(self) -> None:
        super()._forget()
        self._tree, self._rows, self._after = None, {}, {}

    def _spelled(self, tokens: list[int]) -> list[int]:
        """The draft's tokens in place of the target's."""
        return [self._substitutes.get(token, token) for token in tokens] if self._substitutes else tokens


class ParallelModelProposer(ModelProposer):
    """A parallel draft, which proposes for all depths of a tree by one pass (PARD, An et al. 2025, arXiv 2504.18583).

    It was trained to predict tokens i, i + 1, ... from the text before i followed by copies of a mask token. Its
    prediction of a later token does not depend on the tokens between, so all nodes of one depth have the same
    candidates.

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
        self._first = 0  # depth of the first node to expand; `_after` has the candidates by depth below it

    def price(self, _num_nodes: int, texts: int = 1) -> float:
        return 0.0 if self._rows else super().price(PLACES, texts)

    def request(self, tree: GrowingTree, nodes: Sequence[int]) -> Propose | None:
        if self._is_lost or self._rows:
            return None
        self._first = tree.nodes[nodes[0]].depth
        masks = [self._mask] * (min(PLACES, tree.deepest - self._first) - 1)
        request = self._evaluate(tree, nodes[:1], masks)
        self._asked = range(1 + len(masks))
        return request

    def keep(self, request: AnyRequest) -> None:
        super().keep(request)
        for place in range(1, len(self._after)):
            self._after[place].source = LATER[place - 1]

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> list[Candidates]:
        places = [tree.nodes[node].depth - self._first for node in nodes]
        return [self._after.get(place) or Candidates({}, DRAFT) for place in places]


def draft_proposer(
    session: Session, mask: int = -1, cost: PassCost | None = None, substitutes: Mapping[int, int] | None = None
) -> ModelProposer:
    """The proposer of a draft model, a parallel one if it has a mask token (-1 for none). Arguments as in
    ParallelModelProposer."""
    if mask < 0:
        return ModelProposer(session, cost, substitutes)
    return ParallelModelProposer(session, mask, cost, substitutes)
