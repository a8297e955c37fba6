"""Whether a step drafts, and who drafts: the account of a text.

Everything is counted in tokens of plain decoding, each of which takes a pass over one row, T(1). A drafted step costs

    price = (T(n) - T(1) + drafting) / T(1)

and gains the tokens beyond its first. T(n) is what passes over n rows cost, as measured and as seen since; `drafting`
is the time that proposing the tree and learning from it took. All are processor time: what other programs take of the
machine is charged to nobody.

The first text of a context begins with a credit of OPENING, others with what the one before left, LEAST at least,
counted apart for greedy texts and others; steps take from it what they cost, and add what they gain, up to MOST. A
drafter is used only while the credit covers the least that it can do, and a tree is cut to what the credit covers. So,
whatever the drafters do:

    The texts of a context, greedy or not, fall behind plain decoding by OPENING + LEAST for each at most, and by SHARE
    of their length, PROMPT of what the target took to read their prompts, and what the operation that used up a credit
    took beyond its price.

The drafter whose guesses bring most tokens per second drafts. Every drafter is scored by how often its first guess for
the next token was right, when it drafts, and else now and then by a guess that is made and not verified (full
information, arXiv 2510.20064), for which half of SHARE is spent. None drafts where even the best would not gain.

Where several texts share passes, a plain step is a pass over one row of each, and all of them wait for what one of them
drafts: T(1) is T(texts), and a price counts once for each text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pystaged.decoding.batch_load import BatchLoad
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.meter import Meter
from pystaged.decoding.requests import Done, Requests
from pystaged.decoding.tree import Stage, TokenTree

OPENING = 4.0  # tokens that drafting may lose before it has gained anything
LEAST = 1.0  # tokens that each later text may lose, so that none is given up for what another one was
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


class Budget:
    """Chooses a drafter for each step of a text, says what it may spend, and keeps account of what came of it.

    Args:
        cost: processor seconds of a target pass, refined here. None keeps no account: the first drafter always drafts.
        batch: who shares the passes.
        meter: what drafting costs.
        rates: of each drafter, how often its first guess is believed to be right before it has been scored.
    """

    def __init__(self, cost: PassCost | None, batch: BatchLoad, meter: Meter, rates: Sequence[float]) -> None:
        self.credit = self._before = OPENING  # tokens, and what they were before the last step
        self.chosen: int | None = None  # the drafter of the step in hand
        self.shadow: int | None = None  # the drafter that is scored in it without drafting
        self._cost, self._batch, self._meter = cost, batch, meter
        self._first = list(rates)
        self._rates = {greedy: self._first.copy() for greedy in (True, False)}
        self._scored = {greedy: [_PRIOR] * len(self._first) for greedy in (True, False)}  # guesses
        self._greedy = True
        self._past = 0  # tokens in front of the step's rows
        self._extras: dict[int, float] = {}  # tokens that passes of the step cost beyond a plain one, by their rows
        self._scoring = 0.0  # tokens that may be spent for scoring
        self._last_shadow, self._shadow_credit = 0, 0.0
        self._python = 0.0  # seconds of a step that are neither the pass nor drafting
        self._begin = self._drafted = 0.0
        self._is_settled = True  # False in the middle of a step
        self._left = dict.fromkeys((True, False), OPENING)  # what each kind's last text left, but for the present one

    def inherit(self, other: Budget) -> None:
        """Believe what another one, of the same target and drafters, has learnt."""
        self._rates = {greedy: rates.copy() for greedy, rates in other._rates.items()}
        self._scored = {greedy: scored.copy() for greedy, scored in other._scored.items()}
        self._left = {greedy: min(other._rest(greedy), OPENING) for greedy in (True, False)}
        self._python = other._python

    def open(self, drafters: Sequence[Drafter], prompt_tokens: int, read: int, greedy: bool) -> Requests[None]:
        """Begin a text. The drafter that is believed to gain most reads its prompt at once; others do that later.

        Args:
            drafters: none for a plain text.
            read: how many tokens of the prompt the target had to read.
            greedy: whether its tokens are the likeliest ones: what is learnt is kept apart.
        """
        self._left[self._greedy] = self._rest(self._greedy)
        self.credit = self._before = max(LEAST, self._left[greedy])
        self._is_settled = True
        self._scoring, self.chosen, self._greedy = _FIRST_SCORING, None, greedy
        if self._cost is None or not drafters:
            return
        self._past = prompt_tokens - 1
        self._extras.clear()
        rates = self._rates[greedy]
        for i, first in enumerate(self._first):
            rates[i] += _RETURN * (first - rates[i])
        best = self._best([self._tokens(drafter.price()) for drafter in drafters], range(len(drafters)))
        if best is not None:
            allowance = PROMPT * self._cost(_READ, self._past // 2) / _READ * read
            begin, self._is_settled = self._meter(), False
            yield from drafters[best].catch_up(allowance + self._seconds(self.credit / 2))
            self.credit -= self._tokens(max(0.0, self._meter() - begin - allowance))
            self._is_settled = True

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
        self._extras.clear()
        if self.credit <= 0:
            return
        self._is_settled = False
        prices = [self._tokens(drafter.price()) for drafter in drafters]
        least = [self._tokens(drafter.lag()) + price for drafter, price in zip(drafters, prices, strict=True)]
        verifying = self._extra(2)
        self.chosen = self._best(prices, [i for i, price in enumerate(least) if price + verifying <= self.credit])
        most = min(self.credit, self._scoring)
        for turn in range(1, len(drafters) + 1):
            i = (self._last_shadow + turn) % len(drafters)
            if i != self.chosen and least[i] <= most:
                self.shadow = self._last_shadow = i
                self._scoring -= least[i]
                self._shadow_credit = most
                break

    @property
    def seconds(self) -> float:
        """Seconds that the step's drafter may use: what is left when verifying one node is paid."""
        if self._cost is None:
            return math.inf
        return self._seconds(self.credit - self._extra(2)) - (self._meter() - self._begin)

    @property
    def shadow_seconds(self) -> float:
        """Seconds that the drafter which is only scored may use."""
        return self._seconds(self._shadow_credit)

    def trim(self, tree: TokenTree) -> TokenTree:
        """The part of what was drafted that costs no more than the credit still covers."""
        self._drafted = self._meter()
        self._extras.clear()  # others may have come or gone
        if self._cost is None:
            return tree
        left = self.credit - self._tokens(self._drafted - self._begin)
        rows, forced = len(tree), _forced(tree)
        while rows > 1 + forced and self._guessing(rows, forced) > left:
            rows -= 1
        return tree.head(rows)

    def record(
        self,
        drafters: Sequence[Drafter],
        tree: TokenTree,
        num_tokens: int,
        verified: Done,
        telling: float,
        certain: int,
    ) -> float:
        """End the step: what it verified and wrote.

        Args:
            tree: what it verified. num_tokens: that it wrote; certain: how many of them nobody had to guess.
            verified: the pass. telling: seconds of telling the drafters.

        Returns:
            How many times as fast this was as plain decoding of the same tokens, in the same batch, by the measured
            costs; 0 without costs.
        """
        if self._cost is None:
            return 0.0
        self._cost.observe(verified.num_rows, verified.past, verified.processor_seconds, verified.share)
        self._extras.clear()
        # Telling drafters that did not draft is next to free.
        drafting = self._drafted - self._begin + telling if self.chosen is not None or self.shadow is not None else 0.0
        price = self._tokens(drafting) + self._guessing(len(tree), _forced(tree))
        gain = max(0, num_tokens - certain - 1) - price
        guessed, self._before = max(1, num_tokens - certain), self.credit
        self.credit = min(self.credit + gain + SHARE * guessed, MOST)
        self._scoring = min(self._scoring + _SCORING * guessed, _MOST_SCORING)
        for i, drafter in enumerate(drafters):
            if drafter.hit is not None:
                self._score(i, drafter.hit)
            elif i == self.chosen and not certain:
                self._score(i, hit=False)  # it was to guess and did not
        self._is_settled = True
        python = max(0.0, self._meter() - self._begin - drafting)
        self._python += _BLEND * (python - self._python)
        texts = self._batch.sequences
        seconds = self._cost(texts, self._past)
        return num_tokens / (1 + price * seconds / (seconds + texts * self._python))

    def _rest(self, greedy: bool) -> float:
        """Tokens of credit that the last text of the kind left."""
        if greedy != self._greedy:
            return self._left[greedy]
        # What an interrupted step took is charged to nobody, so nothing is left then; nor is what a last step gained,
        # whose tokens may lie behind the end of its text.
        return min(self.credit, self._before) if self._is_settled else 0.0

    def _score(self, i: int, hit: bool) -> None:
        rates, scored = self._rates[self._greedy], self._scored[self._greedy]
        scored[i] = min(scored[i] + 1, _MEMORY)
        rates[i] += (hit - rates[i]) / scored[i]

    def _best(self, prices: Sequence[float], among: Sequence[int]) -> int | None:
        """The drafter of most tokens per second, by the tokens that a guess of each costs; None where none is faster
        than plain decoding."""
        rates, best, most = self._rates[self._greedy], None, 1.0
        for i in among:
            speedup = chain_speedup(rates[i], prices[i], self._extra)
            if speedup > most:
                best, most = i, speedup
        return best

    def _guessing(self, num_rows: int, forced: int) -> float:
        """Tokens that the guesses of so many rows cost, beside rows that a grammar forces."""
        return max(0.0, self._extra(num_rows) - self._extra(1 + forced)) if num_rows > 1 + forced else 0.0

    def _extra(self, num_rows: int) -> float:
        """Tokens that a verify pass over so many rows of this text costs beyond a plain step."""
        extra = self._extras.get(num_rows)
        if extra is None:
            assert self._cost is not None
            # What has been learnt of a few rows may have made them dearer than more of them.
            others = self._batch.rows
            more = self._cost(others + num_rows, self._past) - self._cost(others + 1, self._past)
            extra = self._extras[num_rows] = self._tokens(max(0.0, more))
        return extra

    def _tokens(self, seconds: float) -> float:
        """Seconds of drafting as tokens of plain decoding that all texts wait for."""
        assert self._cost is not None
        return self._batch.sequences * seconds / self._cost(self._batch.sequences, self._past)

    def _seconds(self, tokens: float) -> float:
        assert self._cost is not None
        return tokens * self._cost(self._batch.sequences, self._past) / self._batch.sequences


def _forced(tree: TokenTree) -> int:
    return int(np.count_nonzero(tree.stages == Stage.GRAMMAR))


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
