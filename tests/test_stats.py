"""Figures that cannot contradict each other."""

from __future__ import annotations

import pytest

from pystaged import GenerationStats
from pystaged.stats import DrafterStats


@pytest.mark.parametrize(("plain_seconds", "shown"), [(1.3, " (about 1.3x plain)"), (2.4, ""), (0.0, "")])
def test_no_more_speed_than_tokens_per_step(plain_seconds: float, shown: str) -> None:
    """A machine that has become faster than it was when its passes were measured promises nothing."""
    stats = GenerationStats(new_tokens=15, steps=10, decode_seconds=1.0, plain_seconds=plain_seconds)
    stats.stages["draft"].accepted = 5
    stats.drafters["draft"] = DrafterStats(seconds=0.1)
    assert str(stats) == f"15 tokens, 15.0 per second{shown}, 1.50 per step"
    assert stats.speedup_estimate == (plain_seconds if shown else None)
