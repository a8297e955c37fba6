"""What happened in one generation, in words and figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class GenerationStats:
    """Counts and times of one generation.

    prompt_tokens: tokens of the prompt; reused_tokens: those of them that were still in the context.
    new_tokens: tokens emitted. steps: passes of the target that emitted them.
    prefill_seconds: until the prompt was in the context; decode_seconds: from there to the end.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, float]:
        """All figures, for JSON."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}
