"""The drafter: grows a tree from its proposers' candidates under a policy, and learns how often they are right."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.config import SamplingConfig
from pystaged.decoding.constraint import CERTAIN, Constraint
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.experts import ExpertCost
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import MAX_EXPANDED, MAX_NODES, CheckedPolicy, Growth, TreePolicy
from pystaged.decoding.requests import Requests
from pystaged.decoding.tree import Stage, TokenTree
from pystaged.drafting.mixing import Calibration, mix, rank
from pystaged.drafting.proposer import TAIL, Candidates, GrowingTree, Proposal, Proposer
from pystaged.stats import DrafterStats

_CANDIDATES = 6  # per node; even where fewer become children, all are needed for the share of the first


class TreeDrafter:
    """Grows a tree: the policy decides how many of the best leaves to expand, the proposers propose their children.

    Args:
        proposers: a draft model alone; or lookups, and perhaps a draft head or a draft that reads hidden states, in the
            order of mixing.SHARES.
        policy: decides how the tree grows.
        vocab_size: the target's; tokens at or above it are never proposed.
        cost: processor seconds to expand a number of leaves, not counting the proposers' passes; refined here. None
            counts 0.
        meter: measures the time of drafting; the decoder's, if that has a budget.
        experts: cost of a mixture's passes, by which nodes are chosen; None for another target.
        chains: whether trees have no branches, because a model evaluates chains alone.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        policy: TreePolicy,
        vocab_size: int,
        *,
        cost: PassCost | None = None,
        meter: Meter | None = None,
        experts: ExpertCost | None = None,
        chains: bool = False,
    ) -> None:
        self.stats = DrafterStats()
        self.recycled = next((proposer.recycled for proposer in proposers if proposer.recycled is not None), None)
        self.hit: bool | None = None
        self.places = max(proposer.places for proposer in proposers)
        self.prediction: Sequence[int] = ()
        self._proposers = proposers
        self._meter = meter or Meter()
        for proposer in proposers:
            proposer.stats, proposer.meter = self.stats, self._meter
        self._stage = min(proposer.stage for proposer in proposers)
        self._policy = CheckedPolicy(policy, chains=chains)
        self._vocab_size = vocab_size
        self._cost = cost
        self._experts = experts
        self._calibrations = {True: Calibration(), False: Calibration()}  # by whether decoding is greedy
        self._calibration = self._calibrations[True]
        self._children = 0  # most children of a node
        self._constraint: Constraint | None = None
        self._tail: list[int] = []  # last tokens of the prediction and the sequence
        self._length = 0  # tokens of the sequence, its root included
        self._tree: GrowingTree | None = None  # the last tree until its outcome is known
        self._ranked: list[tuple[float, int]] = []  # negative score and node of each guess, ascending
        self._leaves: list[tuple[float, int]] = []  # those of them that can be expanded
        self._child = 0.0  # as in Growth
        self._asked = False  # whether proposers were asked for a guess after the root

    def work(self) -> dict[str, DrafterStats]:
        return {self._stage.name.lower(): replace(self.stats)}

    def close(self) -> None:
        for session in self.sessions():
            session.close()

    def sessions(self) -> list[Session]:
        return [session for proposer in self._proposers for session in proposer.sessions()]

    def inherit(self, other: Drafter) -> None:
        if isinstance(other, TreeDrafter):
            self._calibrations = {greedy: learnt.copy() for greedy, learnt in other._calibrations.items()}
            for proposer, experienced in zip(self._proposers, other._proposers, strict=True):
                proposer.inherit(experienced)

    def constrain(self, constraint: Constraint | None) -> None:
        self._constraint = constraint

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        return min(proposer.reusable(prompt) for proposer in self._proposers)

    def watch(self, prompt: NDArray[np.int32], first: int, last: int) -> Requests[None]:
        for proposer in self._proposers:
            yield from proposer.watch(prompt, first, last)

    def start(self, context: NDArray[np.int32]) -> None:
        self._tree = None
        self._tail = [*self.prediction, *context[-TAIL:].tolist()][-TAIL:]
        self._length = len(context)
        for proposer in self._proposers:
            proposer.start(context, self.prediction)

    def end(self) -> None:
        self._tree, self.prediction = None, ()
        for proposer in self._proposers:
            proposer.end()

    def most_levels(self) -> float:
        """Levels of a tree that the contexts of its proposers have room for."""
        return min(proposer.most_levels() for proposer in self._proposers)

    def lag(self) -> float:
        return sum(proposer.lag() for proposer in self._proposers)

    def price(self, num_leaves: int = 1) -> float:
        own = self._cost(num_leaves) if self._cost else 0.0
        return own + sum(proposer.price(num_leaves) for proposer in self._proposers)

    def catch_up(self, seconds: float = math.inf) -> Requests[None]:
        begin = self._meter()
        for proposer in self._proposers:
            yield from proposer.catch_up(seconds - (self._meter() - begin))

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        begin = self._meter()
        if self._tree is not None:
            self._discard()  # the outcome of the last tree is not known, because its step failed
        self._calibration = self._calibrations[sampling.is_greedy]
        self._asked = False
        max_depth = int(min(max_depth, self.most_levels()))
        self._children = self._policy.children
        tree = GrowingTree(
            self._tail,
            self._length,
            max_depth,
            max(_CANDIDATES, self._children),
            sampling,
            self._constraint,
            self._vocab_size,
        )
        for proposer in self._proposers:
            if max_depth >= 1 and not proposer.is_ready:
                yield from proposer.catch_up(seconds - (self._meter() - begin))
        if max_depth < 1 or not all(proposer.is_ready for proposer in self._proposers):
            return tree.build([])
        passes = expanded = 0
        try:
            last = self._force(tree)
            for proposer in self._proposers:
                yield from proposer.begin(tree, last, seconds - (self._meter() - begin))
            # The root is always expanded; then the policy decides.
            growth, width = self._growth(passes, self._meter() - begin), 1
            seconds -= self.lag()  # for the tokens that are read in the root's pass
            while width > 0:
                yield from self._expand(tree, width)
                passes += 1
                expanded += width
                spent, before = self._meter() - begin, growth.seconds
                if self._cost:
                    self._cost.observe(width, 0, spent - before)
                growth = self._growth(passes, spent)
                width = min(self._policy.expand(growth), MAX_EXPANDED - expanded) if self._leaves else 0
                width = self._affordable(width, seconds - growth.seconds)
            kept = self._keep(tree, growth)
        except BaseException:
            self._discard()
            raise
        finally:
            self.stats.passes += passes
            self.stats.seconds += self._meter() - begin
        self._asked = passes > 0 and last == 0
        self._tree = tree if passes else None
        return tree.build(kept)

    def advance(self, tokens: Sequence[int]) -> None:
        self._learn(tokens)
        self._tree = None
        self._tail = [*self._tail, *tokens][-TAIL:]
        self._length += len(tokens)
        for proposer in self._proposers:
            proposer.advance(tokens)

    def _discard(self) -> None:
        self._tree = None
        for proposer in self._proposers:
            proposer.discard()

    def _affordable(self, width: int, seconds: float) -> int:
        """Number of leaves, at most `width`, that can be expanded in `seconds`."""
        if seconds < math.inf:
            while width > 0 and self.price(width) > seconds:
                width -= 1
        return width

    def _force(self, tree: GrowingTree) -> int:
        """Add the tokens that the constraint forces after the root; returns the last node, which is expanded first."""
        last = 0
        for token in self._constraint.forced()[: min(tree.max_depth - 1, MAX_NODES)] if self._constraint else []:
            last = tree.add(last, token, 1.0, Stage.GRAMMAR, CERTAIN)
        self._ranked = [(-1.0, node) for node in range(1, last + 1)]
        self._leaves = [(-1.0, last)]
        return last

    def _growth(self, passes: int, seconds: float) -> Growth:
        scores, leaves = ([-score for score, _ in each] for each in (self._ranked, self._leaves))
        return Growth(scores, leaves, passes, seconds, self._length - 1, child=self._child)

    def _keep(self, tree: GrowingTree, growth: Growth) -> list[int]:
        """The nodes to verify, parents before children."""
        order = [node for _, node in self._ranked]
        if self._experts:
            order, experts = self._experts.order(tree.nodes, self._ranked, growth.cells, MAX_NODES)
            growth = replace(growth, scores=[tree.nodes[node].score for node in order], experts=experts)
        return order[: self._policy.keep(growth)]

    def _expand(self, tree: GrowingTree, width: int) -> Requests[None]:
        """Add the proposers' candidates as children of the best leaves."""
        nodes = [node for _, node in self._leaves[:width]]
        del self._leaves[:width]
        said = []
        for proposer in self._proposers:
            said.append((yield from proposer.propose(tree, nodes)))
        shares = [
            self._add(tree, node, self._candidates(tree, node, proposals))
            for node, *proposals in zip(nodes, *said, strict=True)
        ]
        self._child = shares[0]

    def _candidates(self, tree: GrowingTree, node: int, said: Sequence[Proposal | Candidates]) -> Candidates:
        """The candidates after a node: those of the only proposer, or the best of the mixed proposals."""
        if isinstance(said[0], Candidates):
            return said[0]
        mixed = mix([proposal for proposal in said if isinstance(proposal, Proposal)])
        allowed = tree.allowed(mixed.chances, tree.path(node) if tree.constraint else ())
        scores = rank(allowed, tree.sampling, tree.length + tree.nodes[node].depth, tree.num_candidates)
        return Candidates(scores, mixed.source)

    def _add(self, tree: GrowingTree, node: int, candidates: Candidates) -> float:
        """Add a node's candidates as its children; returns the share of its score that the best one has."""
        if not candidates.scores:
            return 0.0
        depth, believed = tree.nodes[node].depth, tree.nodes[node].score
        cells = self._calibration.cells(candidates.source, list(candidates.scores.values()))
        rates = self._calibration.rates
        for token, cell in islice(zip(candidates.scores, cells, strict=True), self._children):
            score = believed * rates[cell]
            child = tree.add(node, token, score, self._stage, cell)
            insort(self._ranked, (-score, child))
            if token in candidates.following:
                tree.nodes[child].stage = Stage.NGRAM
                self._add(tree, child, candidates.following[token])
            elif depth + 1 < tree.max_depth:
                insort(self._leaves, (-score, child))
        return rates[cells[0]]

    def _learn(self, tokens: Sequence[int]) -> None:
        """Update the calibration with the target's choice at each node of its path."""
        self.hit = None
        tree = self._tree
        if tree is None:
            return
        if self._asked:
            self.hit = next(iter(tree.children[0]), None) == tokens[0]
        node = 0
        for chosen in tokens:
            children = tree.children[node]
            for token, child in children.items():
                if tree.nodes[child].stage is not Stage.GRAMMAR:
                    self._calibration.update(tree.nodes[child].cell, token == chosen)
            if chosen not in children:
                return
            node = children[chosen]
