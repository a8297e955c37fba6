"""Figures that cannot contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

import pystaged
from pystaged import FixedPolicy, GenerationStats, Stage
from pystaged.decoding.requests import Verify
from pystaged.decoding.tree import TreeBuilder
from pystaged.options.config import SamplingConfig
from pystaged.stats import DrafterStats


@pytest.mark.parametrize(("plain_seconds", "shown"), [(1.3, " (about 1.3x plain)"), (2.4, ""), (0.0, "")])
def test_no_more_speed_than_tokens_per_step(plain_seconds: float, shown: str) -> None:
    """A machine that has become faster than it was when its passes were measured promises nothing."""
    stats = GenerationStats(new_tokens=15, steps=10, decode_seconds=1.0, plain_seconds=plain_seconds)
    stats.stages["draft"].accepted = 5
    stats.drafters["draft"] = DrafterStats(seconds=0.1)
    assert str(stats) == f"15 tokens, 15.0 per second{shown}, 1.50 per step"
    assert stats.speedup_estimate == (plain_seconds if shown else None)


def test_nothing_counts_after_the_end_of_a_text() -> None:
    """Neither for the tokens per step, nor for the speed over plain decoding."""
    builder = TreeBuilder(0)
    for node in range(5):
        builder.add(node, node + 1, 0.9, Stage.NGRAM)
    session: Any = None
    # A whole step, and one that is cut by an end token, a stop string, an end token at once.
    for emitted, tokens, path in ((6, 6, 6), (3, 4, 4), (1, 1, 1), (0, 1, 1)):
        verified = Verify(session, 0, builder.build(range(1, 6)), SamplingConfig().native)
        verified.result = [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], None, ()
        stats = GenerationStats()
        stats.record(verified, [Stage.NGRAM] * emitted, tokens, 1, 3.0, 0.1)
        assert (stats.tokens_per_step, stats.stages["ngram"].accepted, stats.new_tokens) == (path, path - 1, emitted)
        assert stats.plain_seconds == pytest.approx(0.3 * path / 6)


def test_an_end_token_after_a_stop_string_does_not_count() -> None:
    said = " Return the given function of the given function.\n\n"
    with pystaged.load("bundled", draft=None, policy=FixedPolicy(1, 20, 20)) as engine:
        stream = engine.stream('def fibonacci(n):\n    """\n   ', prediction=said, stop="n.")
        stream.text._is_end = lambda token: engine.tokenizer.decode([token]) == "\n\n"
        result = stream.finish()
    assert result.text + "n.\n\n" == said
    assert sum((1 + accepted) * steps for accepted, steps in result.stats.lengths.items()) == len(result.tokens)
