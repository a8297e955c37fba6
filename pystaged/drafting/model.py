"""Drafts with a model, which may have a drafter of its own below it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.config import SamplingConfig
from pystaged.decoding.constraint import Constraint
from pystaged.decoding.cost import PassCost, surprise
from pystaged.decoding.drafter import Drafter, common_prefix
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import MAX_EXPANDED, Growth, TreePolicy
from pystaged.decoding.requests import Propose, Read, Requests
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.drafting.growing import CANDIDATES, TreeDrafter
from pystaged.drafting.ngrams import NgramDrafter
from pystaged.stats import DrafterStats

_LONGEST_PREFIX_ROWS = 16  # rows a drafter catches up on together with the root, rather than in passes of their own
_GUESSES = 3  # tokens the drafter below proposes for each pass
_GUESS_GAIN = 0.25  # of a pass, what guesses from below are believed to save before they are tried
_GUESS_BLEND = 0.02  # weight of a new observation of that
_GUESS_CHECK = 64  # where they save nothing they are tried in one pass of so many
_PIECE = 32  # tokens read at once while it is not known how long reading takes


class ModelDrafter(TreeDrafter):
    """Grows a tree level by level with a draft model, several leaves in one pass of it.

    The drafter below proposes tokens that ride along in each pass; those the draft itself ranks among its candidates
    deepen the tree without another pass, the rest are dropped.

    Args:
        session: the draft's own context.
        policy: decides how the tree grows.
        below: a cheaper drafter, None for none.
        cost: processor seconds of a pass, refined here.
        vocab_size: the target's; tokens from here on are never proposed.
        substitutes: what the draft reads in place of the target's tokens that it lacks or that mean something else to
            it; those are never proposed.
        meter: what drafting costs.
    """

    def __init__(
        self,
        session: Session,
        policy: TreePolicy,
        *,
        below: Drafter | None = None,
        cost: PassCost | None = None,
        vocab_size: int,
        substitutes: Mapping[int, int] | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(Stage.DRAFT, policy, meter)
        self.session = session
        self.below = below
        self._cost = cost
        self._vocab_size = vocab_size
        self._substitutes = substitutes or {}
        self._pace = 1.0  # of reading, to what passes of a piece each would take
        self._guess_gain = _GUESS_GAIN
        self._unguessed = 0  # passes since guesses were last asked for
        self._length = 0  # tokens committed in the session
        self._missing: list[int] = []  # tokens of the context that the session has not seen
        self._root = 0
        self._num_rows = 0

    def constrain(self, constraint: Constraint | None) -> None:
        super().constrain(constraint)
        if self.below:
            self.below.constrain(constraint)

    def sessions(self) -> list[Session]:
        return [self.session, *(self.below.sessions() if self.below else [])]

    def inherit(self, other: Drafter) -> None:
        super().inherit(other)
        if isinstance(other, ModelDrafter):
            self._pace, self._guess_gain, self._unguessed = other._pace, other._guess_gain, other._unguessed
            if self.below and other.below:
                self.below.inherit(other.below)

    def start(self, context: NDArray[np.int32]) -> None:
        read = self._spelled(context[:-1].tolist())
        self._length = self.session.rewind(common_prefix(self.session.tokens, np.array(read, np.int32)))
        self._missing = read[self._length :]
        self._root = int(context[-1])
        self._builder = None
        if self.below:
            self.below.prediction = self.prediction
            self.below.start(context)

    def end(self) -> None:
        super().end()
        self._missing = []
        if self.below:
            self.below.end()

    def lag(self) -> float:
        below = self.below.lag() if self.below else 0.0
        missing = len(self._missing)
        if missing >= self.session.n_ctx - self._length:
            return math.inf  # the text is longer than the draft's context
        if self._cost is None or missing == 0:
            return below
        if missing > _LONGEST_PREFIX_ROWS:
            return below + self._reading(self._cost, missing)
        return below + self._cost(missing + 1, self._length) - self._cost(1, self._length)

    def price(self) -> float:
        return self._cost(1 + self._guesses_below, self._length) if self._cost else 0.0

    def catch_up(self, seconds: float = math.inf) -> Requests[None]:
        begin = self._meter()
        if self.below:
            yield from self.below.catch_up(seconds)
        if len(self._missing) > self.session.n_ctx - self._length:
            return
        while self._missing:
            piece = len(self._missing)
            if self._cost and seconds < math.inf:
                # Where not all can be read, a piece tells how long the rest will really take.
                left = seconds - (self._meter() - begin)
                if self._reading(self._cost, piece) > left:
                    piece = min(_PIECE, piece)
                if self._reading(self._cost, piece) > left:
                    return
            yield from self._read(piece)

    def _reading(self, cost: PassCost, tokens: int) -> float:
        """Seconds that reading so many of the missing tokens takes, about."""
        return self._pace * cost(_PIECE, self._length + tokens // 2) * tokens / _PIECE

    def _read(self, piece: int) -> Requests[None]:
        done = yield from self._meter.draft(Read(self.session, self._length, np.array(self._missing[:piece], np.int32)))
        piece = done.result
        if self._cost and piece >= _PIECE:
            seconds, believed = done.share * done.processor_seconds, self._reading(self._cost, piece)
            # Noise only ever adds: what was less is believed at once.
            self._pace *= min(seconds / believed, 1 + 0.5 * surprise(seconds, believed))
        self._length += piece
        del self._missing[:piece]

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        begin = self._meter()
        if self._builder is not None:
            # What came of the last tree is not known: its step failed.
            self._builder = None
            self.session.discard()
        self._calibration = self._calibrations[sampling.is_greedy]
        # A row for the root, and one for each level but the last.
        cells = self._length + len(self._missing)
        max_depth = min(max_depth, self.session.n_ctx - cells)
        if max_depth < 1:
            return TokenTree.root(self._root)
        children = self._policy.children
        if self.below:
            yield from self.below.prepare(sampling, max_depth, seconds)
        if len(self._missing) > _LONGEST_PREFIX_ROWS:
            yield from self.catch_up(seconds - (self._meter() - begin))
            if len(self._missing) > _LONGEST_PREFIX_ROWS:
                return TokenTree.root(self._root)
        builder, last = self._begin(self._root, max_depth)
        batch, passes, expanded = [last], 0, 0
        growth = Growth([], [], 0, 0.0)
        self._num_rows = 0
        try:
            while batch:
                num_rows = len(batch) + self._guesses_below + (0 if passes else len(self._missing) + last)
                if self._cost and self._meter() - begin + self._cost(num_rows, cells) > seconds:
                    break
                yield from self._pass(builder, batch, sampling, max_depth, children)
                self._asked |= last == 0
                passes += 1
                expanded += len(batch)
                best, nodes = builder.best(), builder.nodes
                leaves = [node for node in best if nodes[node].row < 0 and nodes[node].depth < max_depth]
                growth = Growth(
                    [nodes[node].score for node in best],
                    [nodes[leaf].score for leaf in leaves],
                    passes,
                    self._meter() - begin,
                    cells,
                )
                batch = leaves[: min(self._policy.expand(growth), MAX_EXPANDED - expanded)]
            tree = self._finish(builder, growth)
        except BaseException:
            self._builder = None
            self.session.discard()
            raise
        finally:
            self.stats.passes += passes
            self.stats.seconds += self._meter() - begin
        if passes == 0:
            self._builder = None
        return tree

    def _pass(
        self, builder: TreeBuilder, batch: list[int], sampling: SamplingConfig, max_depth: int, children: int
    ) -> Requests[None]:
        """Evaluate a batch of nodes, and guesses from below after the best of them; add everybody's candidates."""
        begin = self._meter()
        first = batch[0]
        guesses: list[int] = []
        room = max_depth - 1 - builder.nodes[first].depth
        asked = self.below is not None and room > 0 and self._wants_guesses()
        if asked and self.below:
            guesses = self.below.extend(builder.path(first), min(_GUESSES, room))
            guesses = guesses[: next((i for i, token in enumerate(guesses) if token in self._substitutes), None)]
        looked_up = self._meter()
        tokens, parents = [], []
        if self._num_rows == 0:
            tokens = list(self._missing)
            parents = list(range(-1, len(tokens) - 1))
            for node in range(first):  # the root, and tokens that must follow it
                builder.nodes[node].row = len(tokens)
                parents.append(len(tokens) - 1)
                tokens += self._spelled([builder.nodes[node].token])
        for node in batch:
            guess = builder.nodes[node]
            parents.append(len(tokens) - 1 if node == 0 else builder.nodes[guess.parent].row)
            guess.row = self._num_rows + len(tokens)
            tokens += self._spelled([guess.token])
        before = builder.nodes[first].row
        for token in guesses:
            parents.append(before)
            before = self._num_rows + len(tokens)
            tokens.append(token)
        judged = len(batch) + len(guesses)
        k = max(CANDIDATES, children)
        paths = [builder.path(node) for node in batch]
        paths += [paths[0] + guesses[:end] for end in range(1, len(guesses) + 1)]
        masks = self._masks(paths)
        done = yield from self._meter.draft(
            Propose(self.session, self._length, tokens, parents, judged, k, sampling.native, masks)
        )
        found, scores = done.result
        self._num_rows += len(tokens)
        rows = range(self._num_rows - judged, self._num_rows)
        self.stats.native_seconds += done.share * done.seconds
        self.stats.weight_bytes += round(done.share * self.session.weight_bytes)
        for i, node in enumerate(batch):
            self._add(builder, node, found[i], scores[i], children)
        node, confirmed = first, 0
        for i, token in enumerate(guesses):
            child = builder.children[node].get(token)
            if child is None:
                break
            builder.nodes[child].row = rows[len(batch) + i]
            builder.nodes[child].stage = Stage.NGRAM if isinstance(self.below, NgramDrafter) else Stage.DRAFT
            self._add(builder, child, found[len(batch) + i], scores[len(batch) + i], children)
            node = child
            confirmed += 1
        if self._cost:
            if asked:
                # Every guess that came true is a pass saved; the others are rows and a lookup for nothing.
                cells = self._length
                wasted = self._cost(len(tokens), cells) - self._cost(len(tokens) - len(guesses), cells)
                gain = max(confirmed - (wasted + looked_up - begin) / self._cost(1, cells), -1.0)
                self._guess_gain += _GUESS_BLEND * (gain - self._guess_gain)
            others = (1 - done.share) * done.processor_seconds
            self._cost.observe(done.num_rows, done.past, self._meter() - begin + others, done.share)
        self.stats.guessed += len(guesses)
        self.stats.confirmed += confirmed

    @property
    def _guesses_below(self) -> int:
        """Rows that guesses from below may add to a pass."""
        return _GUESSES if self.below else 0

    def _wants_guesses(self) -> bool:
        """Whether guesses from below are worth having in the next pass, or are due to be tried again."""
        self._unguessed += 1
        if self._guess_gain <= 0 and self._unguessed < _GUESS_CHECK:
            return False
        self._unguessed = 0
        return True

    def _masks(self, paths: Sequence[list[int]]) -> NDArray[np.uint32] | None:
        """What may follow each path, uint32[paths, words]. What follows a forbidden one does not matter, nor what the
        draft proposes where it has none of the tokens."""
        if self._constraint is None:
            return None
        words, rest = divmod(self.session.vocab_size, 32)
        known = np.full(words + 1, 0xFFFFFFFF, np.uint32)  # the draft's tokens
        known[words] = (1 << rest) - 1
        masks = np.zeros((len(paths), words + 1), np.uint32)
        for i, path in enumerate(paths):
            found = self._constraint.mask(path)
            if found is not None:
                masks[i, : len(found)] = found[: words + 1]
        masks &= known
        masks[~masks.any(axis=1)] = known
        return masks

    def _add(self, builder: TreeBuilder, node: int, tokens: list[int], scores: list[float], children: int) -> None:
        # Filters may leave fewer candidates, and the draft's vocabulary may be padded beyond the target's.
        good = [i for i, token in enumerate(tokens) if 0 <= token < self._vocab_size and token not in self._substitutes]
        if good:
            self._expand(builder, node, [tokens[i] for i in good], [scores[i] for i in good], children)

    def prepare(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[None]:
        yield from self.draft(sampling, max_depth, seconds)

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
        emitted = self._spelled([self._root, *tokens])
        path = self._learn(tokens)
        if self._builder is None:
            self._missing += emitted[:-1]
        else:
            rows = list(range(len(self._missing)))
            for node in path:
                if self._builder.nodes[node].row < 0:
                    break
                rows.append(self._builder.nodes[node].row)
            self.session.commit(rows)
            self._length += len(rows)
            self._missing = emitted[len(rows) - len(self._missing) : -1]
        self._root = tokens[-1]
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

    def _spelled(self, tokens: list[int]) -> list[int]:
        """The same for the draft to read."""
        return [self._substitutes.get(token, token) for token in tokens] if self._substitutes else tokens
