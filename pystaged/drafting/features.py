"""Drafts that read the target's hidden states. EAGLE-3 (Li et al. 2025, arXiv 2503.01840), MTP layers (DeepSeek-V3,
arXiv 2412.19437), DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147) read those of every token, Gemma 4's
assistants that of the last one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import HiddenRows, Model, ModelError, Session
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import common_prefix
from pystaged.decoding.requests import AnyRequest, Propose, Read
from pystaged.drafting.calibration import FEATURES
from pystaged.drafting.proposer import GrowingTree, PassProposer, Proposal
from pystaged.options.config import SamplingConfig

_CANDIDATES = 16  # per node
_LEAST_READ = 32  # queued rows that are read without waiting for a tree
_MOST_UNREAD = 512  # queued rows; with more the draft stops drafting in this text
_WORTH_READING = 64  # if the draft lacks the hidden states of at most this many tokens, the target reads them again
_GREEDY = SamplingConfig().native


class FeatureProposer(PassProposer):
    """Reads one row, the target's hidden states, for each token of the text except the root.

    Rows are queued, and read when a tree is drafted or when many are queued. Only committed tokens stay in the draft's
    KV cache; what it computed for guesses is discarded.

    Args:
        session: the draft's context.
        model: the draft.
        target: the target's session; it holds the hidden states of the tokens that it read or verified last.
        cost: processor seconds of a pass of the draft; None for 0.
    """

    ahead = 0  # positions from a row's hidden states to the row's token

    def __init__(self, session: Session, model: Model, target: Session, cost: PassCost | None = None) -> None:
        super().__init__(session, cost)
        self._model, self._target = model, target
        self._head_tokens = model.head_tokens
        self._num_candidates = min(_CANDIDATES, len(self._head_tokens) or model.vocab_size)
        self._hidden: HiddenRows | None = None  # of the unread rows

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        self._align()
        held = np.concatenate([self.session.tokens, np.array(self._unread, np.int32)])
        found = common_prefix(held, prompt[self.ahead :])
        kept = min(common_prefix(self._target.tokens, prompt), len(prompt) - 1)
        # If the target would have to read many tokens again, the draft is not used in this text.
        return found if kept - found <= max(_WORTH_READING, len(prompt) - kept) else len(prompt)

    def watch(self, prompt: NDArray[np.int32], first: int, last: int) -> bool:
        self._go_to(first)
        self._add(prompt[first + self.ahead : last + self.ahead].tolist())
        return True

    def start(self, context: NDArray[np.int32], _prediction: Sequence[int]) -> None:
        self._root = int(context[-1])
        self._go_to(len(context) - 1)

    def advance(self, tokens: Sequence[int]) -> None:
        self._forget()
        self._add([self._root, *tokens][self.ahead : self.ahead + len(tokens)])
        self._root = tokens[-1]
        if len(self._unread) > _MOST_UNREAD:
            self._lose()

    @property
    def is_ready(self) -> bool:
        return not self._is_lost and len(self._unread) <= _LEAST_READ

    def catch_up(self, seconds: float = math.inf) -> Read | None:
        unread = len(self._unread) - 1  # the last row belongs to the first pass of the next tree
        fitting = self._fitting(unread, seconds) if unread >= _LEAST_READ else 0
        return self._read(fitting) if fitting else None

    def _lose(self) -> None:
        super()._lose()
        self._hidden = None

    def _read(self, count: int) -> Read:
        """The pass that reads the first unread rows."""
        assert self._hidden is not None
        tokens = np.array(self._unread[:count], np.int32)
        return Read(self.session, self._length, tokens, hidden=self._hidden[:count])

    def _note_read(self, count: int) -> None:
        super()._note_read(count)
        assert self._hidden is not None
        self._hidden = self._hidden[count:].copy()

    def _add(self, tokens: list[int]) -> None:
        """Take the hidden states that the target has just computed, of as many rows as there are tokens."""
        hidden = self._target.hidden
        if self._is_lost or len(hidden) != len(tokens):
            self._lose()
            return
        both = self._hidden + hidden if self._hidden else hidden
        self._unread, self._hidden = self._unread + tokens, both

    def _go_to(self, position: int) -> None:
        """Keep the first `position` rows; if some are missing, the draft is lost."""
        self._forget()
        self._align()
        unread = position - self._length
        if unread < 0:
            self._unread, self._hidden = [], None
            self._length = self.session.rewind(position)
        elif self._hidden:
            self._unread, self._hidden = self._unread[:unread], self._hidden[:unread]
        self._is_lost = self._length + len(self._unread) != position

    def _align(self) -> None:
        """Drop queued rows that do not follow the session's rows, because it was rewound or a call was interrupted."""
        held, unread = len(self.session.tokens), len(self._hidden) if self._hidden else 0
        if held != self._length or unread != len(self._unread):
            self._unread, self._hidden, self._length = [], None, held

    def _proposal(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Proposal:
        """The proposal of rows of the draft's head, -1 for none, and their log-probabilities."""
        known = tokens >= 0
        tokens, logprobs = tokens[known], logprobs[known]
        if len(self._head_tokens):
            tokens = self._head_tokens[tokens]
        return Proposal(dict(zip(tokens.tolist(), np.exp(logprobs).tolist(), strict=True)), FEATURES)


class EagleProposer(FeatureProposer):
    """EAGLE-3 and MTP: a row combines the hidden states of one token with the next token. A guess's row has the draft's
    hidden state of its parent instead of the target's, so each level of the tree takes a pass."""

    ahead = 1
    by_levels = True
    most_forced = 4

    def __init__(self, session: Session, model: Model, target: Session, cost: PassCost | None = None) -> None:
        super().__init__(session, model, target, cost)
        self._judged: dict[int, tuple[Proposal, HiddenRows, int]] = {}  # after each node, and its pending row

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        # The row of the root is read when a tree is drafted.
        found = super().reusable(prompt)
        is_read = found == len(prompt) - 1 and found <= self._length
        return max(0, found - is_read)

    def most_levels(self) -> float:
        return self.session.n_ctx - self._length - len(self._unread)

    def _reading(self, cost: PassCost, unread: int) -> float:
        return super()._reading(cost, unread - 1)  # the last row is the root's

    def discard(self) -> None:
        self.session.discard()
        self._judged = {node: judged for node, judged in self._judged.items() if node == 0}

    def request(self, tree: GrowingTree, nodes: Sequence[int]) -> Propose | None:
        if 0 not in self._judged:  # the root is the last row of what is unread
            chain = range(-1, len(self._unread) - 1)
            return self._evaluate([0], self._unread, chain, self._hidden) if self._hidden else None
        nodes = [node for node in range(1, tree.first) if node not in self._judged][:1] or nodes
        parents = [tree.nodes[node].parent for node in nodes]
        if all(node in self._judged for node in nodes) or any(parent not in self._judged for parent in parents):
            return None  # they are found; or it is lost
        _, states, rows = zip(*(self._judged[parent] for parent in parents), strict=True)
        tokens = [tree.nodes[node].token for node in nodes]
        return self._evaluate(nodes, tokens, rows, sum(states[1:], states[0]))

    def propose(self, _tree: GrowingTree, nodes: Sequence[int]) -> list[Proposal]:
        return [self._judged[node][0] if node in self._judged else Proposal({}, FEATURES) for node in nodes]

    def _evaluate(
        self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int], hidden: HiddenRows
    ) -> Propose:
        self._asked, k = nodes, self._num_candidates
        return Propose(self.session, self._length, tokens, parents, len(nodes), k, _GREEDY, hidden=hidden)

    def keep(self, request: AnyRequest) -> None:
        found = [self._proposal(*map(np.array, each)) for each in zip(*request.result, strict=True)]
        first = self.session.num_pending - len(self._asked)
        for row, (node, proposal) in enumerate(zip(self._asked, found, strict=True), first):
            self._judged[node] = proposal, self.session.hidden_of([row]), row if node else -1
        if self._asked[0] == 0 and not self._model.borrows_cells:  # the rows that the root's pass read
            self.session.commit(range(request.num_rows))
            self._note_read(request.num_rows)

    def _forget(self) -> None:
        super()._forget()
        self._judged = {}


class AssistantProposer(EagleProposer):
    """Gemma 4's assistants: rows as in EAGLE-3 and MTP, but they attend to keys and values of the target's session. So
    the draft reads no text; the root's row needs only the target's hidden state of the token before it."""

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        return max(0, len(prompt) - 2)  # the target reads the token before the root

    @property
    def is_ready(self) -> bool:
        return self._hidden is not None  # that of the token before the root, which the first of a text lacks

    def most_levels(self) -> float:
        return math.inf if self._length < self.session.n_ctx else 0

    def _go_to(self, position: int) -> None:
        self._forget()
        if self._length != position:
            self._length, self._hidden = position, None
        self._is_lost = False

    def _add(self, tokens: list[int]) -> None:
        self._length += len(tokens)
        self._unread, self._hidden = tokens[-1:], None if self._is_lost else self._target.hidden[-1:].copy() or None


class BlockProposer(FeatureProposer):
    """DFlash and DSpark: the target's hidden states become the draft's KV cache. One pass over a block, the root and
    mask tokens, gives proposals for all depths of a tree; with a Markov head they also depend on the parent's token."""

    def __init__(self, session: Session, model: Model, target: Session, cost: PassCost | None = None) -> None:
        super().__init__(session, model, target, cost)
        self._first = 0 if model.is_anchored else 1  # row of the first proposal
        self._is_evaluated = False

    def price(self, _num_nodes: int, texts: int = 1) -> float:
        return 0.0 if self._is_evaluated else super().price(self._model.block_size, texts)

    def _reading(self, cost: PassCost, unread: int) -> float:
        # A pass of its own over less than half of the weights.
        return cost(unread, self._length) / 2

    def most_levels(self) -> float:
        room, size = self.session.n_ctx - self._length - len(self._unread), self._model.block_size
        return size - self._first if room >= size else 0

    def request(self, _tree: GrowingTree, _nodes: Sequence[int]) -> AnyRequest | None:
        if self._is_evaluated or self._is_lost:
            return None
        if self._unread:
            return self._read(len(self._unread))
        size = self._model.block_size
        block = [self._root, *[self._model.mask_token] * (size - 1)]
        return Propose(self.session, self._length, block, range(-1, size - 1), size, 0, _GREEDY)

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> list[Proposal]:
        if self._is_evaluated:
            rows = [self._first + tree.nodes[node].depth for node in nodes]
            before = [tree.nodes[node].token for node in nodes] if self._model.has_markov else []
            try:
                found = self.session.likeliest(rows, before, self._num_candidates)
                return [self._proposal(*each) for each in zip(*found, strict=True)]
            except ModelError:
                self._lose()
        return [Proposal({}, FEATURES) for _ in nodes]

    def keep(self, _request: AnyRequest) -> None:
        self._is_evaluated = True

    def _forget(self) -> None:
        super()._forget()
        self._is_evaluated = False


def feature_proposer(session: Session, model: Model, target: Session, cost: PassCost | None = None) -> FeatureProposer:
    """The proposer of a draft that reads the target's hidden states. Arguments as in FeatureProposer."""
    kind = BlockProposer if model.block_size else AssistantProposer if model.borrows_cells else EagleProposer
    return kind(session, model, target, cost)
