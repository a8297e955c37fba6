"""Tokens and times of a request's texts, as clients read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pystaged.result import GenerationResult
from pystaged.server.answers import Timings, Usage


def usage(results: Sequence[GenerationResult], num_prompts: int, prediction: Sequence[int] = ()) -> Usage:
    """What texts took. A prompt counts once, however many texts go on with it.

    Args:
        results: of each prompt as many, one prompt after the other.
        prediction: tokens that they were expected to have.
    """
    firsts = results[:: len(results) // num_prompts]
    prompt = sum(each.stats.prompt_tokens for each in firsts)
    new = sum(each.stats.new_tokens for each in results)
    found: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(each.stats.reused_tokens for each in firsts)},
    }
    if prediction:
        predicted = Counter(prediction)
        accepted = sum((predicted & Counter(each.tokens)).total() for each in results)
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": len(prediction) * len(results) - accepted,
        }
    return found


def timings(results: Sequence[GenerationResult]) -> Timings:
    """Of all texts together; times are those of the longest."""
    stats = [each.stats for each in results]
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
