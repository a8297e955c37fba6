"""The tree that a drafter grows: under a policy, by what earlier guesses have taught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pystaged._core import RecycledCandidates, Session
from pystaged.decoding.calibration import Calibration
from pystaged.decoding.constraint import CERTAIN, Constraint
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import MAX_NODES, CheckedPolicy, Growth, TreePolicy
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.stats import DrafterStats

CANDIDATES = 6  # per node; even where fewer become children, the others tell how sure the first one is


class TreeDrafter:
    """What drafters have in common: a tree that grows under a policy, and what its outcome teaches.

    Args:
        stage: who the proposals are by.
        policy: decides how the tree grows.
        meter: what drafting costs.
    """

    def __init__(self, stage: Stage, policy: TreePolicy, meter: Meter | None = None) -> None:
        self.stats = DrafterStats()
        self.memory: RecycledCandidates | None = None
        self.hit: bool | None = None
        self._stage = stage
        self._policy = CheckedPolicy(policy)
        self._meter = meter or Meter()
        self._calibrations = {True: Calibration(), False: Calibration()}  # by whether decoding is greedy
        self._calibration = self._calibrations[True]
        self._builder: TreeBuilder | None = None
        self._asked = False  # whether the drafter was asked for a guess after the root of that tree
        self._constraint: Constraint | None = None
        self.prediction: Sequence[int] = ()

    def work(self) -> dict[str, DrafterStats]:
        return {self._stage.name.lower(): replace(self.stats)}

    def close(self) -> None:
        pass

    def sessions(self) -> list[Session]:
        return []

    def constrain(self, constraint: Constraint | None) -> None:
        self._constraint = constraint

    def end(self) -> None:
        self._builder = None

    def inherit(self, other: Drafter) -> None:
        if isinstance(other, TreeDrafter):
            self._calibrations = {greedy: learnt.copy() for greedy, learnt in other._calibrations.items()}

    def _begin(self, root: int, max_depth: int) -> tuple[TreeBuilder, int]:
        """A tree of the root and the tokens that must follow it, and the last of them, to grow from."""
        builder, last, self._asked = TreeBuilder(root), 0, False
        for token in self._constraint.forced()[: min(max_depth - 1, MAX_NODES)] if self._constraint else []:
            last = builder.add(last, token, 1.0, Stage.GRAMMAR, CERTAIN)
        return builder, last

    def _expand(
        self,
        builder: TreeBuilder,
        node: int,
        tokens: list[int],
        scores: list[float],
        children: int,
        source: int | None = None,
    ) -> None:
        """Add a node's candidates, best first, as its children; their source is the stage unless it is told."""
        believed = builder.nodes[node].score
        cells = self._calibration.cells(self._stage if source is None else source, scores)
        for token, cell in zip(tokens[:children], cells, strict=False):
            builder.add(node, token, believed * self._calibration.rates[cell], self._stage, cell)

    def _finish(self, builder: TreeBuilder, growth: Growth) -> TokenTree:
        self._builder = builder
        return builder.build(builder.best()[: self._policy.keep(growth)])

    def _learn(self, tokens: Sequence[int]) -> list[int]:
        """Compare what was proposed along the target's path with what it chose; returns the nodes on that path."""
        self.hit = None
        if self._builder is None:
            return []
        if self._asked:
            self.hit = next(iter(self._builder.children[0]), None) == tokens[0]
        nodes = [0]
        for chosen in tokens:
            children = self._builder.children[nodes[-1]]
            for token, child in children.items():
                if self._builder.nodes[child].stage is not Stage.GRAMMAR:
                    self._calibration.update(self._builder.nodes[child].cell, token == chosen)
            if chosen not in children:
                return nodes
            nodes.append(children[chosen])
        # The last token is the next root; it is not part of the context yet.
        return nodes[:-1]
