"""The account of a text: it decides whether a step may draft, and how much.

A text has a credit: OPENING tokens of plain decoding in an engine's first text, then what earlier texts left in its
context, LEAST to MOST, and SHARE of every decoded token; a step pays with it the time of drafting and of the rows
beyond plain decoding's, earns its tokens after the first, and drafts only while the credit covers the cheapest guess.
So drafting slows a text by no more than its credit, PROMPT of the target's prefill time, and the time by which one step
exceeds its estimate.

In a batch, a plain step is a pass over one row of each text, and all texts wait while one of them drafts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.policy import BatchLoad
from pystaged.decoding.requests import AnyRequest, Verify
from pystaged.decoding.tree import TokenTree

OPENING = 4.0  # tokens of credit for an engine's first text
LEAST = 1.0  # least tokens of credit for each later text
LEAST_SECONDS = 0.003  # least credit of any text: a token of a tiny target takes less than one scheduling delay
SHARE = 0.005  # tokens of credit added for each decoded token
MOST = 16.0  # most tokens of credit, so that drafting ends soon after it stops paying
PROMPT = 0.25  # longest prefill of a drafter, as a share of the target's prefill time


class Meter:
    """Processor seconds of a text's own Python and of its share of draft passes; stops during passes.

    Args:
        clock: processor seconds of the calling thread, which exclude other programs: they are no cost of drafting.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._since, self._before = clock(), 0.0

    def __call__(self) -> float:
        """Seconds so far. Only the difference of two calls has a meaning."""
        return self._before + self._clock() - self._since

    def stop(self) -> None:
        """Stop for a pass, and for what other texts do meanwhile."""
        self._before = self()

    def go_on(self, draft: AnyRequest | None = None) -> None:
        """Go on after a pass; that of a draft counts by the text's share of it."""
        self._since = self._clock()  # another thread may go on, whose clock differs
        if draft:
            self._before += draft.share * draft.processor_seconds


class Account:
    """Keeps the credit of a context's texts.

    Args:
        cost: processor seconds of a target pass, refined here. With None every step drafts.
        batch: the batch that shares the passes. meter: measures the time of drafting.
    """

    def __init__(self, cost: PassCost | None, batch: BatchLoad, meter: Meter) -> None:
        self.credit = OPENING  # tokens
        self._cost, self._batch, self._meter = cost, batch, meter
        self.left = OPENING  # credit for the next text
        self._free_until = math.inf  # the meter's time from which reading the prompt is charged
        self._past, self._token = 0, math.inf  # tokens before the root; seconds of a token of plain decoding
        self._begin = self._drafting = 0.0  # when the step began; seconds of drafting

    def open(self, drafter: Drafter | None, prompt_tokens: int, read: int) -> None:
        """Begin a text: the drafter begins to read the prompt, as far as that is covered.

        Args:
            drafter: None for plain decoding. read: number of prompt tokens that the target had to prefill.
        """
        self.credit, self._free_until = max(LEAST, self.left), math.inf
        if self._cost is None or drafter is None:
            return
        self._price_token(prompt_tokens - 1)
        self.credit = max(self.credit, LEAST_SECONDS / self._token)
        self.left = 0.0  # if prefill is interrupted, its time is never subtracted
        free = PROMPT * self._cost.prefill(read, self._past - read)
        self._free_until = self._meter() + free
        drafter.catch_up(free + self.credit / 2 * self._token)

    def begin(self, drafter: Drafter | None, past: int) -> float | None:
        """Begin a step. past: tokens of the text before the root. Returns the seconds that it may draft, which are the
        credit less the price of verifying one node; None if it does not draft."""
        self._begin, self._drafting = self._meter(), 0.0
        if self._cost is None:
            return math.inf if drafter else None
        self._price_token(past)
        self.credit -= max(0.0, self._begin - self._free_until) / self._token  # for the prompt, before the first step
        self.left, self._free_until = self.credit, math.inf
        verifying = self._extra(2)
        if drafter is None or verifying + (drafter.lag() + drafter.price()) / self._token > self.credit:
            return None
        self.left = 0.0  # if the step fails, its time is never subtracted
        return (self.credit - verifying) * self._token - (self._meter() - self._begin)

    def trim(self, tree: TokenTree) -> TokenTree:
        """The first nodes of a drafted tree, as many as the credit covers, but at least the forced ones and the first
        guess."""
        if self._cost is None:
            return tree
        self._drafting = self._meter() - self._begin
        left = self.credit - self._drafting / self._token
        rows, certain = len(tree), tree.num_certain
        while rows > certain + 1 and self._extra(rows, certain) > left:
            rows -= 1
        return tree.head(rows)

    def record(self, verified: Verify, telling: float, certain: int) -> float:
        """End the step; returns the estimated speedup over plain decoding of its tokens in the batch, 0 without costs.

        Args:
            verified: its request, with the result. telling: seconds of giving its tokens to a drafter that drafted.
            certain: number of its tokens that a grammar forced.
        """
        if self._cost is None:
            return 0.0
        tokens = verified.result[1]
        self._price_token(self._past)  # in the batch that shared the pass
        drafting = self._drafting + telling
        price = drafting / self._token + self._extra(len(verified.tree), verified.tree.num_certain)
        guessed, before = max(1, len(tokens) - certain), self.credit
        self.credit = min(before + guessed - 1 - price + SHARE * guessed, MOST)
        # What this step gained counts from the next one on: the text may have ended before it.
        self.left = min(before, self.credit)
        python = max(0.0, self._meter() - self._begin - drafting)
        self._cost.observe(verified.pass_rows, verified.pass_past, verified.processor_seconds, verified.share)
        return len(tokens) / (1 + price * self._token / (self._token + python))

    def _price_token(self, past: int) -> None:
        """Set the past length of a step, and from it the seconds of a token: a plain pass's, divided by its texts."""
        assert self._cost is not None
        self._past = past
        self._token = self._cost(self._batch.texts, past) / self._batch.texts

    def _extra(self, num_rows: int, certain: int = 1) -> float:
        """Tokens that a pass over `num_rows` rows of this text costs beyond a pass over its `certain` rows."""
        assert self._cost is not None
        others, past = self._batch.rows, self._past
        more = self._cost(others + num_rows, past) - self._cost(others + certain, past)
        # After refinement, a pass over few rows may seem to cost more than one over many.
        return max(0.0, more) / self._token
