"""Which drafter to use, if any: the one of the largest speed-up, and never losing more than a little.

The rule, at every stage. A drafter is used only while what it may lose is covered by the credit of the text. The credit
opens with a few steps and grows by a share of what has been written and by what drafting gained, so in no text drafting
loses more than the opening credit and that share. Among drafters that are covered the one of the largest average
speed-up is used, none where none is faster. Another one is tried only when a purse of its own, filled by the same share
and emptied by what its trials lost, covers the trial.

All times are in steps without drafting, each of which writes one token: what is learnt holds where the machine slows
down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_OPENING = 2.2  # steps that drafting may lose in a text before it has gained anything
_SHARE = 0.005  # of a text's tokens, in steps, that may be lost beyond that
_MOST = 8.0  # steps of gains, or of a purse, that are kept: what turned wrong must end soon
_BLEND = 0.01  # least weight of a new observation; what turned wrong is ended by the credit, not by this
_PRIOR = 10  # uses that the first belief is worth


class Choice:
    """Chooses among drafters, text after text; what it has learnt of them stays.

    Args:
        uses: tokens and time of a use of each, as believed before it has been tried.
    """

    def __init__(self, uses: Sequence[tuple[float, float]]) -> None:
        self.credit = 0.0
        self._tokens = [tokens for tokens, _ in uses]
        self._times = [time for _, time in uses]
        self._seen = [_PRIOR] * len(uses)
        self._purses = [0.0] * len(uses)
        self._best: int | None = None

    def open(self) -> int | None:
        """Begin a text; the drafter that will be used most, as things are."""
        self.credit = _OPENING
        return self._fastest(range(len(self._times)))

    def choose(self, prices: Sequence[float]) -> int | None:
        """The drafter to use now, None for none.

        Args:
            prices: time that each is about to spend on drafting.
        """
        covered = [i for i, price in enumerate(prices) if price <= self.credit]
        self._best = self._fastest(covered)
        for i in covered:
            if i != self._best and self._purses[i] >= self._forgone(self._times[i]) + prices[i]:
                return i
        return self._best

    def gain(self, i: int) -> float:
        """Time that a use of a drafter gains on average."""
        return self._tokens[i] - self._times[i]

    def record(self, chosen: int | None, tokens: float, time: float) -> None:
        """What came of a choice: the tokens that were written, and the time that they took."""
        # What the scheduler took away from one step is not the drafter's loss.
        time = min(time, tokens + _OPENING)
        gain, share = tokens - time, _SHARE * tokens
        self.credit = min(self.credit + share + (gain if chosen is not None else 0.0), _MOST)
        self._purses = [min(purse + share, _MOST) for purse in self._purses]
        if chosen is None:
            return
        if chosen != self._best:
            self._purses[chosen] -= max(0.0, self._forgone(time) - gain)
        self._seen[chosen] += 1
        weight = max(_BLEND, 1 / self._seen[chosen])
        self._tokens[chosen] += weight * (tokens - self._tokens[chosen])
        self._times[chosen] += weight * (time - self._times[chosen])

    def _fastest(self, among: Iterable[int]) -> int | None:
        """The drafter of the largest speed-up; None where none is faster than going without."""
        best = max(among, key=self._speedup, default=None)
        return best if best is not None and self.gain(best) > 0 else None

    def _speedup(self, i: int) -> float:
        return self._tokens[i] / self._times[i]

    def _forgone(self, time: float) -> float:
        """What the best drafter gains in that time."""
        return 0.0 if self._best is None else (self._speedup(self._best) - 1) * time
