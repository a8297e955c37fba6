"""A draft head, which predicts tokens from the target's hidden state."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DraftHead, Model, ModelError, Session
from pystaged.decoding.cost import PassCost, measure
from pystaged.decoding.requests import Requests
from pystaged.decoding.tree import Stage
from pystaged.drafting.lookups import NgramCost
from pystaged.drafting.mixing import HEAD
from pystaged.drafting.proposer import GrowingTree, Proposal, Proposer

_CANDIDATES = 16  # per node
_MEASURED_ROWS = 8


class HeadProposer(Proposer):
    """Proposes by a draft head; nothing in the first step, which has no hidden state yet.

    Args:
        head: a head made for the target.
        model: the target.
        target: the target's session, whose hidden states the head reads between steps.
    """

    stage = Stage.DRAFT

    def __init__(self, head: DraftHead, model: Model, target: Session) -> None:
        head.check(model)
        self._head, self._model, self._target = head, model, target
        self._num_candidates = min(_CANDIDATES, len(head.tokens))
        self._states: dict[int, NDArray[np.float32]] = {}  # after each node, float32[width]; -1 is before the root

    def begin(self, tree: GrowingTree, node: int, seconds: float) -> Requests[None]:
        yield from ()
        self._states = {}
        states, begin = self._target.states, self.meter()
        if len(states) == 0:
            return
        self._states[-1] = self._head.begin(self._model, states[-1])
        # Forced tokens before the first guess advance the state, without candidates.
        for forced in range(node):
            if self.meter() - begin > seconds:
                self._states = {}
                return
            self._step(tree, [forced], 0)

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> Requests[list[Proposal]]:
        yield from ()
        return self._step(tree, nodes, self._num_candidates)

    def _step(self, tree: GrowingTree, nodes: Sequence[int], k: int) -> list[Proposal]:
        if not self._states:
            return [Proposal({}, HEAD) for _ in nodes]
        begin = time.perf_counter()
        before = np.array([self._states[tree.nodes[node].parent] for node in nodes])
        tokens = [tree.nodes[node].token for node in nodes]
        try:
            states, candidates, logprobs = self._head.step(self._model, before, tokens, k)
        except ModelError:  # the weights overflow: the other proposers go on alone
            self._states = {}
            return [Proposal({}, HEAD) for _ in nodes]
        self._states |= zip(nodes, states, strict=True)
        self.stats.native_seconds += time.perf_counter() - begin
        self.stats.weight_bytes += self._head.weight_bytes
        said = zip(candidates.tolist(), np.exp(logprobs).tolist(), strict=True)
        return [Proposal(dict(zip(*each, strict=True)), HEAD) for each in said]


def measure_head(head: DraftHead, model: Model, ngrams: NgramCost) -> NgramCost:
    """Time the head's steps on this machine for some hundredths of a second; returns `ngrams` with them added."""
    states = np.ones((_MEASURED_ROWS, head.width), np.float32)
    tokens = np.zeros(_MEASURED_ROWS, np.int32)

    def step(num_rows: int, _: int) -> None:
        head.step(model, states[:num_rows], tokens[:num_rows], min(_CANDIDATES, len(head.tokens)))

    steps = measure(step, most_rows=_MEASURED_ROWS).seconds
    return NgramCost(PassCost({n: seconds + ngrams.lookup(n) for n, seconds in steps.items()}), ngrams.read)
