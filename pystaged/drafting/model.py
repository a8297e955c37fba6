"""Drafts with a model, which may have a drafter of its own below it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.config import SamplingConfig
from pystaged.decoding.budget import Choice
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter, common_prefix
from pystaged.decoding.policy import Growth, TreePolicy
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.drafting.growing import CANDIDATES, TreeDrafter
from pystaged.drafting.ngrams import LOOKUP_SECONDS, NgramDrafter
from pystaged.stats import DrafterStats

_LONGEST_PREFIX_ROWS = 16  # rows a drafter catches up on together with the root, rather than in passes of their own
_GUESSES = 3  # tokens the drafter below proposes for each pass
_GUESS_GAIN = 0.25  # of a pass, what guesses from below are believed to save before they are tried


class ModelDrafter(TreeDrafter):
    """Grows a tree level by level with a draft model, several leaves in one pass of it.

    The drafter below proposes tokens that ride along in each pass; those the draft itself ranks among its candidates
    deepen the tree without another pass, the rest are dropped.

    Args:
        session: the draft's own context.
        policy: decides how the tree grows.
        below: a cheaper drafter, None for none.
        cost: seconds of a pass, refined here.
        vocab_size: the target's; tokens from here on are never proposed.
    """

    def __init__(
        self,
        session: Session,
        policy: TreePolicy,
        *,
        below: Drafter | None = None,
        cost: PassCost | None = None,
        vocab_size: int,
    ) -> None:
        super().__init__(Stage.DRAFT, policy)
        self.session = session
        self.below = below
        self._cost = cost
        self._vocab_size = vocab_size
        self._choice = Choice([(1 + _GUESS_GAIN, 1.0)] if cost else [])
        self._length = 0  # tokens committed in the session
        self._missing: list[int] = []  # tokens of the context that the session has not seen
        self._root = 0
        self._num_rows = 0

    def start(self, context: NDArray[np.int32]) -> None:
        known = self.session.tokens
        self._length = common_prefix(known, context[:-1])
        self.session.truncate(self._length)
        self._missing = context[self._length : -1].tolist()
        self._root = int(context[-1])
        self._builder = None
        if self.below:
            self.below.start(context)
        if self._cost:
            self._choice.open()

    def lag(self) -> float:
        return self._cost(len(self._missing)) if self._cost and self._missing else 0.0

    def catch_up(self) -> None:
        room = self.session.n_ctx - self._length
        if self._missing and len(self._missing) <= room and self._can_read(self._missing):
            self.session.prefill(self._missing)
            self._length += len(self._missing)
            self._missing = []
        if self.below:
            self.below.catch_up()

    def draft(self, sampling: SamplingConfig, max_depth: int) -> TokenTree:
        begin = time.perf_counter()
        self._builder = None
        self._calibration = self._calibrations[sampling.is_greedy]
        # A row for the root, and one for each level but the last.
        max_depth = min(max_depth, self.session.n_ctx - self._length - len(self._missing))
        if max_depth < 1 or not self._can_read([*self._missing, self._root]):
            return TokenTree.root(self._root)
        if self.below:
            self.below.prepare(sampling, max_depth)
        builder, batch, passes = TreeBuilder(self._root), [0], 0
        self._num_rows = 0
        try:
            if len(self._missing) > _LONGEST_PREFIX_ROWS:
                self.catch_up()
            while True:
                self._pass(builder, batch, sampling, max_depth)
                passes += 1
                best, nodes = builder.best(), builder.nodes
                leaves = [node for node in best if nodes[node].row < 0 and nodes[node].depth < max_depth]
                leaves = [leaf for leaf in leaves if nodes[leaf].token < self.session.vocab_size]
                growth = Growth(
                    [nodes[node].score for node in best],
                    [nodes[leaf].score for leaf in leaves],
                    passes,
                    time.perf_counter() - begin,
                )
                width = self._policy.expand(growth)
                if width == 0 or not leaves:
                    break
                batch = leaves[:width]
        except BaseException:
            self.session.discard()
            raise
        self.stats.passes += passes
        self.stats.seconds += time.perf_counter() - begin
        return self._finish(builder, growth)

    def _pass(self, builder: TreeBuilder, batch: list[int], sampling: SamplingConfig, max_depth: int) -> None:
        """Evaluate a batch of nodes, and guesses from below after the best of them; add everybody's candidates."""
        begin = time.perf_counter()
        first = batch[0]
        guesses: list[int] = []
        use_below = self.below is not None and self._choose_below()
        if use_below and self.below:
            room = max_depth - 1 - builder.nodes[first].depth
            guesses = self.below.extend(builder.path(first), min(_GUESSES, room))
            guesses = guesses[: next((i for i, token in enumerate(guesses) if not self._can_read([token])), None)]
        looked_up = time.perf_counter()
        tokens, parents = [], []
        if self._num_rows == 0:
            tokens = list(self._missing)
            parents = list(range(-1, len(tokens) - 1))
        for node in batch:
            guess = builder.nodes[node]
            parents.append(len(tokens) - 1 if node == 0 else builder.nodes[guess.parent].row)
            guess.row = self._num_rows + len(tokens)
            tokens.append(guess.token)
        before = builder.nodes[first].row
        for token in guesses:
            parents.append(before)
            before = self._num_rows + len(tokens)
            tokens.append(token)
        judged = len(batch) + len(guesses)
        start = time.perf_counter()
        self.session.evaluate(tokens, parents, judged)
        self._num_rows += len(tokens)
        rows = range(self._num_rows - judged, self._num_rows)
        found, scores = self.session.candidates(list(rows), max(CANDIDATES, self._policy.children), sampling.native)
        self.stats.native_seconds += time.perf_counter() - start
        self.stats.weight_bytes += self.session.weight_bytes
        found_lists, score_lists = found.tolist(), scores.tolist()
        for i, node in enumerate(batch):
            self._add(builder, node, found_lists[i], score_lists[i])
        node, confirmed = first, 0
        for i, token in enumerate(guesses):
            child = builder.children[node].get(token)
            if child is None:
                break
            builder.nodes[child].row = rows[len(batch) + i]
            builder.nodes[child].stage = Stage.NGRAM if isinstance(self.below, NgramDrafter) else Stage.DRAFT
            self._add(builder, child, found_lists[len(batch) + i], score_lists[len(batch) + i])
            node = child
            confirmed += 1
        if self._cost:
            # Every guess that came true is a pass saved; the others are rows and a lookup for nothing.
            alone = self._cost(len(tokens) - len(guesses)) / self._cost(1)
            with_guesses = (self._cost(len(tokens)) + looked_up - begin) / self._cost(1)
            self._choice.record(0 if use_below else None, alone + confirmed, with_guesses)
            self._cost.observe(len(tokens), time.perf_counter() - begin)
        self.stats.guessed += len(guesses)
        self.stats.confirmed += confirmed

    def _choose_below(self) -> bool:
        """Whether guesses from below are worth having in the next pass."""
        return self._cost is None or self._choice.choose([_GUESSES * LOOKUP_SECONDS / self._cost(1)]) == 0

    def _add(self, builder: TreeBuilder, node: int, tokens: list[int], scores: list[float]) -> None:
        # Filters may leave fewer candidates, and the draft's vocabulary may be padded beyond the target's.
        good = [i for i, token in enumerate(tokens) if 0 <= token < self._vocab_size]
        if good:
            self._expand(builder, node, [tokens[i] for i in good], [scores[i] for i in good])

    def prepare(self, sampling: SamplingConfig, max_depth: int) -> None:
        self.draft(sampling, max_depth)

    def extend(self, path: list[int], length: int) -> list[int]:
        if self._builder is None:
            return []
        node = 0
        for token in path:
            child = self._builder.children[node].get(token)
            if child is None:
                return []
            node = child
        nodes = self._builder.nodes
        found: list[int] = []
        while len(found) < length and self._builder.children[node]:
            node = max(self._builder.children[node].values(), key=lambda child: nodes[child].score)
            found.append(nodes[node].token)
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        emitted = [self._root, *tokens]
        if self._builder is None:
            self._missing += emitted[:-1]
        else:
            rows = list(range(len(self._missing)))
            for node in self._learn(tokens):
                if self._builder.nodes[node].row < 0:
                    break
                rows.append(self._builder.nodes[node].row)
            self.session.commit(rows)
            self._length += len(rows)
            self._missing = emitted[len(rows) - len(self._missing) : -1]
        self._root = emitted[-1]
        self._builder = None
        if self.below:
            self.below.advance(tokens)

    def work(self) -> dict[str, DrafterStats]:
        below = self.below.work() if self.below else {}
        # A model below a model is told from it by its place.
        below = {f"{name} below" if name == "draft" else name: stats for name, stats in below.items()}
        return super().work() | below

    def close(self) -> None:
        self.session.close()
        if self.below:
            self.below.close()

    def _can_read(self, tokens: Sequence[int]) -> bool:
        return max(tokens) < self.session.vocab_size
