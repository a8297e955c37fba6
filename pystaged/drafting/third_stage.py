"""The third stage: n-grams below a draft model, as in Spector & Ré 2023 (arXiv 2308.04623).

Each pass of the draft also evaluates tokens that n-grams guess. Those that the draft itself ranks among its candidates
deepen the tree without another pass; the rest are dropped. On the machines and pairs measured so far this saves passes
but no time, so only benchmarks use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.decoding.cost import PassCost
from pystaged.decoding.requests import finish
from pystaged.drafting.lookups import Lookup
from pystaged.drafting.mixing import mix, rank
from pystaged.drafting.model import ModelProposer
from pystaged.drafting.proposer import TAIL, GrowingTree

_GUESSES = 3  # guessed tokens per pass


class GuidedModelProposer(ModelProposer):
    """A draft model whose passes also evaluate guesses of n-grams.

    Args:
        below: the lookups that guess.
        session, cost, substitutes: as in ModelProposer.
    """

    spare_rows = _GUESSES

    def __init__(
        self,
        session: Session,
        below: Sequence[Lookup],
        cost: PassCost | None = None,
        substitutes: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(session, cost, substitutes)
        self._below = below

    def start(self, context: NDArray[np.int32], prediction: Sequence[int]) -> None:
        super().start(context, prediction)
        for lookup in self._below:
            lookup.start(context, prediction)

    def advance(self, tokens: Sequence[int]) -> None:
        super().advance(tokens)
        for lookup in self._below:
            lookup.advance(tokens)

    def end(self) -> None:
        super().end()
        for lookup in self._below:
            lookup.end()

    def _guess(self, tree: GrowingTree, node: int) -> list[int]:
        path, tail, guesses = tree.path(node), tree.tail(node), list[int]()
        for lookup in self._below:
            finish(lookup.catch_up())
        while len(guesses) < _GUESSES and len(path) < tree.max_depth - 1:
            found = mix([lookup.after(tail) for lookup in self._below])
            allowed = tree.allowed(found.chances, path)
            token = next(iter(rank(allowed, tree.sampling, tree.length + len(path), 1)), None)
            if token is None or token in self._substitutes:
                break
            guesses.append(token)
            path, tail = [*path, token], [*tail[1 - TAIL :], token]
        return guesses
