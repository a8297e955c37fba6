"""Drafters propose trees of tokens: a model, or n-grams. A model may have a drafter of its own below it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session, gumbel
from pystaged.calibration import Calibration
from pystaged.choice import Choice
from pystaged.config import SamplingConfig
from pystaged.cost import PassCost
from pystaged.ngram import ContextNgrams, NgramTable
from pystaged.policy import Growth, TreePolicy
from pystaged.stats import DrafterStats
from pystaged.tree import Stage, TokenTree, TreeBuilder

_LONGEST_PREFIX_ROWS = 16  # rows a drafter catches up on together with the root, rather than in passes of their own
_GUESSES = 3  # tokens the drafter below proposes for each pass
_CANDIDATES = 6  # per node; even where fewer become children, the others tell how sure the first one is
_TAIL = 4  # tokens an n-gram lookup can use
LOOKUP_SECONDS = 60e-6  # of one n-gram lookup with all that Python does around it
_READ_SECONDS = 2e-6  # a token's n-grams
_GUESS_GAIN = 0.25  # of a pass, what guesses from below are believed to save before they are tried


class Drafter(Protocol):
    """Proposes what comes after a context that it follows step by step."""

    def work(self) -> dict[str, DrafterStats]:
        """What it and the drafters below it have done so far, by name."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...

    def start(self, context: NDArray[np.int32]) -> None:
        """Begin a text: all its tokens so far, int32[n], the last of which is the root."""
        ...

    def lag(self) -> float:
        """Seconds that catching up with the text will take, about."""
        ...

    def catch_up(self) -> None:
        """Read what it has not read of the text yet; drafting does that too."""
        ...

    def draft(self, sampling: SamplingConfig, max_depth: int) -> TokenTree:
        """A tree below the root, at most max_depth deep; the root alone where there is nothing to propose."""
        ...

    def prepare(self, sampling: SamplingConfig, max_depth: int) -> None:
        """Get ready for `extend`, as the drafter below another one."""
        ...

    def extend(self, path: list[int], length: int) -> list[int]:
        """At most `length` tokens that may follow the root and a path below it."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow the target, which emitted these tokens after the root; the last of them is the next root."""
        ...


class TreeDrafter:
    """What drafters have in common: a tree that grows under a policy, and what its outcome teaches.

    Args:
        stage: who the proposals are by.
        policy: decides how the tree grows.
    """

    def __init__(self, stage: Stage, policy: TreePolicy) -> None:
        self.stats = DrafterStats()
        self._stage = stage
        self._policy = policy
        self._calibrations = {True: Calibration(), False: Calibration()}  # by whether decoding is greedy
        self._calibration = self._calibrations[True]
        self._builder: TreeBuilder | None = None

    def work(self) -> dict[str, DrafterStats]:
        return {self._stage.name.lower(): replace(self.stats)}

    def close(self) -> None:
        pass

    def _expand(self, builder: TreeBuilder, node: int, tokens: list[int], scores: list[float]) -> None:
        """Add a node's candidates, best first, as its children."""
        believed = builder.nodes[node].score
        cells = self._calibration.cells(self._stage, scores)
        for token, cell in zip(tokens[: self._policy.children], cells, strict=False):
            builder.add(node, token, believed * self._calibration.rates[cell], self._stage, cell)

    def _finish(self, builder: TreeBuilder, growth: Growth) -> TokenTree:
        self._builder = builder
        return builder.build(builder.best()[: self._policy.keep(growth)])

    def _learn(self, tokens: Sequence[int]) -> list[int]:
        """Compare what was proposed along the target's path with what it chose; returns the nodes on that path."""
        if self._builder is None:
            return []
        nodes = [0]
        for chosen in tokens:
            children = self._builder.children[nodes[-1]]
            for token, child in children.items():
                self._calibration.update(self._builder.nodes[child].cell, token == chosen)
            if chosen not in children:
                return nodes
            nodes.append(children[chosen])
        # The last token is the next root; it is not part of the context yet.
        return nodes[:-1]


class NgramDrafter(TreeDrafter):
    """Drafts from a table of n-grams and from the n-grams of the running context, ranked under the target's own noise.

    Args:
        table: Katz trigram of the draft's text (Spector & Ré 2023), None for the context alone.
        policy: decides how a tree for the target grows; a "pass" is one lookup.
        vocab_size: tokens from here on are never proposed.
    """

    def __init__(self, table: NgramTable | None, policy: TreePolicy, vocab_size: int) -> None:
        super().__init__(Stage.NGRAM, policy)
        self._table = table
        self._vocab_size = min(vocab_size, table.vocab_size) if table else vocab_size
        self._grams = ContextNgrams()
        self._context: list[int] = []
        self._sampling = SamplingConfig()

    def start(self, context: NDArray[np.int32]) -> None:
        self._context = context.tolist()
        self._grams = ContextNgrams()
        self._builder = None

    def lag(self) -> float:
        return _READ_SECONDS * (len(self._context) - len(self._grams))

    def catch_up(self) -> None:
        self._grams.extend(self._context[len(self._grams) :])

    def draft(self, sampling: SamplingConfig, max_depth: int) -> TokenTree:
        begin = time.perf_counter()
        self.prepare(sampling, max_depth)
        builder = TreeBuilder(self._context[-1])
        leaves = [0]
        passes = 0
        while True:
            scores = [builder.nodes[node].score for node in builder.best()]
            growth = Growth(scores, [builder.nodes[leaf].score for leaf in leaves], passes, time.perf_counter() - begin)
            width = self._policy.expand(growth)
            if width == 0 or not leaves:
                break
            batch, leaves = leaves[:width], leaves[width:]
            for node in batch:
                tokens, guesses = self._candidates(builder.path(node), max(_CANDIDATES, self._policy.children))
                if tokens:
                    self._expand(builder, node, tokens, guesses)
                    leaves += builder.children[node].values()
            passes += len(batch)
            leaves = [leaf for leaf in leaves if builder.nodes[leaf].depth < max_depth]
            leaves.sort(key=lambda leaf: -builder.nodes[leaf].score)
        self.stats.passes += passes
        self.stats.seconds += time.perf_counter() - begin
        return self._finish(builder, growth)

    def prepare(self, sampling: SamplingConfig, max_depth: int) -> None:
        del max_depth
        self._sampling = sampling
        self._calibration = self._calibrations[sampling.is_greedy]
        self._builder = None
        self.catch_up()

    def extend(self, path: list[int], length: int) -> list[int]:
        found: list[int] = []
        for _ in range(length):
            tokens, _ = self._candidates(path + found, 1)
            if not tokens:
                break
            found.append(tokens[0])
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        self._learn(tokens)
        self._builder = None
        self._context += tokens

    def _candidates(self, path: list[int], k: int) -> tuple[list[int], list[float]]:
        """The k best next tokens after the context and a path, with their scores, best first."""
        tail = (self._context[-_TAIL:] + path)[-_TAIL:]
        chances: dict[int, float] = {}
        order = 0
        if len(self._grams):
            tokens, scores, order = self._grams.candidates(tail, 8)
            # The longer the match, the more it counts beside the table.
            weight = (0.0, 0.25, 0.5, 0.75, 0.9)[order] if self._table else 1.0
            for token, score in zip(tokens.tolist(), scores.tolist(), strict=True):
                chances[token] = weight * math.exp(score)
        if self._table and max(tail[-2:]) < self._vocab_size:
            weight = (1.0, 0.75, 0.5, 0.25, 0.1)[order]
            tokens, scores = self._table.candidates(tail, min(8, self._table.max_successors))
            for token, score in zip(tokens.tolist(), scores.tolist(), strict=True):
                chances[token] = chances.get(token, 0.0) + weight * math.exp(score)
        ranked = [(math.log(chance), token) for token, chance in chances.items() if token < self._vocab_size]
        temperature = self._sampling.temperature
        if temperature > 0 and ranked:
            ids = np.array([token for _, token in ranked], np.int32)
            noise = gumbel(self._sampling.seed, len(self._context) + len(path), ids).tolist()
            ranked = [(score / temperature + g, token) for (score, token), g in zip(ranked, noise, strict=True)]
        ranked.sort(key=lambda item: (-item[0], item[1]))
        return [token for _, token in ranked[:k]], [score for score, _ in ranked[:k]]


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
        found, scores = self.session.candidates(list(rows), max(_CANDIDATES, self._policy.children), sampling.native)
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


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    different = np.nonzero(a[:length] != b[:length])[0]
    return int(different[0]) if len(different) else length
