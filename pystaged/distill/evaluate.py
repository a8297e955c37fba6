"""How much faster a target is with its draft, on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pystaged

TOKENS = 128  # of a text
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "at temperature 1": {"temperature": 1.0, "top_k": 50}}


@dataclass(frozen=True)
class Gain:
    """plain, staged: seconds of decoding the texts without and with the draft. tokens_per_step: with the draft."""

    plain: float
    staged: float
    tokens_per_step: float


def gains(
    target: Path, draft: Path, prompts: Sequence[Sequence[int]], threads: int, report: Callable[[str], None]
) -> dict[str, Gain]:
    """The gain with each of SAMPLINGS.

    Args:
        report: called with lines about loading.
    """
    found: dict[str, Gain] = {}
    with pystaged.load(target, draft=draft, recycle=False, num_threads=threads, report=report) as engine:
        for name, sampling in SAMPLINGS.items():
            plain = staged = 0.0
            tokens = steps = 0
            for prompt in prompts:
                texts = [
                    engine.generate(list(prompt), max_tokens=TOKENS, speculate=speculate, **sampling)
                    for speculate in (False, True)
                ]
                plain += texts[0].stats.decode_seconds
                staged += texts[1].stats.decode_seconds
                tokens, steps = tokens + texts[1].stats.new_tokens, steps + texts[1].stats.steps
            found[name] = Gain(plain, staged, tokens / max(1, steps))
    return found
