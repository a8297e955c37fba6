"""Which drafter to use, if any: by what each gains over doing without, and never losing more than a little.

The rule, at every stage. A drafter is used only while what it may lose is covered by the credit of the text. The credit
opens with the time of a few passes and grows by a share of the time of going without and by what drafting gained, so in
no text drafting loses more than the opening credit and that share. Among drafters that are covered the one of the
largest average gain is used, none where no gain is positive. Another one is tried only when a purse of its own, filled
by the same share and emptied by what its trials lost, covers the trial.
"""

from __future__ import annotations

from collections.abc import Sequence

_OPENING = 2.2  # passes that drafting may lose in a text before it has gained anything
_SHARE = 0.005  # of the time of going without that may be lost beyond that
_MOST = 8.0  # passes of gains, or of a purse, that are kept: what turned wrong must end soon
_BLEND = 0.08  # weight of a new observation; what turned wrong is ended by the credit, not by this


class Choice:
    """Chooses among drafters, text after text; what it has learnt of them stays.

    Args:
        gains: what each is believed to gain per use before it has been tried, seconds.
    """

    def __init__(self, gains: Sequence[float]) -> None:
        self.gains = list(gains)
        self.credit = 0.0
        self._purses = [0.0] * len(self.gains)
        self._pass = 0.0
        self._best: int | None = None

    def open(self, pass_seconds: float) -> None:
        """Begin a text.

        Args:
            pass_seconds: of a pass without drafting.
        """
        self._pass = pass_seconds
        self.credit = _OPENING * pass_seconds

    def choose(self, prices: Sequence[float]) -> int | None:
        """The drafter to use now, None for none.

        Args:
            prices: seconds that each is about to spend on drafting.
        """
        covered = [i for i, price in enumerate(prices) if price <= self.credit]
        best = max(covered, key=self.gains.__getitem__, default=None)
        if best is not None and self.gains[best] <= 0:
            best = None
        self._best = best
        for i in covered:
            if i != best and self._purses[i] >= self._gain_of_best() + prices[i]:
                return i
        return best

    def record(self, chosen: int | None, without: float, seconds: float) -> None:
        """What came of a choice.

        Args:
            without: seconds that the same tokens take without drafting.
            seconds: that they took.
        """
        # What the scheduler took away from one step is not the drafter's loss.
        gain = max(without - seconds, -_OPENING * self._pass)
        share, most = _SHARE * without, _MOST * self._pass
        self.credit = min(self.credit + share + (gain if chosen is not None else 0.0), most)
        self._purses = [min(purse + share, most) for purse in self._purses]
        if chosen is None:
            return
        if chosen != self._best:
            self._purses[chosen] -= max(0.0, self._gain_of_best() - gain)
        self.gains[chosen] += _BLEND * (gain - self.gains[chosen])

    def _gain_of_best(self) -> float:
        return 0.0 if self._best is None else self.gains[self._best]
