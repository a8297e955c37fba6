"""Decides whether a step drafts and which drafter it uses, within a credit that each sequence has.

The bound: apart from credit that earlier sequences left, drafting may slow a sequence by at most the time of 4 tokens
of plain decoding in the first sequence of a context and of 1 token in each later one (OPENING, LEAST; greedy and
sampled sequences have separate credits), or by 3 ms where that is more. Added to this are half a percent of its length,
a quarter of the target's prefill time, the time of each drafter's first draft in a context, and the time by which the
operation that used up the credit exceeded its price.

Costs are counted in tokens of plain decoding, each of which takes a pass over one row, T(1). A drafted step costs

    price = (T(n) - T(1) + drafting) / T(1)

and gains its tokens after the first. T(n) is the time of a pass over n rows, measured when the model is loaded and
refined since; `drafting` is the time to propose the tree and to learn from the result. All times are processor time,
which excludes other programs. A drafter's first draft in a context takes longer, because it uses memory and code for
the first time, so it is charged its estimated price. Each step subtracts its price from the credit and adds its
gain. A drafter is used only while the credit covers its smallest draft. A tree is cut to the nodes that the credit
covers, but at least to its first guess. The next sequence inherits the remaining credit.

The drafter with the most expected tokens per second drafts. The score of a drafter is how often its first guess for
the next token is right: it is updated when the drafter drafts, and at times by a guess that is not verified (full
information, arXiv 2510.20064). If even the best drafter would not gain, this step and the next 7 are plain.

In a batch, a plain step is a pass over one row of each sequence, and all sequences wait while one of them drafts:
T(1) becomes T(sequences), and a price counts once for each sequence.
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
from pystaged.decoding.experts import ExpertCost
from pystaged.decoding.meter import Meter
from pystaged.decoding.requests import Done, Requests
from pystaged.decoding.tree import Stage, TokenTree

OPENING = 4.0  # tokens of credit for the first sequence of a context
LEAST = 1.0  # least tokens of credit for each later sequence
LEAST_SECONDS = 0.003  # least credit of any sequence: a token of a tiny target takes less than one scheduling delay
SHARE = 0.005  # tokens of credit added for each decoded token
MOST = 16.0  # most tokens of credit kept, so that drafting ends soon after it stops paying
PROMPT = 0.25  # longest prefill of a drafter, as a share of the target's prefill time
_SCORING = 0.5 * SHARE  # tokens of credit for each decoded token, for scoring drafters that do not draft
_FIRST_SCORING, _MOST_SCORING = 0.25, 1.0  # tokens of that credit: at the start of a sequence; most that are kept
_PRIOR, _MEMORY = 16, 48  # weight of a drafter's initial rate, in guesses; most guesses that a rate averages over
_RETURN = 0.05  # share of the way that each new sequence moves a rate back to its initial value
_READ = 32  # rows of the pass whose cost estimates the time of prefill
_DEEPEST = 8  # tokens of the longest chain by which drafters are compared
_BLEND = 0.05  # weight of a new observation of Python's time
_PAUSE = 7  # plain steps after a step in which no drafter would gain: costs and credit change slowly


@dataclass(slots=True)
class _Known:
    """State learnt from greedy sequences, or from sampled ones.

    rates: for each drafter, the share of its first guesses that are right. scored: number of guesses behind each rate.
    left: tokens of credit for the next sequence.
    """

    rates: list[float]
    scored: list[int]
    left: float = OPENING


class Budget:
    """Chooses a drafter for each step of a sequence, limits its time, and keeps the sequence's credit.

    Args:
        cost: processor seconds of a target pass, refined here. With None the first drafter always drafts.
        batch: the batch that shares the passes.
        meter: measures the time of drafting.
        rates: for each drafter, the initial estimate of the share of its first guesses that are right.
    """

    def __init__(self, cost: PassCost | None, batch: BatchLoad, meter: Meter, rates: Sequence[float]) -> None:
        self.credit = OPENING  # tokens
        self.chosen: int | None = None  # the drafter of the current step
        self.shadow: tuple[int, float] | None = None  # a drafter that is only scored in this step, and its seconds
        self._cost, self._batch, self._meter = cost, batch, meter
        self._first = list(rates)
        self._kinds = {greedy: _Known(self._first.copy(), [_PRIOR] * len(self._first)) for greedy in (True, False)}
        self._known = self._kinds[True]  # of the sequence's kind
        self._past = 0  # past length of the step's rows
        self._token = math.inf  # seconds of one token of plain decoding: a plain pass's, divided by its sequences
        self._least = 0.0  # seconds that the chosen drafter needs at least
        self._unused = set(range(len(rates)))  # drafters that have not drafted in this context
        self._most_drafting = math.inf  # seconds of drafting that the step is charged at most
        self._scoring = 0.0  # tokens of credit for scoring
        self._pause = 0  # plain steps left until drafters are considered again
        self._last_shadow = 0
        self._python = 0.0  # seconds of a step outside the pass and drafting
        self._begin = self._drafted = 0.0  # when the step began, and when its tree was drafted

    def inherit(self, other: Budget) -> None:
        """Copy the learnt state of another budget for the same target and drafters."""
        for greedy, known in other._kinds.items():
            left = min(known.left, OPENING)
            self._kinds[greedy] = _Known(known.rates.copy(), known.scored.copy(), left)
        self._known = self._kinds[True]
        self._python = other._python

    def open(self, drafters: Sequence[Drafter], prompt_tokens: int, read: int, greedy: bool) -> Requests[None]:
        """Begin a sequence. The drafter with the highest expected gain prefills at once; others do so later.

        Args:
            drafters: empty for plain decoding.
            read: number of prompt tokens that the target had to prefill.
            greedy: whether decoding is greedy, which has rates and credit of its own.
        """
        known = self._known = self._kinds[greedy]
        self.credit = max(LEAST, known.left)
        self._scoring, self.chosen, self._pause = _FIRST_SCORING, None, 0
        if self._cost is None or not drafters:
            return
        self._price_token(prompt_tokens - 1)
        self.credit = max(self.credit, LEAST_SECONDS / self._cost(1, self._past))
        known.left = 0.0  # until prefill ends: the time of an interrupted prefill is not subtracted
        for i, first in enumerate(self._first):
            known.rates[i] += _RETURN * (first - known.rates[i])
        best = self._best(drafters, [drafter.price() / self._token for drafter in drafters], range(len(drafters)))
        if best is not None:
            allowance = PROMPT * self._cost(_READ, self._past // 2) / _READ * read
            begin = self._meter()
            yield from drafters[best].catch_up(allowance + self.credit / 2 * self._token)
            self.credit -= max(0.0, self._meter() - begin - allowance) / self._token
        known.left = self.credit

    def choose(self, drafters: Sequence[Drafter], past: int) -> None:
        """Begin a step: choose the drafter that it uses, and one that is only scored.

        Args:
            past: tokens of the sequence before the root.
        """
        self._begin = self._drafted = self._meter()
        self.chosen = self.shadow = None
        self._most_drafting = math.inf
        if self._cost is None:
            self.chosen = 0 if drafters else None
            return
        self._price_token(past)
        if self.credit <= 0:
            return
        if self._pause > 0:
            self._pause -= 1
            return
        self._known.left = 0.0
        prices = [drafter.price() / self._token for drafter in drafters]
        least = [drafter.lag() / self._token + price for drafter, price in zip(drafters, prices, strict=True)]
        verifying = self._extra(2)
        affordable = [i for i, price in enumerate(least) if price + verifying <= self.credit]
        self.chosen = self._best(drafters, prices, affordable)
        self._least = least[self.chosen] * self._token if self.chosen is not None else 0.0
        # Scoring must leave enough credit for the chosen drafter, or for one to be used again.
        reserved = least[self.chosen] if self.chosen is not None else min(least, default=0.0)
        most = min(self.credit - reserved - verifying, self._scoring)
        for turn in range(1, len(drafters) + 1):
            i = (self._last_shadow + turn) % len(drafters)
            if i != self.chosen and least[i] <= most:
                self.shadow, self._last_shadow = (i, most * self._token), i
                self._scoring -= least[i]
                break
        drafting = {i for i in (self.chosen, self.shadow[0] if self.shadow else None) if i is not None}
        if not drafting:
            self._pause = _PAUSE
        if drafting & self._unused:
            self._unused -= drafting
            self._most_drafting = sum(least[i] for i in drafting) * self._token

    @property
    def seconds(self) -> float:
        """Seconds that the step's drafter may use: the credit less the price of verifying one node, but at least the
        time that its smallest draft needs."""
        if self._cost is None:
            return math.inf
        left = (self.credit - self._extra(2)) * self._token - (self._meter() - self._begin)
        return max(left, self._least)

    def trim(self, tree: TokenTree) -> TokenTree:
        """The first nodes of a tree, as many as the credit covers, but at least the forced ones and the first guess."""
        self._drafted = self._meter()
        if self._cost is None or len(tree) == 1:
            return tree
        left = self.credit - min(self._drafted - self._begin, self._most_drafting) / self._token
        rows, certain = len(tree), _certain_rows(tree)
        while rows > certain + 1 and self._extra(rows, certain) > left:
            rows -= 1
        return tree.head(rows)

    def record(
        self, drafters: Sequence[Drafter], verified: Done, telling: float, certain: int, experts: int | None = None
    ) -> float:
        """End the step.

        Args:
            verified: the result of its Verify request. telling: seconds of passing the tokens to the drafters.
            certain: number of its tokens that a grammar forced.
            experts: of a mixture, the distinct ones that the pass used, over all layers.

        Returns:
            The estimated speedup over plain decoding of the same tokens in the same batch; 0 without costs.
        """
        if self._cost is None:
            return 0.0
        tree, _, tokens, *_ = verified.result
        self._price_token(self._past)  # in the batch that shared the pass
        # Passing tokens to drafters that did not draft takes almost no time.
        drafting = self._drafted - self._begin + telling if self.chosen is not None or self.shadow is not None else 0.0
        charged = min(drafting, self._most_drafting)
        alone = verified.num_rows == len(tree) and not self._batch.rows  # else the others' experts are among them
        extra = self._extra(len(tree), _certain_rows(tree), experts if alone else None) if len(tree) > 1 else 0.0
        price = charged / self._token + extra
        guessed, before = max(1, len(tokens) - certain), self.credit
        self.credit = min(before + guessed - 1 - price + SHARE * guessed, MOST)
        # The sequence may end before the tokens that this step gained.
        self._known.left = min(before, self.credit)
        self._scoring = min(self._scoring + _SCORING * guessed, _MOST_SCORING)
        for i, drafter in enumerate(drafters):
            if drafter.hit is not None:
                self._score(i, drafter.hit)
            elif i == self.chosen and not certain:
                self._score(i, hit=False)  # it was asked and made no guess
        python = max(0.0, self._meter() - self._begin - drafting)
        self._python += _BLEND * (python - self._python)
        texts = self._batch.sequences
        seconds = texts * self._token
        self._cost.observe(verified.num_rows, verified.past, verified.processor_seconds, verified.share, experts)
        return len(tokens) / (1 + price * seconds / (seconds + texts * self._python))

    def _score(self, i: int, hit: bool) -> None:
        known = self._known
        known.scored[i] = min(known.scored[i] + 1, _MEMORY)
        known.rates[i] += (hit - known.rates[i]) / known.scored[i]

    def _best(self, drafters: Sequence[Drafter], prices: Sequence[float], among: Sequence[int]) -> int | None:
        """The drafter with the most tokens per second; None where none is faster than plain decoding. prices: of each
        drafter, in tokens.

        In a mixture of experts the average guess seldom pays, but the likeliest guesses may, and trees are cut to
        these. So if no drafter gains on average, the one that would gain most by guessing only where it is right is
        chosen, if that is a gain."""
        extra = cache(self._extra)  # each drafter needs the same few values
        best, most = None, 1.0
        for i in among:
            speedup = chain_speedup(self._known.rates[i], prices[i], extra, drafters[i].places)
            if speedup > most:
                best, most = i, speedup
        if best is None and isinstance(self._cost, ExpertCost):
            gains = [(self._known.rates[i] * (1 - extra(2)) - prices[i], i) for i in among]
            gain, best = max(gains, default=(0.0, None))
            return best if gain > 0 else None
        return best

    def _price_token(self, past: int) -> None:
        """Set the past length of a step, and from it the seconds of a token."""
        assert self._cost is not None
        self._past = past
        self._token = self._cost(self._batch.sequences, past) / self._batch.sequences

    def _extra(self, num_rows: int, certain: int = 1, experts: int | None = None) -> float:
        """Tokens that a pass over `num_rows` rows of this sequence costs beyond a pass over its `certain` rows.
        experts: those that it used; None for as many as usual."""
        assert self._cost is not None
        others = self._batch.rows
        more = self._cost(others + num_rows, self._past, experts) - self._cost(others + certain, self._past)
        # After refinement, a pass over few rows may seem to cost more than one over many.
        return max(0.0, more) / self._token


def _certain_rows(tree: TokenTree) -> int:
    """Number of rows of the root and of tokens that a grammar forces."""
    return 1 + int(np.count_nonzero(tree.stages == Stage.GRAMMAR))


def chain_speedup(rate: float, price: float, extra: Callable[[int], float], places: int = 1) -> float:
    """Speedup over plain decoding of a chain of guesses of the best length.

    Args:
        rate: probability that a guess is right.
        price: tokens that drafting `places` guesses costs.
        extra: tokens that a pass over the given number of rows costs beyond a plain step.
    """
    tokens, most = 1.0, 0.0
    for depth in range(1, _DEEPEST + 1):
        tokens += rate**depth
        speedup = tokens / (1 + extra(1 + depth) + -(-depth // places) * price)
        if speedup <= most:
            break
        most = speedup
    return most
