"""Drafts from n-grams: those of the running context and of a table, and what the target said before."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pystaged._core import RecycledCandidates, gumbel
from pystaged.config import SamplingConfig
from pystaged.decoding.constraint import allows
from pystaged.decoding.cost import PassCost, measure
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import MAX_EXPANDED, FixedPolicy, Growth, TreePolicy
from pystaged.decoding.requests import Requests, finish
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.drafting.context import ContextNgrams
from pystaged.drafting.growing import CANDIDATES, TreeDrafter
from pystaged.drafting.table import NgramTable

_TAIL = 4  # tokens an n-gram lookup can use
# What the n-grams of the context count beside a table and beside recycled candidates: more the longer they are.
_BESIDE_TABLE = (0.0, 0.25, 0.5, 0.75, 0.9)
_BESIDE_RECYCLED = (0.0, 0.6, 0.8, 0.9, 0.95)
_TABLE_BESIDE_RECYCLED = (1.0, 0.5, 0.2)  # by how many tokens those are known after
# Sources for calibration: 2 the table, 3 to 6 n-grams of the context after 1 to 4 tokens, 7 and 8 recycled candidates
# after one token and after two. Tokens that a grammar forces are not calibrated, so Stage.GRAMMAR's number is free.
_OF_RECYCLED = (Stage.NGRAM, 7, 8)
_MEASURED_TEXT = 64  # tokens


@dataclass(frozen=True, slots=True)
class NgramCost:
    """Processor seconds of lookups, with the Python around them, and of reading tokens; both refined while running."""

    lookup: PassCost
    read: PassCost


class NgramDrafter(TreeDrafter):
    """Drafts from a table of n-grams, from those of the running context and from recycled candidates, ranked under the
    target's own noise.

    Args:
        table: Katz trigram of the draft's text (Spector & Ré 2023), None for the context alone.
        policy: decides how a tree for the target grows; a "pass" is one lookup.
        vocab_size: tokens from here on are never proposed.
        recycled: what the target has said of its tokens in all texts so far, None for nothing.
        cost: seconds of lookups and of reading, refined here; None for lookups that are free.
        meter: what drafting costs.
    """

    stage = Stage.NGRAM  # who its proposals are by

    def __init__(
        self,
        table: NgramTable | None,
        policy: TreePolicy,
        vocab_size: int,
        *,
        recycled: RecycledCandidates | None = None,
        cost: NgramCost | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(self.stage, policy, meter)
        self._cost = cost
        self._table = table
        self.memory = self._recycled = recycled
        self._vocab_size = min(vocab_size, table.vocab_size) if table else vocab_size
        self._grams = ContextNgrams()
        self._context: list[int] = []  # what is predicted, then the text
        self._begin_of_text = 0
        self._sampling = SamplingConfig()

    def start(self, context: NDArray[np.int32]) -> None:
        self._context, self._begin_of_text = [*self.prediction, *context.tolist()], len(self.prediction)
        self._grams = ContextNgrams()
        self._builder = None

    def end(self) -> None:
        super().end()
        self.prediction = ()
        self.start(np.empty(0, np.int32))

    def lag(self) -> float:
        unread = self._unread
        return self._cost.read(unread) if self._cost and unread else 0.0

    def price(self) -> float:
        return self._cost.lookup(1) if self._cost else 0.0

    def catch_up(self, seconds: float = math.inf) -> Requests[None]:
        yield from ()  # lookups and reading take no passes
        begin = self._meter()
        unread = self._unread
        if self._cost and seconds < math.inf:
            unread = min(unread, int(seconds / self._cost.read(1)))
        if unread <= 0:
            return
        read = len(self._grams)
        self._grams.extend(self._context[read : read + unread])
        if self._cost and unread >= _MEASURED_TEXT:
            self._cost.read.observe(unread, 0, self._meter() - begin)

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        begin = self._meter()
        children = self._policy.children
        yield from self.prepare(sampling, max_depth, seconds)
        builder, last = self._begin(self._context[-1], max_depth)
        self._begun(builder, last, seconds)
        scores = [-builder.nodes[node].score for node in range(1, len(builder.nodes))]  # negative, rising
        leaves = [(-1.0, last)]  # likewise, with their nodes
        passes = 0
        while True:
            spent = self._meter() - begin
            growth = Growth(
                [-score for score in scores],
                [-score for score, _ in leaves],
                passes,
                spent,
                len(self._context) - self._begin_of_text - 1,
            )
            room = MAX_EXPANDED - passes
            if self._cost and seconds < math.inf:
                room = min(room, int((seconds - spent) / self._cost.lookup(1)))
            width = min(self._policy.expand(growth), room) if leaves and not self._unread else 0
            if width <= 0:
                break
            batch, leaves = leaves[:width], leaves[width:]
            self._consult(builder, [node for _, node in batch])
            self._asked |= last == 0
            for _, node in batch:
                tokens, guesses, source = self._candidates(builder.path(node), max(CANDIDATES, children), node)
                if tokens:
                    self._expand(builder, node, tokens, guesses, children, source)
                    for child in builder.children[node].values():
                        score = -builder.nodes[child].score
                        insort(scores, score)
                        if builder.nodes[child].depth < max_depth:
                            insort(leaves, (score, child))
            passes += len(batch)
            if self._cost:
                self._cost.lookup.observe(len(batch), 0, self._meter() - begin - spent)
        self.stats.passes += passes
        self.stats.seconds += self._meter() - begin
        return self._finish(builder, growth)

    def prepare(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[None]:
        del max_depth
        self._sampling = sampling
        self._calibration = self._calibrations[sampling.is_greedy]
        self._builder = None
        yield from self.catch_up(seconds)

    def extend(self, path: list[int], length: int) -> list[int]:
        found: list[int] = []
        for _ in range(length):
            tokens, _, _ = self._candidates(path + found, 1)
            if not tokens:
                break
            found.append(tokens[0])
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        self._learn(tokens)
        self._builder = None
        self._context += tokens

    @property
    def _unread(self) -> int:
        """Tokens of the text whose n-grams are not known yet."""
        return len(self._context) - len(self._grams)

    def _begun(self, builder: TreeBuilder, last: int, seconds: float) -> None:
        """Called before a tree grows from its node `last`, with the seconds that drafting may take."""

    def _consult(self, builder: TreeBuilder, nodes: Sequence[int]) -> None:
        """Called before nodes of it are expanded together."""

    def _mixture(self, tail: list[int], node: int) -> tuple[dict[int, float], int]:
        """Probabilities of the token after a node, the last of `tail`, mixed of the context's n-grams, the table's and
        recycled candidates; and the source by which calibration tells them apart."""
        del node
        chances: dict[int, float] = {}
        recycled: dict[int, float] = {}
        order, known = 0, 0
        if self._recycled:
            recycled, known = self._recycled.chances(tail[-2] if len(tail) > 1 else -1, tail[-1])
        if len(self._grams):
            found, order = self._grams.chances(tail, 8)
            weight = _BESIDE_RECYCLED[order] if known else _BESIDE_TABLE[order] if self._table else 1.0
            chances = {token: weight * chance for token, chance in found.items()}
        rest = 1 - _BESIDE_RECYCLED[order] if known else 1 - _BESIDE_TABLE[order]
        if self._table and max(tail[-2:]) < self._vocab_size:
            weight = _TABLE_BESIDE_RECYCLED[known] * rest
            tokens, scores = self._table.candidates(tail, min(8, self._table.max_successors))
            for token, score in zip(tokens.tolist(), scores.tolist(), strict=True):
                chances[token] = chances.get(token, 0.0) + weight * math.exp(score)
            rest -= weight
        for token, chance in recycled.items():
            chances[token] = chances.get(token, 0.0) + rest * chance
        return chances, Stage.NGRAM + order if order else _OF_RECYCLED[known]

    def _candidates(self, path: list[int], k: int, node: int = -1) -> tuple[list[int], list[float], int]:
        """The k best next tokens after the context and a path, with their scores, best first; and their source. `node`
        is where the path ends in the tree that grows, if it does."""
        tail = (self._context[-_TAIL:] + path)[-_TAIL:]
        chances, source = self._mixture(tail, node)
        ranked = [
            (math.log(chance), token) for token, chance in chances.items() if token < self._vocab_size and chance > 0
        ]
        if self._constraint and ranked:
            mask = self._constraint.mask(path)
            ranked = [each for each in ranked if mask is not None and allows(mask, each[1])]
        temperature = self._sampling.temperature
        if temperature > 0 and ranked:
            ids = np.array([token for _, token in ranked], np.int32)
            position = len(self._context) - self._begin_of_text + len(path)
            noise = gumbel(self._sampling.seed, position, ids).tolist()
            ranked = [(score / temperature + g, token) for (score, token), g in zip(ranked, noise, strict=True)]
        ranked.sort(key=lambda item: (-item[0], item[1]))
        return [token for _, token in ranked[:k]], [score for score, _ in ranked[:k]], source


def measure_ngrams(
    table: NgramTable | None,
    vocab_size: int,
    clock: Callable[[], float] = time.thread_time,
    *,
    recycled: bool = False,
) -> NgramCost:
    """Time lookups and reading on this machine; takes a few milliseconds.

    Args:
        clock: processor seconds.
        recycled: look for recycled candidates, too.
    """
    text = np.arange(_MEASURED_TEXT, dtype=np.int32) % min(vocab_size, 16)
    memory = RecycledCandidates(slots=16) if recycled else None
    if memory:
        candidates = np.tile(
            np.arange(min(vocab_size, RecycledCandidates.num_candidates), dtype=np.int32), (len(text), 1)
        )
        memory.learn(np.roll(text, 1), text, candidates, -candidates.astype(np.float32))
    one = FixedPolicy(width=1, depth=1, budget=1)
    drafter = NgramDrafter(table, one, vocab_size, recycled=memory, meter=Meter(clock))

    def read(*_: int) -> None:
        drafter.start(text)
        finish(drafter.catch_up())

    reading = measure(read, most_rows=1, clock=clock)(1) / _MEASURED_TEXT

    def look_up(*_: int) -> None:
        finish(drafter.draft(SamplingConfig(), 2))

    lookup = measure(look_up, most_rows=1, clock=clock)(1)
    return NgramCost(PassCost({1: lookup}), PassCost({1: reading}))
