"""The drafter: one tree, which all proposers grow in the order of their price (Spector & Ré 2023, arXiv 2308.04623).

Lookups expand the best nodes for microseconds. A pass of a proposer that costs (a draft model, a level of EAGLE-3 or
MTP, a block) is bought while what it should add is worth its price. It judges the best nodes that it has not judged,
whole paths that lookups guessed among them, in one pass. Then the target verifies the best nodes.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.decoding.account import Meter
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import MAX_CHILDREN, MAX_EXPANDED, MAX_NODES, GainPolicy, Growth, TreePolicy, checked
from pystaged.decoding.requests import AnyRequest, Read
from pystaged.decoding.tree import Cell, Stage, TokenTree
from pystaged.drafting.calibration import NOBODY, Calibration, mix, rank
from pystaged.drafting.lookups import TAIL, Lookup
from pystaged.drafting.proposer import Candidates, GrowingTree, PassProposer, Proposal, Proposer
from pystaged.options.config import SamplingConfig
from pystaged.sampling.constraint import Constraint, allows
from pystaged.stats import DrafterStats

_LEAST = 0.02  # score from which a node may be judged
_HELD = 0.4  # assumed chance that the children which lookups give the root hold the target's token
_EAGER = 1.5  # assumed ratio of what a pass adds, with the passes that follow, to what its children add


class TreeDrafter:
    """Grows one tree from the candidates of all proposers, and learns how often they are right.

    With a GainPolicy, lookups expand every node that may be among the best, and each pass of the other proposer is
    bought by what it should add. With any other policy, all proposers expand the leaves that the policy chooses.
    Methods without a description do for all proposers what PassProposer's method of that name says.

    Args:
        proposers: in the order of their price: lookups in the order of mixing, then at most one other.
        policy: decides how the tree grows.
        vocab_size: the target's; tokens at or above it are never proposed.
        learnt: how often candidates are right, by whether decoding is greedy; refined here. None to begin anew.
        cost: processor seconds to look up a number of nodes, refined here. None counts 0.
        meter: measures the time of drafting; the context's, which its account reads, too.
        chains: whether trees have no branches, because a model evaluates chains alone.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        policy: TreePolicy,
        vocab_size: int,
        learnt: Mapping[bool, Calibration] | None = None,
        *,
        cost: PassCost | None = None,
        meter: Meter | None = None,
        chains: bool = False,
    ) -> None:
        self.tree: TokenTree
        self._proposers = proposers
        self._lookups = [proposer for proposer in proposers if isinstance(proposer, Lookup)]
        self._costly = next((proposer for proposer in proposers if isinstance(proposer, PassProposer)), None)
        self.recycled = next((lookup.recycled for lookup in self._lookups if lookup.recycled is not None), None)
        self._meter = meter or Meter()
        self._looking_up, self._passes = DrafterStats(), DrafterStats()
        self._policy = policy
        self._gain = policy if isinstance(policy, GainPolicy) else None
        self._chains = chains
        self._vocab_size = vocab_size
        self._cost = cost
        self._learnt = learnt or {True: Calibration(), False: Calibration()}
        self._known = self._learnt[True]
        self._constraint: Constraint | None = None
        self._tail: list[int] = []  # last tokens of the prediction and the text
        self._length = 0  # tokens of the text, its root included
        self._tree: GrowingTree | None = None  # the last tree until its outcome is known
        self._late: Sequence[Proposer] = ()  # proposers that read the text now, until `_deadline` of the meter
        self._deadline = math.inf
        self._asked = 0.0  # when preparing a pass began

    def work(self) -> dict[str, DrafterStats]:
        """Statistics of its work so far, by stage name."""
        found = {"ngram": replace(self._looking_up)}
        return found | {"draft": replace(self._passes)} if self._costly else found

    def sessions(self) -> list[Session]:
        """Its own sessions, which hold texts."""
        return [self._costly.session] if self._costly else []

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        return self._costly.reusable(prompt) if self._costly else len(prompt)

    def watch(self, prompt: NDArray[np.int32], first: int, last: int) -> None:
        self._late = [self._costly] if self._costly and self._costly.watch(prompt, first, last) else []
        self._deadline = math.inf

    def start(
        self,
        context: NDArray[np.int32],
        *,
        greedy: bool = True,
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """Begin a text. greedy: whether decoding is. constraint: the text's; forbidden nodes are cut from any tree."""
        self._tree, self._late, self._constraint = None, (), constraint
        self._tail = [*prediction, *context[-TAIL:].tolist()][-TAIL:]
        self._length = len(context)
        self._known = self._learnt[greedy]
        for learnt in self._learnt.values():
            learnt.forget()
        for proposer in self._proposers:
            proposer.start(context, prediction)

    def end(self) -> None:
        if self._tree is not None:
            self._discard()  # its outcome will not be known
        self._late, self._constraint = (), None
        for proposer in self._proposers:
            proposer.end()

    def lag(self) -> float:
        """Estimated seconds to read the tokens that its cheapest draft needs and that it has not read yet."""
        return sum(proposer.lag() for proposer in self._lookups or self._proposers)

    def price(self) -> float:
        """Estimated seconds of its cheapest draft after that: one pass or one lookup."""
        own = self._cost(1) if self._cost else 0.0
        return own if self._lookups else own + self._price(1)

    def catch_up(self, seconds: float = math.inf) -> None:
        """Let the next requests read what proposers lack of the text, for at most some seconds; so does `draft`."""
        self._deadline = self._meter() + seconds
        late = [proposer for proposer in self._proposers if not proposer.is_ready]
        self._late = [proposer for proposer in late if proposer is not self._costly or self._may_buy()]

    def _may_buy(self) -> bool:
        """Whether a pass of the costly proposer may be worth its price at the root of the next tree."""
        if self._gain is None or self._costly is None:
            return True
        gain = _EAGER * self._known.covered(()) - _HELD
        growth = Growth([], [1.0], 0, 0.0, self._length - 1, gains=[gain], price=self._price)
        return self._gain.expand(growth) > 0

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> None:
        """Begin a tree, which `request` grows to at most max_depth levels below the root, by passes that fit into
        `seconds`."""
        if self._tree is not None:
            self._discard()  # the outcome of the last tree is not known, because its step failed
        self._known = self._learnt[sampling.is_greedy]
        children = checked(self._policy, "children", self._policy.children, 1 if self._chains else MAX_CHILDREN, 1)
        tree = GrowingTree(self._tail[-1], max_depth, children, sampling, self._constraint)
        self._tree = tree
        self.catch_up(seconds)

    def request(self) -> AnyRequest | None:
        """The next pass that it needs; None if it is done."""
        tree, costly = self._tree, self._costly
        try:
            # Read what proposers lack of the text.
            while self._late:
                self._asked = self._meter()
                if read := self._late[0].catch_up(self._deadline - self._asked):
                    self._meter.stop()
                    return read
                self._late = self._late[1:]
            if tree is None or tree.rows == []:
                return None
            if tree.rows is None:  # the tree begins, with forced tokens
                tree.began = self._meter()
                tree.seconds_left = self._deadline - tree.began
                if self._constraint:
                    tree.first = tree.force(self._constraint.forced()[: min(tree.max_depth, MAX_NODES)])
                if costly and costly.is_ready and tree.first <= costly.most_forced:
                    tree.deepest = max(0, int(min(tree.max_depth, costly.most_levels())))
            # Grow it, pass by pass. A pass is made between two calls.
            while True:
                if tree.rows:
                    asked = [node for node in tree.rows if tree.nodes[node].depth < tree.deepest]
                    self._asked = self._meter()
                    if costly and asked and (request := costly.request(tree, asked)):
                        self._meter.stop()
                        return request
                    self._grow(tree, tree.rows, asked)
                if self._gain and self._lookups and not (self._chains and tree.deepest):  # a chain has no siblings
                    self._look_ahead(tree, self._gain)
                tree.rows = self._rows(tree)
                if not tree.rows and self._chains and tree.deepest and not tree.passes:
                    tree.deepest = 0  # no pass pays, so lookups draft
                    continue
                if not tree.rows:
                    self._finish(tree)
                    return None
                tree.pass_began = self._meter()
                tree.passes += 1
                tree.judged.update(tree.rows)
        except BaseException:
            self._discard()
            raise

    def take(self, request: AnyRequest) -> None:
        """Go on with the result of a pass. Raises the pass's error if the text cannot go on without it."""
        self._meter.go_on(request)
        assert self._costly
        self._costly.take(request)
        if request.error is not None or (isinstance(request, Read) and request.hidden is None):
            return  # the prefill of a draft model is no drafting
        self._passes.passes += not isinstance(request, Read)
        self._passes.native_seconds += request.share * request.seconds
        self._passes.weight_bytes += round(request.share * request.session.weight_bytes)
        if (cost := self._costly.cost) and not isinstance(request, Read):  # reading takes less than a pass of its rows
            others = (1 - request.share) * request.processor_seconds
            cost.observe(request.pass_rows, request.pass_past, self._meter() - self._asked + others, request.share)

    def _finish(self, tree: GrowingTree) -> None:
        """Keep the nodes to verify, parents before children, and count the work."""
        kept = checked(self._policy, "keep", self._policy.keep(self._growth(tree)), MAX_NODES)
        growing = self._meter() - tree.began - tree.passing
        self._looking_up.passes += tree.looked_up
        self._looking_up.seconds += growing
        self._passes.seconds += tree.passing
        if self._cost and tree.looked_up:
            self._cost.observe(tree.looked_up, 0, growing)
        self.tree = tree.build(tree.ranked()[: max(kept, tree.first)])  # what a grammar forces is certain

    def advance(self, tokens: Sequence[int]) -> None:
        """Append the tokens that the target emitted after the root. If it has not drafted, this takes almost no time,
        because plain steps are not charged for it."""
        if (tree := self._tree) is not None:
            node = 0
            for chosen in tokens:  # learn from the target's choice at each node of its path
                children = tree.children[node]
                for token, child in children.items():
                    for cell in tree.nodes[child].cells:
                        self._known.update(cell, token == chosen)
                if node in tree.judged:
                    self._known.cover(tree.nodes[node].cells, chosen in children)
                if chosen not in children:
                    break
                node = children[chosen]
        self._tree = None
        self._tail = [*self._tail, *tokens][-TAIL:]
        self._length += len(tokens)
        for proposer in self._proposers:
            proposer.advance(tokens)

    def _discard(self) -> None:
        self._tree = None
        if self._costly:
            self._costly.discard()

    def _rows(self, tree: GrowingTree) -> list[int]:
        """The nodes that the next pass expands, each after its parent; none if no pass is worth its price."""
        nodes, gains = self._unjudged(tree)
        if not nodes or not (self._gain or tree.passes):
            return nodes[:1]  # without a GainPolicy, the first is always expanded
        growth = self._growth(tree)
        growth.leaves, growth.gains = [tree.nodes[node].score for node in nodes], gains
        if self._costly and tree.deepest and not tree.passes:  # the first pass also reads what it lacks
            growth.lag = self._costly.lag() + (tree.first * self._price(1) if self._costly.by_levels else 0.0)
        left = tree.seconds_left - growth.seconds - growth.lag
        most = min(len(nodes), MAX_EXPANDED - len(tree.judged))
        width = checked(self._policy, "expand", self._policy.expand(growth), most)
        while width > 0 and growth.price(width) > left:
            width -= 1
        if self._gain and width:  # estimated, so that equal costs give equal trees; a user's policy sees measured times
            tree.seconds += growth.lag + growth.price(width)
        return nodes[:width]

    def _unjudged(self, tree: GrowingTree) -> tuple[list[int], list[float]]:
        """The nodes that the next pass may expand, best first and each after its parent. With a GainPolicy best is what
        adds most: the chance that a node's children hold the target's token, less what they hold already."""
        nodes, judged, depth = tree.nodes, tree.judged, tree.nodes[tree.first].depth
        deepest = tree.max_depth if self._lookups and not self._gain else tree.deepest
        grown = [tree.first, *(node for node in tree.ranked() if nodes[node].depth > depth)]
        grown = [node for node in grown if node not in judged and nodes[node].depth < deepest]
        if not self._gain:
            return grown, []
        by_levels = self._costly is not None and self._costly.by_levels
        gains = dict[int, float]()
        for node in grown:
            here = nodes[node]
            if here.score < _LEAST:
                break
            if node == tree.first or not by_levels or here.parent in judged:
                held = math.fsum(nodes[child].score for child in tree.children[node].values())
                gains[node] = max(0.0, _EAGER * here.score * self._known.covered(here.cells) - held)
        best = gains.copy()  # of a node and those below
        for node in reversed(gains):
            if (parent := nodes[node].parent) in best:
                best[parent] = max(best[parent], best[node])
        order = sorted(gains, key=best.__getitem__, reverse=True)
        return order, [gains[node] for node in order]

    def _look_ahead(self, tree: GrowingTree, policy: GainPolicy) -> None:
        """Expand by lookups every node that may be among those that are verified or judged."""
        grown = [tree.first, *(node for node in tree.ranked() if node > tree.first)]  # without those before, forced
        leaves = [(-tree.nodes[node].score, node) for node in grown if node not in tree.guessed]
        first, before, least, rate = tree.looked_up, tree.seconds, 0.0, self._known.rate
        while leaves:
            count = tree.looked_up - first
            if count % 4 == 0:  # less often than it changes, because it takes time
                growth = self._growth(tree)
                least = max(policy.margin(growth)[0], _LEAST / 2, *growth.scores[policy.budget - 1 : policy.budget])
            score, node = leaves.pop(0)
            if -score < least:
                break
            here = tree.nodes[node]
            if here.depth >= tree.max_depth:
                continue
            spent = before + (self._cost(count + 1) if self._cost else 0.0)
            if spent > tree.seconds_left:
                break
            tree.seconds = spent
            for token, cell in islice(self._guess(tree, node).items(), tree.most_children):
                child = here.score * rate(cell)
                if child >= least / 2:
                    insort(leaves, (-child, tree.add(node, token, child, Stage.NGRAM, (cell,))))

    def _guess(self, tree: GrowingTree, node: int) -> dict[int, Cell]:
        """The cells of the best tokens after a node that lookups find."""
        tail = [*self._tail, *tree.path(node)][-TAIL:]
        mixed = mix([lookup.after(tail) for lookup in self._lookups])
        scores = self._ranked(tree, node, mixed) if mixed.chances else {}
        cells = self._known.cells(mixed.source, list(scores.values())) if scores else []
        guesses = tree.guessed[node] = dict(zip(scores, cells, strict=True))
        tree.looked_up += 1
        return guesses

    def _ranked(self, tree: GrowingTree, node: int, found: Proposal | Candidates) -> dict[int, float]:
        """The scores of the best of the found tokens that are allowed after a node."""
        values = found.scores if isinstance(found, Candidates) else found.chances
        if tree.constraint:
            mask = tree.constraint.mask(tree.path(node))
            values = {} if mask is None else {token: values[token] for token in values if allows(mask, token)}
        # A draft's vocabulary may be padded beyond the target's.
        values = {token: value for token, value in values.items() if token < self._vocab_size}
        if isinstance(found, Candidates):
            return values
        values = {token: chance for token, chance in values.items() if chance > 0}
        return rank(values, tree.sampling, self._length + tree.nodes[node].depth, tree.num_candidates)

    def _grow(self, tree: GrowingTree, rows: list[int], asked: list[int]) -> None:
        """Add the children of nodes that the costly proposer judges, and without a GainPolicy the lookups, too."""
        found: dict[int, Candidates] = {}
        if self._costly and asked:
            self._passes.nodes += len(asked)
            for node, said in zip(asked, self._costly.propose(tree, asked), strict=True):
                found[node] = Candidates(self._ranked(tree, node, said), said.source)
            tree.passing += self._meter() - tree.pass_began
        nobody = Candidates({}, NOBODY)
        for node in rows:
            guesses = tree.guessed.get(node)
            if guesses is None:
                guesses = self._guess(tree, node) if self._lookups else {}
            named = found.get(node, nobody)
            for i, (rate, token, cells) in enumerate(self._known.judged(named, guesses)):
                if i < tree.most_children or token in tree.children[node]:
                    is_named = token in named.scores
                    stage = Stage.NGRAM if not is_named else Stage.CONFIRMED if token in guesses else Stage.DRAFT
                    tree.add(node, token, tree.nodes[node].score * rate, stage, cells)
        tree.seconds += 0.0 if self._gain else self._meter() - tree.pass_began

    def _price(self, num_nodes: int) -> float:
        """Seconds of this text's part in a pass of the costly proposer over a number of its nodes."""
        return self._costly.price(num_nodes, self._gain.texts if self._gain else 1) if self._costly else 0.0

    def _growth(self, tree: GrowingTree) -> Growth:
        scores = [tree.nodes[node].score for node in tree.ranked()]
        return Growth(scores, [], tree.passes, tree.seconds, self._length - 1, price=self._price)
