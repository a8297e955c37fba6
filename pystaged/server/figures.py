"""Usage and timings of a request's sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pystaged.stats import GenerationStats


def usage(stats: Sequence[GenerationStats], num_prompts: int) -> dict[str, Any]:
    """A request's token counts; a prompt counts once, however many sequences it has.

    Args:
        stats: of each prompt's sequences, prompt by prompt.
    """
    firsts = stats[:: len(stats) // num_prompts]
    prompt = sum(each.prompt_tokens for each in firsts)
    new = sum(each.new_tokens for each in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(each.reused_tokens for each in firsts)},
    }


def predicted(prediction: Sequence[int], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many tokens of a prediction the sequences have."""
    counts = Counter(prediction)
    accepted = sum((counts & Counter(text)).total() for text in texts)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": len(prediction) * len(texts) - accepted,
    }


def timings(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    """llama-server's timings: tokens of all sequences, and times of the longest one."""
    cached, prompt = sum(each.reused_tokens for each in stats), sum(each.prompt_tokens for each in stats)
    new = sum(each.new_tokens for each in stats)
    reading = 1e3 * max(each.prefill_seconds for each in stats)
    writing = 1e3 * max(each.decode_seconds for each in stats)
    return {
        "cache_n": cached,
        "prompt_n": prompt - cached,
        "prompt_ms": reading,
        "prompt_per_token_ms": reading / max(1, prompt - cached),
        "prompt_per_second": 1e3 * (prompt - cached) / reading if reading else 0.0,
        "predicted_n": new,
        "predicted_ms": writing,
        "predicted_per_token_ms": writing / max(1, new),
        "predicted_per_second": 1e3 * new / writing if writing else 0.0,
        "draft_n": sum(each.drafted for each in stats),
        "draft_n_accepted": sum(each.accepted for each in stats),
    }
