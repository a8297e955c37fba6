"""Drafts with a draft head, which goes on from the target's hidden state, mixed with n-grams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DraftHead, Model, ModelError, RecycledCandidates, Session
from pystaged.decoding.cost import PassCost, measure
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import TreePolicy
from pystaged.decoding.tree import Stage, TreeBuilder
from pystaged.drafting.ngrams import NgramCost, NgramDrafter
from pystaged.drafting.table import NgramTable

_CANDIDATES = 16  # of the head, per node
# What the n-grams count beside the head, by their source; see ngrams.py.
_BESIDE_HEAD = {2: 0.2, 7: 0.2, 8: 0.35, 3: 0.3, 4: 0.5, 5: 0.7, 6: 0.9}
_WITH_HEAD = 7  # added to these sources where the head says something, too
_MEASURED_ROWS = 8


class HeadDrafter(NgramDrafter):
    """Drafts from a draft head and from n-grams, ranked together under the target's own noise.

    Right after a prompt there is no hidden state yet, so n-grams draft alone.

    Args:
        head: made for the target.
        model: the target, which hands out the states that the head reads.
        target: its session, between steps.
        table, policy, vocab_size, recycled, cost, meter: as in NgramDrafter; `cost` of lookups with the head's steps.
    """

    stage = Stage.DRAFT

    def __init__(
        self,
        head: DraftHead,
        model: Model,
        target: Session,
        table: NgramTable | None,
        policy: TreePolicy,
        vocab_size: int,
        *,
        recycled: RecycledCandidates | None = None,
        cost: NgramCost | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(table, policy, vocab_size, recycled=recycled, cost=cost, meter=meter)
        head.check(model)
        self._head, self._model, self._target = head, model, target
        self._num_candidates = min(_CANDIDATES, len(head.tokens))
        self._states: dict[int, NDArray[np.float32]] = {}  # behind each node, float32[width]; -1 is before the root
        self._said: dict[int, dict[int, float]] = {}  # what may follow it, with probabilities

    def _begun(self, builder: TreeBuilder, last: int, seconds: float) -> None:
        self._said, self._states = {}, {}
        states, begin = self._target.states, self._meter()
        if len(states) == 0:
            return
        self._states[-1] = self._head.begin(self._model, states[-1])
        # Tokens that a grammar forces before the first guess are taken in, and nothing is asked.
        for node in range(last):
            if self._meter() - begin > seconds:
                self._states = {}
                return
            self._step(builder, [node], 0)

    def _consult(self, builder: TreeBuilder, nodes: Sequence[int]) -> None:
        if self._states:
            self._step(builder, nodes, self._num_candidates)

    def _step(self, builder: TreeBuilder, nodes: Sequence[int], k: int) -> None:
        begin = self._meter()
        before = np.array([self._states[builder.nodes[node].parent] for node in nodes])
        tokens = [builder.nodes[node].token for node in nodes]
        try:
            states, candidates, logprobs = self._head.step(self._model, before, tokens, k)
        except ModelError:  # weights that overflow: n-grams go on alone
            self._states = {}
            return
        self._states |= dict(zip(nodes, states, strict=True))
        said = zip(candidates.tolist(), np.exp(logprobs).tolist(), strict=True)
        self._said |= {node: dict(zip(*each, strict=True)) for node, each in zip(nodes, said, strict=True)}
        self.stats.native_seconds += self._meter() - begin
        self.stats.weight_bytes += self._head.weight_bytes

    def _mixture(self, tail: list[int], node: int) -> tuple[dict[int, float], int]:
        chances, source = super()._mixture(tail, node)
        said = self._said.get(node)
        if not said:
            return chances, source
        weight = _BESIDE_HEAD[source] if chances else 0.0
        mixed = {token: weight * chance for token, chance in chances.items()}
        for token, chance in said.items():
            mixed[token] = mixed.get(token, 0.0) + (1 - weight) * chance
        return mixed, source + _WITH_HEAD


def measure_head(head: DraftHead, model: Model, ngrams: NgramCost) -> NgramCost:
    """Time the head's steps on this machine, for some hundredths of a second, and add lookups beside them."""
    states = np.ones((_MEASURED_ROWS, head.width), np.float32)
    tokens = np.zeros(_MEASURED_ROWS, np.int32)

    def step(num_rows: int, _: int) -> None:
        head.step(model, states[:num_rows], tokens[:num_rows], min(_CANDIDATES, len(head.tokens)))

    steps = measure(step, most_rows=_MEASURED_ROWS).seconds
    return NgramCost(PassCost({n: seconds + ngrams.lookup(n) for n, seconds in steps.items()}), ngrams.read)
