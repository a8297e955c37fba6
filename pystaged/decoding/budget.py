"""What drafting may spend and what it gained: the only place.

A text has a credit of seconds. A drafter is used only while the credit covers the least it can do, and a step may spend
no more than the credit, verifying included. All prices are those of the text's present length. So at any moment of a
text, in seconds:

    text <= plain + opening + prompt + share + overshoot + mistaken

plain: plain decoding of the same tokens. opening: OPENING plain steps, as believed when the text begins, or what the
text before in this context left of its credit, at most MOST. That was gained or of its share, so all texts of a
context lose no more together than if each had OPENING. A drafter that pays can lose its first steps by chance: with
OPENING alone, half of the texts stopped drafting too early. prompt: PROMPT of what the target needs to read the prompt,
for a drafter to read it, too. share: SHARE of plain. overshoot: by how much the operation that used up the credit took
longer than its price; an operation is a piece of the prompt, a pass or a lookup of a drafter, or a verify pass with
what Python does before the next, of which telling the drafters is a part. The credit is negative then, and the text
plain until it is earned back. mistaken: (1 + SHARE) x by how much plain steps were believed to take longer than they
did, over the tokens of drafted steps.

A plain step is believed to take the decayed mean of those seen, interruptions and all, because those would hit plain
decoding, too; between them it grows with the text, as a pass of one row does. So it is mistaken only until the next
ones are seen after the machine has become faster, which is soon where passes of any size say that it has.

Among drafters that are covered the one of the largest speed-up is used, none where none is faster than plain decoding:
what was seen of it on average, plus the doubt that so few observations leave (an upper confidence bound: Auer et al.
2002; with observations that fade: Garivier & Moulines 2011). So what was unlucky is not given up for good, except where
it would first have to read a prompt and no credit pays for that. Texts differ more than drafters do, so who had the
easy ones looks better: one that mixes in another's guesses is believed to bring about what that one brought, for one
dearer operation a token; its own uses, if they were worse, lower that by 40 % of the difference at most. Another one is
tried only when a purse of its own, filled by the same share and emptied by what its trials lost against what the best
might have gained, covers the trial. What is learnt of drafters is kept in plain steps: it holds where the machine slows
down.

In a crowd, a plain step is one of all its texts together, and time is the text's own: its part of passes, and what its
guesses add to a pass of the target by the measured costs. All others wait for that too, so it counts for each text.
The bound then holds in this reckoning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from pystaged.decoding.cost import PassCost, surprise
from pystaged.decoding.crowd import Crowd
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.requests import Done, Requests
from pystaged.decoding.tree import TokenTree

OPENING = 2.2  # plain steps that drafting may lose in a text before it has gained anything
SHARE = 0.005  # of a text's time that may be lost beyond that
MOST = 16.0  # plain steps of gains, or of a purse, that are kept: what turned wrong must end soon
PROMPT = 0.25  # of what the target needs to read a prompt, for a drafter to read it
_FADE = 0.997  # of what observations are worth, with each step of any text: the drafters learn from all
_PRIOR = 10.0  # uses that the first belief is worth
_SPREAD = 0.6  # standard deviation of a step's speed-up
_LENGTH = 512  # tokens: texts shorter than this, than twice this, than four times this, ... are learnt of apart
_MIXED_IN = 500.0  # uses that the belief from what a drafter mixes in is worth; its own, fading, come to 333 at most
_LEAST = 20.0  # uses that old ones are worth together, at least
_PLAIN_BLEND = 0.1  # least weight of a new plain step
_DOUBT = 1.5  # times what is seen: a plain step that is believed to take more is checked at once, and then forgotten
_CHUNK = 32  # tokens of a prompt from which the seconds for one are learnt
# After so many drafted steps come two plain ones, to see what those take: often at first, and rarely where drafting
# gains more than a plain step. The first of the two is not counted: a draft had the caches before it.
_FIRST_CHECK, _LAST_CHECK, _RARE_CHECK = 4, 128, 1024


@dataclass(slots=True)
class _Learnt:
    """What is known of each drafter: tokens of a step with it, and its time in plain steps; how many observations that
    is worth, the first belief included, and whether there was any, here or in shorter texts."""

    tokens: list[float]
    steps: list[float]
    seen: list[float]
    tried: list[bool]


class Budget:
    """Chooses a drafter for each step of a text, says what it may spend, and keeps account of what came of it.

    Args:
        cost: seconds of a target pass, refined here. None keeps no account: the first drafter is always used.
        uses: called with how many tokens a text has; of each drafter, the tokens of a step with it and its time in
            plain steps, as believed before it has been tried.
        crowd: who shares the passes.
        nested: whether the first drafter mixes in all that the second one guesses.
    """

    def __init__(
        self,
        cost: PassCost | None,
        uses: Callable[[int], Sequence[tuple[float, float]]],
        crowd: Crowd,
        nested: bool = False,
    ) -> None:
        self.credit = 0.0  # seconds
        self._cost = cost
        self._crowd = crowd
        self._clock = crowd.clock
        self._uses = uses
        self._nested = nested
        self._cells = 0  # that the text has filled
        self._texts = 1  # that were stepped together
        self._learnt: dict[tuple[int, int], _Learnt] = {}  # by the crowd's and the text's size, see _here
        self._purses = [0.0] * len(self._here.tokens)  # seconds
        self._prices: list[float] = []  # seconds of the least that each drafter does, as of open or choose
        # Seconds of a plain step without others, behind so many cells, as believed. Passes of one row in drafted steps
        # say nothing of it: a draft had the caches before them.
        self._alone_seconds = cost(1) if cost else 0.0
        self._plain_seen = 1
        self._reading = cost(_CHUNK) / _CHUNK if cost else 0.0  # of the target, a token of a prompt
        self._best: int | None = None
        self._chosen: int | None = None
        self._check_after = self._unchecked = 0  # steps until plain ones are due, and since they were seen
        self._was_plain = False
        self._is_settled = True  # False between the beginning of a drafter's work and its end, which charges it
        self._begin = self._drafted = 0.0

    @property
    def plain_seconds(self) -> float:
        """Of a plain step, as believed."""
        if self._cost is None or self._texts == 1:
            return self._alone_seconds
        # With what Python does for each of the texts.
        one, cells = self._cost(1, self._cells), self._cells
        return self._cost(self._texts, cells) + self._texts * max(0.0, self._alone_seconds - one)

    def inherit(self, other: Budget) -> None:
        """Believe what another one, of the same target and drafters, has learnt."""
        self._learnt, self._purses = deepcopy(other._learnt), other._purses.copy()
        self._texts, self._cells = other._texts, other._cells
        self._alone_seconds, self._plain_seen = other._alone_seconds, other._plain_seen
        self._reading, self._check_after, self._unchecked = other._reading, other._check_after, other._unchecked

    def open(self, drafters: Sequence[Drafter], prompt_tokens: int, read: tuple[int, float]) -> Requests[None]:
        """Begin a text. The drafter that is believed to gain most reads its prompt at once; others pay for that later.

        Args:
            drafters: none for a plain text.
            read: how many tokens of the prompt the target has just read, and in how many seconds.
        """
        self._was_plain = False
        if self._cost is None:
            return
        self._go_to(prompt_tokens - 1)
        for i, (tokens, steps) in enumerate(self._uses(self._cells)):
            if not self._here.tried[i]:
                self._here.tokens[i], self._here.steps[i] = tokens, steps
        if read[0] >= _CHUNK:
            self._reading = read[1] / read[0]
        # Where a step was interrupted nobody knows what it cost, so nothing is carried.
        carried = min(self.credit, MOST * self.plain_seconds) if self._is_settled else 0.0
        self.credit, self._is_settled = max(OPENING * self.plain_seconds, carried), True
        self._prices = [drafter.price() for drafter in drafters]
        # By the mean, not the upper bound: else a drafter that only might pay reads every prompt, and is hardly used.
        best = self._fastest(range(len(drafters)), self._mean)
        if best is None:
            return
        allowance = PROMPT * self._reading * prompt_tokens
        begin, self._is_settled = self._clock(), False
        yield from drafters[best].catch_up(allowance + self.credit / 2)
        self.credit -= max(0.0, self._clock() - begin - allowance)
        self._is_settled = True

    def choose(self, drafters: Sequence[Drafter], cells: int) -> int | None:
        """Begin a step: the drafter to use for it, None for none.

        Args:
            cells: that the text has filled.
        """
        self._begin = self._clock()
        self._go_to(cells)
        self._chosen = self._choose(drafters)
        self._is_settled = self._chosen is None
        self._drafted = self._clock()
        return self._chosen

    @property
    def chosen(self) -> int | None:
        """The drafter of the step in hand, None for none."""
        return self._chosen

    @property
    def seconds(self) -> float:
        """Seconds that the chosen drafter may use: what is left when verifying one node is paid."""
        return (self.credit - self._extra(2)) / self._texts if self._cost else math.inf

    def trim(self, tree: TokenTree) -> TokenTree:
        """The part of what was drafted that verifying loses no more than the credit still holds."""
        self._drafted = self._clock()
        if self._cost is None:
            return tree
        left = self.credit - self._texts * (self._drafted - self._begin)
        rows = len(tree)
        while rows > 1 and self._extra(rows) > left:
            rows -= 1
        return tree.head(rows)

    def record(self, num_rows: int, num_tokens: int, verified: Done, certain: int = 0) -> float:
        """End the step: what it verified, wrote and took.

        Args:
            certain: how many of the tokens were accepted without anybody's drafting them.

        Returns:
            Seconds of plain decoding of the same tokens, in the same crowd; 0 without costs.
        """
        if self._cost is None:
            return 0.0
        told = self._clock()
        self._cost.observe(verified.num_rows, verified.cells, verified.seconds, verified.share)
        if self._chosen is None:
            seconds = self._texts * (self._drafted - self._begin) + verified.seconds
            is_plain = verified.num_rows == self._texts
            if not is_plain:
                # Others' guesses and prompts are in it: what plain steps take cannot be seen.
                self._count_check()
            elif self._was_plain:
                self._see_plain(seconds)
            self._was_plain = is_plain
            self._earn(0.0, SHARE * min(seconds, self.plain_seconds))
        else:
            self._was_plain = False
            drafted = num_tokens - certain
            plain = drafted * self.plain_seconds
            seconds = told - self._begin
            if verified.share < 1:
                seconds += self._part(num_rows, verified) - verified.share * verified.seconds
            gain = plain - self._texts * seconds
            self._earn(gain, SHARE * plain)
            self._learn(self._chosen, drafted, gain)
        for each in self._learnt.values():
            each.seen = [max(_FADE * seen, min(seen, _LEAST)) for seen in each.seen]
        self._is_settled = True
        return num_tokens * self.plain_seconds

    @property
    def _here(self) -> _Learnt:
        """What is known of the drafters in such a crowd, for a text of such a length: a guess that pays for one text
        may not for eight, nor behind thousands of tokens that each of its rows attends to."""
        crowd, length = self._texts.bit_length(), (self._cells // _LENGTH).bit_length()
        if (crowd, length) not in self._learnt:
            uses = self._uses(self._cells)
            tried = [False] * len(uses)
            # When a length is first met: what was seen of texts half as long says more than a belief.
            if shorter := self._learnt.get((crowd, length - 1)):
                tried = shorter.tried.copy()
                seen = zip(shorter.tokens, shorter.steps, strict=True)
                uses = [found if was else use for found, was, use in zip(seen, tried, uses, strict=True)]
            self._learnt[crowd, length] = _Learnt(
                [tokens for tokens, _ in uses], [steps for _, steps in uses], [_PRIOR] * len(uses), tried
            )
        return self._learnt[crowd, length]

    def _part(self, num_rows: int, verified: Done) -> float:
        """Seconds of a shared pass that count for a text: an equal part of a plain pass, and what its guesses add."""
        if self._cost is None:
            return 0.0
        whole, without = (self._cost(n, verified.cells) for n in (verified.num_rows, verified.num_rows - num_rows + 1))
        return self._cost(self._texts, self._cells) / self._texts + max(0.0, whole - without)

    def _go_to(self, cells: int) -> None:
        """Price plain steps for a text that has filled so many cells, in the crowd that there is."""
        if self._cost:
            self._alone_seconds *= self._cost(1, cells) / self._cost(1, self._cells)
        self._cells = cells
        if self._texts != self._crowd.texts:
            plain = self.plain_seconds
            self._texts = self._crowd.texts
            if plain:
                self.credit *= self.plain_seconds / plain

    def _choose(self, drafters: Sequence[Drafter]) -> int | None:
        if self._cost is None:
            return 0 if drafters else None
        verifying = self._extra(2)
        self._prices = [drafter.price() for drafter in drafters]
        least = [drafter.lag() + price + verifying for drafter, price in zip(drafters, self._prices, strict=True)]
        covered = [i for i, seconds in enumerate(least) if seconds <= self.credit]
        self._best = chosen = self._fastest(covered, self._upper_bound)
        for i in covered:
            if i == self._best:
                continue
            trial = self._forgone(self._here.steps[i]) * self.plain_seconds + least[i]
            if self._purses[i] >= trial:
                chosen = i
                break
        if chosen is not None:
            self._unchecked += 1
            gains = self._here.tokens[chosen] - self._here.steps[chosen]
            # By a plain step that is believed to be too long, whatever is drafted seems to gain.
            doubtful = self._alone_seconds > _DOUBT * self._cost(1, self._cells)
            if self._unchecked > (self._check_after if gains < 1 or doubtful else _RARE_CHECK):
                return None
        return chosen

    def _extra(self, num_rows: int) -> float:
        """Seconds that a verify pass takes beyond a plain step."""
        if self._cost is None:
            return 0.0
        # What has been learnt of a few rows may have made them dearer than more of them.
        one, others = self._cost(1, self._cells), self._crowd.rows
        more = self._cost(others + num_rows, self._cells) - self._cost(others + 1, self._cells)
        return max(0.0, more / one) * self._alone_seconds * self._texts

    def _see_plain(self, seconds: float) -> None:
        self._plain_seen += 1
        weight = max(_PLAIN_BLEND, 1 / self._plain_seen)
        least = min(self._alone_seconds, self._cost(1, self._cells)) if self._cost and self._texts > 1 else 0.0
        self._alone_seconds *= 1 + weight * surprise(seconds, self.plain_seconds)
        if self.plain_seconds > _DOUBT * seconds:
            # Another time's, or of a busy machine. What was learnt and earned by it is as wrong.
            self._alone_seconds *= seconds / self.plain_seconds
            self._plain_seen = 1
            for each in self._learnt.values():
                each.seen = [_PRIOR] * len(each.seen)
            self.credit = min(self.credit, OPENING * seconds)
        # A crowd's step tells what texts add to its pass. What the pass takes is not learnt here, and would sink to 0.
        self._alone_seconds = max(self._alone_seconds, least)
        self._count_check()

    def _count_check(self) -> None:
        if self._unchecked > self._check_after:
            self._check_after = min(max(2 * self._check_after, _FIRST_CHECK), _LAST_CHECK)
        self._unchecked = 0

    def _earn(self, gain: float, share: float) -> None:
        most = MOST * self.plain_seconds
        self.credit = min(self.credit + gain + share, most)
        self._purses = [min(purse + share, most) for purse in self._purses]

    def _learn(self, chosen: int, num_tokens: int, gain: float) -> None:
        """What a use of a drafter brought; the gain in seconds."""
        steps = num_tokens - gain / self.plain_seconds
        if chosen != self._best:
            self._purses[chosen] -= max(0.0, self._forgone(steps) * self.plain_seconds - gain)
        # What another process took away from one step is charged, but says little of the drafter.
        steps = min(steps, num_tokens + MOST)
        here = self._here
        here.seen[chosen] += 1
        here.tried[chosen] = True
        weight = 1 / here.seen[chosen]
        here.tokens[chosen] += weight * (num_tokens - here.tokens[chosen])
        here.steps[chosen] += weight * (steps - here.steps[chosen])

    def _fastest(self, among: Iterable[int], speedup: Callable[[int], float]) -> int | None:
        """The drafter of the largest speed-up; None where none is faster than going without."""
        best = max(among, key=speedup, default=None)
        return best if best is not None and speedup(best) > 1 else None

    def _upper_bound(self, i: int) -> float:
        """The upper confidence bound of a drafter's speed-up: what was unlucky is used again."""
        return self._mean(i) + _SPREAD / math.sqrt(self._here.seen[i])

    def _mean(self, i: int) -> float:
        """A drafter's speed-up over plain decoding, by what was seen of it and of what it mixes in."""
        here, below = self._here, i + 1
        mean, seen = here.tokens[i] / here.steps[i], here.seen[i]
        if self._nested and below < len(here.tokens):
            dearer = self._texts * max(0.0, self._prices[i] - self._prices[below]) / self.plain_seconds
            brought = here.tokens[below] / (here.steps[below] + here.tokens[below] * dearer)
            mean = max(mean, (seen * mean + _MIXED_IN * brought) / (seen + _MIXED_IN))
        return mean

    def _forgone(self, steps: float) -> float:
        """Plain steps that the best drafter may gain in so many. By its upper bound: by its mean, another one that is
        well known would be tried at every step."""
        return 0.0 if self._best is None else max(0.0, self._upper_bound(self._best) - 1) * steps
