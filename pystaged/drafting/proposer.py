"""What a proposer is asked, and what it says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pystaged._core import RecycledCandidates, Session
from pystaged.config import SamplingConfig
from pystaged.decoding.constraint import Constraint, allows
from pystaged.decoding.meter import Meter
from pystaged.decoding.requests import Requests
from pystaged.decoding.tree import Stage, TreeBuilder
from pystaged.stats import DrafterStats

TAIL = 4  # tokens that the longest n-gram looks back at


class GrowingTree(TreeBuilder):
    """A tree that grows at the end of a text.

    Args:
        tail: the last tokens of the text, at most TAIL; the last one is the root.
        length: tokens of the text, the root included.
        max_depth: levels at most.
        num_candidates: wanted of each node.
        sampling: the text's.
        constraint: what the text must be, None for anything.
        vocab_size: tokens from here on are never proposed.
    """

    def __init__(
        self,
        tail: Sequence[int],
        length: int,
        max_depth: int,
        num_candidates: int,
        sampling: SamplingConfig,
        constraint: Constraint | None,
        vocab_size: int,
    ) -> None:
        super().__init__(tail[-1])
        self.length = length
        self.max_depth = max_depth
        self.num_candidates = num_candidates
        self.sampling = sampling
        self.constraint = constraint
        self.vocab_size = vocab_size
        self._tails = {0: list(tail)}

    def tail(self, node: int) -> list[int]:
        """The last TAIL tokens of the text that ends with a node."""
        found = self._tails.get(node)
        if found is None:
            guess = self.nodes[node]
            found = self._tails[node] = [*self.tail(guess.parent)[1 - TAIL :], guess.token]
        return found

    def allowed(self, chances: dict[int, float], path: Sequence[int]) -> dict[int, float]:
        """What may be proposed after a path below the root, which matters to a constraint alone."""
        possible = {token: chance for token, chance in chances.items() if token < self.vocab_size and chance > 0}
        if not self.constraint:
            return possible
        mask = self.constraint.mask(path)
        return {} if mask is None else {t: chance for t, chance in possible.items() if allows(mask, t)}


@dataclass(slots=True)
class Proposal:
    """What may follow a node, by one proposer; the proposals of several are mixed.

    chances: the probability of each token. source: who says so and on what grounds, see mixing.py.
    """

    chances: dict[int, float]
    source: int


@dataclass(slots=True)
class Candidates:
    """The best tokens after a node under the text's noise, best first.

    scores: log p / temperature + noise, log p where the text is greedy. source: as in Proposal.
    following: the candidates after some of these tokens, where they are known already.
    """

    scores: dict[int, float]
    source: int
    following: dict[int, Candidates] = field(default_factory=dict)


class Proposer:
    """Says what may follow the nodes of a tree. All but `propose` have defaults, those of a lookup without a state.

    What may need passes is a generator of requests for them; the session of such passes is the proposer's own.

    stage: what its tokens count as. recycled: what it looks up and the target's rows teach, None for nothing.
    stats, meter: of the drafter that it belongs to, which sets them.
    """

    stage = Stage.NGRAM
    recycled: RecycledCandidates | None = None
    stats: DrafterStats
    meter: Meter

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> Requests[Sequence[Proposal | Candidates]]:
        """What may follow each node, `num_candidates` tokens or more where it can; Candidates of a proposer that is the
        drafter's only one. Each node is asked for once, after its parent."""
        raise NotImplementedError

    def price(self, num_nodes: int) -> float:
        """Seconds of the pass that it would ask for to propose for so many nodes, beyond the drafter's own cost."""
        del num_nodes
        return 0.0

    def start(self, context: NDArray[np.int32], prediction: Sequence[int]) -> None:
        """Begin a text: all its tokens so far, int32[n], the last of which is the root; and what may follow them."""

    def begin(self, tree: GrowingTree, node: int, seconds: float) -> Requests[None]:
        """Begin a tree. `node` will be asked for first; the nodes on the path to it are certain."""
        del tree, node, seconds
        yield from ()

    def advance(self, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens, the last of which is the next root."""

    def discard(self) -> None:
        """Forget the current tree: its outcome will not be known."""

    def end(self) -> None:
        """The text is over: free what the next start would discard."""

    @property
    def is_ready(self) -> bool:
        """Whether it has read enough of the text to propose."""
        return True

    def lag(self) -> float:
        """Seconds that reading the rest of the text will take, about."""
        return 0.0

    def catch_up(self, seconds: float = math.inf) -> Requests[None]:
        """Read the rest of the text, as much as it can in so many seconds."""
        del seconds
        yield from ()

    def most_levels(self) -> float:
        """Levels of a tree that it has room for."""
        return math.inf

    def sessions(self) -> list[Session]:
        """Its own, in which it reads the text."""
        return []

    def inherit(self, other: Proposer) -> None:
        """Believe what another one of its kind has learnt."""
