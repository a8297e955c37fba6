"""The interface of a proposer, the growing tree that it is given, and its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pystaged._core import ModelError, Session
from pystaged.decoding.cost import PassCost
from pystaged.decoding.requests import AnyRequest, Read
from pystaged.decoding.tree import Cell, TreeBuilder
from pystaged.options.config import SamplingConfig
from pystaged.sampling.constraint import Constraint

_LEAST_READ = 8  # least tokens that are read where not all seem to fit
_CANDIDATES = 6  # per node; even where fewer become children, all are needed for the share of the first


class GrowingTree(TreeBuilder):
    """A growing tree at the end of a text.

    Args:
        root: the last token of the text.
        max_depth: most levels below the root.
        most_children: children per node.
        sampling, constraint: the text's.
    """

    def __init__(
        self, root: int, max_depth: int, most_children: int, sampling: SamplingConfig, constraint: Constraint | None
    ) -> None:
        super().__init__(root)
        self.max_depth, self.most_children = max_depth, most_children
        self.num_candidates = max(_CANDIDATES, most_children)  # wanted per node
        self.sampling, self.constraint = sampling, constraint
        self.first = 0  # the node that proposers begin with: the root, or the last forced node
        self.guessed: dict[int, dict[int, Cell]] = {}  # the cells of the lookups' tokens, by node
        self.judged: set[int] = set()  # nodes that a pass expanded
        self.deepest = 0  # depth from which the costly proposer judges no nodes; 0 if it takes no part
        self.passes = self.looked_up = 0  # passes, and nodes that lookups expanded
        self.seconds = 0.0  # prices of its lookups and passes
        self.passing = 0.0  # measured seconds of its passes
        self.rows: list[int] | None = None  # nodes that the current pass expands
        self.began = self.pass_began = 0.0  # when drafting began, after reading the text; when the current pass began
        self.seconds_left = math.inf  # for all passes


@dataclass(slots=True)
class Proposal:
    """One proposer's distribution after a node, to be mixed with others'.

    chances: probability by token. source: a source of calibration.py.
    """

    chances: dict[int, float]
    source: int


@dataclass(slots=True)
class Candidates:
    """The best tokens after a node under the text's sampling noise, best first.

    scores: log p / temperature + noise by token; log p if decoding is greedy. source: as in Proposal.
    """

    scores: dict[int, float]
    source: int


class Proposer:
    """Follows a text. The defaults are those of a proposer without state, which need not read it."""

    def start(self, context: NDArray[np.int32], prediction: Sequence[int]) -> None:
        """Begin a text with all its tokens so far, int32[n], the last of which is the root; and its
        prediction: tokens expected after the prompt, no part of the text."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text; the last of them is the next root."""

    def end(self) -> None:
        """End the text and free what the next start would discard."""

    @property
    def is_ready(self) -> bool:
        """Whether it has read enough of the text to propose."""
        return True

    def lag(self) -> float:
        """Estimated seconds to read the rest of the text."""
        return 0.0

    def catch_up(self, _seconds: float = math.inf) -> Read | None:
        """Read the rest of the text, as much as fits into some seconds; returns the next pass that this needs."""
        return None


class PassProposer(Proposer):
    """Proposes by passes of a draft: each `request` is made and given to `take`, until there is none, then `propose`.

    Args:
        session: the draft's own context.
        cost: processor seconds of a pass, refined by the drafter; None counts 0.
    """

    by_levels = False  # whether a node's parent must have been in an earlier pass
    most_forced = math.inf  # forced tokens before the first guess; by levels each takes a pass

    def __init__(self, session: Session, cost: PassCost | None = None) -> None:
        self.session, self.cost = session, cost
        self._length = 0  # tokens of the text that the session holds
        self._unread: list[int] = []  # those that it does not hold yet
        self._root = 0
        self._is_lost = False  # whether it cannot draft in this text
        self._asked: Sequence[int] = ()  # nodes that the current pass evaluates

    def request(self, tree: GrowingTree, nodes: Sequence[int]) -> AnyRequest | None:
        """The next pass that it needs to propose tokens after these nodes; the nodes on the path to the tree's first
        one are forced."""
        raise NotImplementedError

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> Sequence[Proposal | Candidates]:
        """Propose tokens after each node, if possible `num_candidates` or more. Is called once for each node, after or
        together with its parent."""
        raise NotImplementedError

    def price(self, num_nodes: int, texts: int = 1) -> float:
        """Estimated seconds of one text's part in a pass for so many nodes of each text, without the drafter's own."""
        texts = 1 if hasattr(self.session, "run") else texts  # on RPC servers each has a pass of its own
        return self.cost(num_nodes * texts, self._length) / texts if self.cost else 0.0

    def lag(self) -> float:
        if self._is_lost:
            return math.inf
        return self._reading(self.cost, len(self._unread)) if self.cost and self._unread else 0.0

    def _reading(self, cost: PassCost, unread: int) -> float:
        """Estimated seconds to read a number of the unread tokens; here of the root's pass, which reads them, too."""
        return max(0.0, cost(unread + 1, self._length) - cost(1, self._length))

    def _fitting(self, count: int, seconds: float) -> int:
        """How many of the first unread tokens can be read in some seconds; 0 where only a few of them fit."""
        if self.cost and (believed := self._reading(self.cost, count)) > seconds:
            count = int(count * max(0.0, seconds) / believed)
            return count if count >= _LEAST_READ else 0
        return count

    def most_levels(self) -> float:
        """Levels of a tree that its context has room for."""
        return math.inf

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        """Number of tokens at the beginning of a prompt, int32[n], that the target need not read again for it."""
        return len(prompt)

    def watch(self, _prompt: NDArray[np.int32], _first: int, _last: int) -> bool:
        """The target has read the tokens [first, last) of a prompt, int32[n], and holds their hidden states. Returns
        whether this proposer reads them now."""
        return False

    def take(self, request: AnyRequest) -> None:
        """Take the result of a pass. Raises the pass's error if the text cannot go on without it."""
        if isinstance(request.error, ModelError):  # its values overflow; the text goes on without it
            self._lose()
        elif request.error is not None:
            raise request.error
        elif isinstance(request, Read):
            self._note_read(request.result)
        else:
            self.keep(request)

    def discard(self) -> None:
        """Drop the current tree, whose outcome will not be known."""
        self._forget()

    def _lose(self) -> None:
        """Drop the current tree, and draft no more in this text."""
        self._is_lost, self._unread = True, []
        self._forget()

    def _note_read(self, count: int) -> None:
        """Count the first unread tokens as read."""
        self._length += count
        self._unread = self._unread[count:]

    def keep(self, request: AnyRequest) -> None:
        """Keep what a pass for a tree found."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Discard what was evaluated after the root."""
        self.session.discard()
