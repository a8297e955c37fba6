"""Usage and timings of a request's sequences, and their log-probabilities in OpenAI's two formats."""

from __future__ import annotations

import codecs
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pystaged._core import Tokenizer
from pystaged.result import TokenLogprob
from pystaged.stats import GenerationStats

_LEAST = -9999.0  # JSON has no infinity
LogprobRow = tuple[str, float | None, dict[str, float] | None, int]
"""A token of /v1/completions, its log-probability, those of the likeliest tokens, and its offset in the text."""


def usage(stats: Sequence[GenerationStats], num_prompts: int) -> dict[str, Any]:
    """A request's token counts; a prompt counts once, however many sequences it has. stats: prompt by prompt."""
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
    rejected = len(prediction) * len(texts) - accepted
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


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


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; if it is part of a character, its bytes, so that different tokens differ."""
    data = tokenizer.token_bytes(token, special=True)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def number(logprob: float) -> float:
    """A log-probability as a number that JSON can hold."""
    return logprob if math.isfinite(logprob) else _LEAST


class CompletionLogprobs:
    """Log-probabilities of a sequence of /v1/completions, token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def prompt(self, tokens: Sequence[int], text: str, known: Sequence[TokenLogprob] | None) -> list[LogprobRow]:
        """Log-probabilities of the prompt's tokens; the first has none. text: the echoed prompt; a vocabulary may have
        inserted a space before its tokens."""
        decoded = self._tokenizer.decode(tokens)
        # An inserted space is not part of the text.
        self._offset = min(0, len(text) - len(decoded))
        found = [self._row(token, known[i - 1] if i and known else None) for i, token in enumerate(tokens)]
        self._offset, self._decoder = len(text), codecs.getincrementaldecoder("utf-8")(errors="replace")
        return found

    def more(self, logprobs: Sequence[TokenLogprob]) -> list[LogprobRow]:
        """Log-probabilities of the next tokens."""
        return [self._row(each.token, each) for each in logprobs]

    def _row(self, token: int, known: TokenLogprob | None) -> LogprobRow:
        name, offset = spelled(self._tokenizer, token), max(0, self._offset)
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        if known is None:
            return name, None, None, offset
        top: dict[str, float] = {}
        for each in [*known.top, known]:
            # Two tokens may be spelled alike; the likelier one comes first and is kept.
            top.setdefault(spelled(self._tokenizer, each.token), number(each.logprob))
        return name, number(known.logprob), top, offset


def of_completion(rows: Sequence[LogprobRow]) -> dict[str, Any]:
    """Log-probabilities of a sequence's tokens."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def of_chat(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities of an answer's next tokens."""

    def top(each: TokenLogprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(each.token, special=True)
        return {"token": data.decode("utf-8", "replace"), "logprob": number(each.logprob), "bytes": list(data)}

    content = [{**top(each), "top_logprobs": [top(other) for other in each.top]} for each in logprobs]
    return {"content": content, "refusal": None}
