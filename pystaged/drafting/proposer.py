"""The interface of a proposer, the growing tree that it is given, and its answers."""

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

TAIL = 16  # tokens of the longest n-gram


class GrowingTree(TreeBuilder):
    """A growing tree at the end of a sequence.

    Args:
        tail: the last tokens of the sequence, at most TAIL; the last one is the root.
        length: tokens of the sequence, the root included.
        max_depth: most levels below the root.
        num_candidates: wanted candidates per node.
        sampling: the sequence's sampling.
        constraint: the sequence's constraint, or None.
        vocab_size: tokens at or above it are never proposed.
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
        """The last TAIL tokens of the sequence up to a node."""
        found = self._tails.get(node)
        if found is None:
            guess = self.nodes[node]
            found = self._tails[node] = [*self.tail(guess.parent)[1 - TAIL :], guess.token]
        return found

    def allowed(self, chances: dict[int, float], path: Sequence[int]) -> dict[int, float]:
        """The chances of the tokens that are allowed after a path below the root."""
        possible = {token: chance for token, chance in chances.items() if token < self.vocab_size and chance > 0}
        if not self.constraint:
            return possible
        mask = self.constraint.mask(path)
        return {} if mask is None else {t: chance for t, chance in possible.items() if allows(mask, t)}


@dataclass(slots=True)
class Proposal:
    """One proposer's distribution after a node, to be mixed with others'.

    chances: probability by token. source: a source of mixing.py.
    """

    chances: dict[int, float]
    source: int


@dataclass(slots=True)
class Candidates:
    """The best tokens after a node under the sequence's sampling noise, best first.

    scores: log p / temperature + noise by token; log p if decoding is greedy. source: as in Proposal.
    following: the candidates after those of the tokens for which the same pass found them.
    """

    scores: dict[int, float]
    source: int
    following: dict[int, Candidates] = field(default_factory=dict)


class Proposer:
    """Proposes tokens after the nodes of a tree. All methods but `propose` have defaults for a lookup without state.

    Methods that may need passes are generators of requests, whose session is the proposer's own.

    stage: stage of its tokens. places: consecutive tokens that it proposes at once. recycled: the candidates that it
    looks up and that learn from the target's rows, or None. stats, meter: those of its drafter, which sets them.
    """

    stage = Stage.NGRAM
    places = 1
    recycled: RecycledCandidates | None = None
    stats: DrafterStats
    meter: Meter

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> Requests[Sequence[Proposal | Candidates]]:
        """Propose tokens after each node, if possible `num_candidates` or more. Returns Candidates if it is the only
        proposer of its drafter, else Proposals. Is called once for each node, after its parent."""
        raise NotImplementedError

    def price(self, num_nodes: int) -> float:
        """Estimated seconds of its pass to propose for a number of nodes, not counting the drafter's own cost."""
        del num_nodes
        return 0.0

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        """Number of tokens at the beginning of a prompt, int32[n], that the target need not read again for it."""
        return len(prompt)

    def watch(self, prompt: NDArray[np.int32], first: int, last: int) -> Requests[None]:
        """The target has read the tokens [first, last) of a prompt, int32[n], and holds their hidden states."""
        del prompt, first, last
        yield from ()

    def start(self, context: NDArray[np.int32], prediction: Sequence[int]) -> None:
        """Begin a sequence with all its tokens so far, int32[n], the last of which is the root; and its prediction."""

    def begin(self, tree: GrowingTree, node: int, seconds: float) -> Requests[None]:
        """Begin a tree. `node` is the first to propose for; the nodes on the path to it are forced."""
        del tree, node, seconds
        yield from ()

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence; the last of them is the next root."""

    def discard(self) -> None:
        """Drop the current tree, whose outcome will not be known."""

    def end(self) -> None:
        """End the sequence and free what the next start would discard."""

    @property
    def is_ready(self) -> bool:
        """Whether it has read enough of the sequence to propose."""
        return True

    def lag(self) -> float:
        """Estimated seconds to read the rest of the sequence."""
        return 0.0

    def catch_up(self, seconds: float = math.inf) -> Requests[None]:
        """Read the rest of the sequence, as much as fits into `seconds`."""
        del seconds
        yield from ()

    def most_levels(self) -> float:
        """Levels of a tree that its context has room for."""
        return math.inf

    def sessions(self) -> list[Session]:
        """Its own sessions, which hold the sequence."""
        return []

    def inherit(self, other: Proposer) -> None:
        """Copy the learnt state of a proposer of the same kind."""
