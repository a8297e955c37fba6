"""Whether a step drafts, and who drafts: the account of a text.

The bound: beyond what the texts before it gained, a text may lose to drafting at most the time of so many tokens of
plain decoding: 4 for the first text of a context, 1 for each later one (OPENING, LEAST; greedy texts and others apart),
or 3 ms where those take less; beside them half a percent of its length, a quarter of the time that the target took to
read its prompt, and what the operation that used up the credit took beyond its price.

Everything is counted in tokens of plain decoding, each of which takes a pass over one row, T(1). A drafted step costs

    price = (T(n) - T(1) + drafting) / T(1)

and gains the tokens beyond its first. T(n) is what passes over n rows cost, as measured and as seen since; `drafting`
is the time that proposing the tree and learning from it took. All are processor time: what other programs take of the
machine is charged to nobody. A text begins with a credit. Steps take from it what they cost and add what they gain. A
drafter is used only while the credit covers the least that it can do, which it then may do; a tree is cut to its first
guess and what the credit covers. What is left of the credit goes to the next text.

The drafter whose guesses bring most tokens per second drafts. Every drafter is scored by how often its first guess for
the next token was right: when it drafts, and else now and then by a guess that is made and not verified (full
information, arXiv 2510.20064). None drafts where even the best would not gain.

Where several texts share passes, a plain step is a pass over one row of each, and all of them wait for what one of them
drafts: T(1) is T(texts), and a price counts once for each text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from pystaged.decoding.batch_load import BatchLoad
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.meter import Meter
from pystaged.decoding.requests import Done, Requests
from pystaged.decoding.tree import Stage, TokenTree

OPENING = 4.0  # tokens of credit for the first text of a context
LEAST = 1.0  # for each later one, whatever the texts before it lost
LEAST_SECONDS = 0.003  # for any: of a tiny target a token takes less than a single hiccup of the machine
SHARE = 0.005  # of a text's length that it may lose beyond that
MOST = 16.0  # tokens of credit that are kept: what turned wrong must end soon
PROMPT = 0.25  # of what the target needs to read a prompt, for a drafter to read it
_SCORING = 0.5 * SHARE  # of a text's length, for scoring drafters that do not draft
_FIRST_SCORING, _MOST_SCORING = 0.25, 1.0  # tokens for that: at a text's beginning; that are kept
_PRIOR, _MEMORY = 16, 48  # guesses that the first belief in a drafter is worth; guesses that are remembered
_RETURN = 0.05  # by how much each new text draws what is believed of a drafter back to the first belief
_READ = 32  # rows of a pass, whose cost tells what reading a prompt takes
_DEEPEST = 8  # of the chains by which drafters are compared
_BLEND = 0.05  # weight of a new observation of Python's time


@dataclass(slots=True)
class _Known:
    """What is learnt of greedy texts, or of others.

    rates: of each drafter, how often its first guess is right. scored: how many guesses that goes by.
    left: tokens of credit that the next text may have.
    """

    rates: list[float]
    scored: list[int]
    left: float = OPENING


class Budget:
    """Chooses a drafter for each step of a text, says what it may spend, and keeps account of what came of it.

    Args:
        cost: processor seconds of a target pass, refined here. None keeps no account: the first drafter always drafts.
        batch: who shares the passes.
        meter: what drafting costs.
        rates: of each drafter, how often its first guess is believed to be right before it has been scored.
    """

    def __init__(self, cost: PassCost | None, batch: BatchLoad, meter: Meter, rates: Sequence[float]) -> None:
        self.credit = OPENING  # tokens
        self.chosen: int | None = None  # the drafter of the step in hand
        self.shadow: tuple[int, float] | None = None  # the drafter that is scored beside it, and the seconds for that
        self._cost, self._batch, self._meter = cost, batch, meter
        self._first = list(rates)
        self._kinds = {greedy: _Known(self._first.copy(), [_PRIOR] * len(self._first)) for greedy in (True, False)}
        self._known = self._kinds[True]  # of the text's kind
        self._past = 0  # tokens in front of the step's rows
        self._least = 0.0  # seconds that its drafter needs at least
        self._scoring = 0.0  # tokens that may be spent for scoring
        self._last_shadow = 0
        self._python = 0.0  # seconds of a step that are neither the pass nor drafting
        self._begin = self._drafted = 0.0  # when the step began, and when its tree was drafted

    def inherit(self, other: Budget) -> None:
        """Believe what another one, of the same target and drafters, has learnt."""
        for greedy, known in other._kinds.items():
            left = min(known.left, OPENING)
            self._kinds[greedy] = _Known(known.rates.copy(), known.scored.copy(), left)
        self._known = self._kinds[True]
        self._python = other._python

    def open(self, drafters: Sequence[Drafter], prompt_tokens: int, read: int, greedy: bool) -> Requests[None]:
        """Begin a text. The drafter that is believed to gain most reads its prompt at once; others do that later.

        Args:
            drafters: none for a plain text.
            read: how many tokens of the prompt the target had to read.
            greedy: whether its tokens are the likeliest ones: what is learnt is kept apart.
        """
        known = self._known = self._kinds[greedy]
        self.credit = max(LEAST, known.left)
        self._scoring, self.chosen = _FIRST_SCORING, None
        if self._cost is None or not drafters:
            return
        self._past = prompt_tokens - 1
        self.credit = max(self.credit, LEAST_SECONDS / self._cost(1, self._past))
        known.left = 0.0  # until the account is settled: what an interrupted operation took is charged to nobody
        for i, first in enumerate(self._first):
            known.rates[i] += _RETURN * (first - known.rates[i])
        best = self._best([drafter.price() / self._token for drafter in drafters], range(len(drafters)))
        if best is not None:
            allowance = PROMPT * self._cost(_READ, self._past // 2) / _READ * read
            begin = self._meter()
            yield from drafters[best].catch_up(allowance + self.credit / 2 * self._token)
            self.credit -= max(0.0, self._meter() - begin - allowance) / self._token
        known.left = self.credit

    def choose(self, drafters: Sequence[Drafter], past: int) -> None:
        """Begin a step: choose a drafter for it, and one that is scored beside it.

        Args:
            past: tokens of the text in front of the root.
        """
        self._begin = self._drafted = self._meter()
        self.chosen = self.shadow = None
        if self._cost is None:
            self.chosen = 0 if drafters else None
            return
        self._past = past
        if self.credit <= 0:
            return
        self._known.left = 0.0
        token = self._token
        prices = [drafter.price() / token for drafter in drafters]
        least = [drafter.lag() / token + price for drafter, price in zip(drafters, prices, strict=True)]
        verifying = self._extra(2)
        self.chosen = self._best(prices, [i for i, price in enumerate(least) if price + verifying <= self.credit])
        self._least = least[self.chosen] * token if self.chosen is not None else 0.0
        # Scoring must not eat the credit for which a drafter could come back.
        most = min(self.credit - min(least, default=0.0) - verifying, self._scoring)
        for turn in range(1, len(drafters) + 1):
            i = (self._last_shadow + turn) % len(drafters)
            if i != self.chosen and least[i] <= most:
                self.shadow, self._last_shadow = (i, most * token), i
                self._scoring -= least[i]
                break

    @property
    def seconds(self) -> float:
        """Seconds that the step's drafter may use: what is left when verifying one node is paid, and the least that it
        was chosen for."""
        if self._cost is None:
            return math.inf
        left = (self.credit - self._extra(2)) * self._token - (self._meter() - self._begin)
        return max(left, self._least)

    def trim(self, tree: TokenTree) -> TokenTree:
        """The part of what was drafted that costs no more than the credit still covers; of guesses the first one at
        least, for which the drafter was chosen."""
        self._drafted = self._meter()
        if self._cost is None:
            return tree
        left = self.credit - (self._drafted - self._begin) / self._token
        rows, certain = len(tree), _certain_rows(tree)
        while rows > certain + 1 and self._extra(rows, certain) > left:
            rows -= 1
        return tree.head(rows)

    def record(self, drafters: Sequence[Drafter], verified: Done, telling: float, certain: int) -> float:
        """End the step.

        Args:
            verified: the pass, as Verify has it. telling: seconds of telling the drafters.
            certain: how many of its tokens nobody had to guess.

        Returns:
            How many times as fast this was as plain decoding of the same tokens, in the same batch, by the measured
            costs; 0 without costs.
        """
        if self._cost is None:
            return 0.0
        tree, _, tokens, *_ = verified.result
        self._cost.observe(verified.num_rows, verified.past, verified.processor_seconds, verified.share)
        # Telling drafters that did not draft is next to free.
        drafting = self._drafted - self._begin + telling if self.chosen is not None or self.shadow is not None else 0.0
        price = drafting / self._token + self._extra(len(tree), _certain_rows(tree))
        guessed, before = max(1, len(tokens) - certain), self.credit
        self.credit = min(before + guessed - 1 - price + SHARE * guessed, MOST)
        # What the last step gained may lie behind the end of its text.
        self._known.left = min(before, self.credit)
        self._scoring = min(self._scoring + _SCORING * guessed, _MOST_SCORING)
        for i, drafter in enumerate(drafters):
            if drafter.hit is not None:
                self._score(i, drafter.hit)
            elif i == self.chosen and not certain:
                self._score(i, hit=False)  # it was to guess and did not
        python = max(0.0, self._meter() - self._begin - drafting)
        self._python += _BLEND * (python - self._python)
        texts = self._batch.sequences
        seconds = self._cost(texts, self._past)
        return len(tokens) / (1 + price * seconds / (seconds + texts * self._python))

    def _score(self, i: int, hit: bool) -> None:
        known = self._known
        known.scored[i] = min(known.scored[i] + 1, _MEMORY)
        known.rates[i] += (hit - known.rates[i]) / known.scored[i]

    def _best(self, prices: Sequence[float], among: Sequence[int]) -> int | None:
        """The drafter of most tokens per second, by the tokens that a guess of each costs; None where none is faster
        than plain decoding."""
        extra = cache(self._extra)  # each drafter asks for the same few
        best, most = None, 1.0
        for i in among:
            speedup = chain_speedup(self._known.rates[i], prices[i], extra)
            if speedup > most:
                best, most = i, speedup
        return best

    @property
    def _token(self) -> float:
        """Seconds of a token of plain decoding: while one text drafts, all of the batch wait."""
        assert self._cost is not None
        return self._cost(self._batch.sequences, self._past) / self._batch.sequences

    def _extra(self, num_rows: int, certain: int = 1) -> float:
        """Tokens that a pass over so many rows of this text costs beyond one over those that nobody has to guess."""
        assert self._cost is not None
        others = self._batch.rows
        more = self._cost(others + num_rows, self._past) - self._cost(others + certain, self._past)
        # What has been learnt of a few rows may have made them dearer than more of them.
        return max(0.0, more) / self._token


def _certain_rows(tree: TokenTree) -> int:
    """The root's, and those of tokens that a grammar forces."""
    return 1 + int(np.count_nonzero(tree.stages == Stage.GRAMMAR))


def chain_speedup(rate: float, price: float, extra: Callable[[int], float]) -> float:
    """Over plain decoding, of a chain of guesses that has the best length.

    Args:
        rate: how often a guess is right.
        price: tokens that drafting a guess costs.
        extra: tokens that a pass over so many rows costs beyond a plain step.
    """
    tokens, most = 1.0, 0.0
    for depth in range(1, _DEEPEST + 1):
        tokens += rate**depth
        speedup = tokens / (1 + extra(1 + depth) + depth * price)
        if speedup <= most:
            break
        most = speedup
    return most
