"""What is counted, in Prometheus' text format: llama-server's names, and ours."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pystaged.stats import GenerationStats

if TYPE_CHECKING:
    from pystaged.server.state import State

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)  # seconds


class Metrics:
    """Counts of texts that have ended.

    Args:
        prefix: of all names.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._accepted_at: Counter[int] = Counter()
        self._stages: Counter[str] = Counter()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._first: Counter[float] = Counter()
        self._longest = 0  # tokens of a prompt and its text

    def request_over(self, path: str, status: int) -> None:
        """Count a request, by its path, which is one of the server's own, and its status."""
        self._requests[path, status] += 1

    def text_over(self, stats: GenerationStats, first: float | None) -> None:
        """Count a text, and the seconds until its first token came."""
        self._counts["prompt_tokens_total"] += stats.prompt_tokens - stats.reused_tokens
        self._counts["prompt_tokens_cached_total"] += stats.reused_tokens
        self._counts["tokens_predicted_total"] += stats.new_tokens
        self._counts["spec_decode_num_drafts_total"] += sum(stats.lengths.values()) if stats.drafted else 0
        self._counts["spec_decode_num_draft_tokens_total"] += stats.drafted
        self._counts["spec_decode_num_accepted_tokens_total"] += stats.accepted
        self._seconds["prompt_seconds_total"] += stats.prefill_seconds
        self._seconds["tokens_predicted_seconds_total"] += stats.decode_seconds
        for length, steps in dict(stats.lengths).items():  # of a text that is cut short in the middle of a pass
            for position in range(length):
                self._accepted_at[position] += steps
        for name, stage in stats.stages.items():
            self._stages[name] += stage.emitted
        self._longest = max(self._longest, stats.prompt_tokens + stats.new_tokens)
        if first is not None:
            self._seconds["first"] += first
            self._counts["first"] += 1
            for bound in _FIRST_TOKEN:
                self._first[bound] += first <= bound

    def text(self, state: State) -> str:
        """All of it."""
        passes = state.engine.passes
        lines = _Lines(self._prefix)
        counter, gauge = lines.counter, lines.gauge
        counter("prompt_tokens_total", "Tokens of prompts that were read.", self._counts["prompt_tokens_total"])
        counter(
            "prompt_tokens_cached_total",
            "Tokens of prompts that were there already.",
            self._counts["prompt_tokens_cached_total"],
        )
        counter("prompt_seconds_total", "Seconds of reading prompts.", self._seconds["prompt_seconds_total"])
        counter("tokens_predicted_total", "Tokens that were written.", self._counts["tokens_predicted_total"])
        counter(
            "tokens_predicted_seconds_total",
            "Seconds of writing, of texts together.",
            self._seconds["tokens_predicted_seconds_total"],
        )
        counter("n_decode_total", "Passes of the model.", passes.passes)
        counter("n_tokens_max", "Tokens of the longest text, its prompt included.", self._longest)
        reading, writing = self._seconds["prompt_seconds_total"], self._seconds["tokens_predicted_seconds_total"]
        rate = self._counts["prompt_tokens_total"] / reading if reading else 0.0
        gauge("prompt_tokens_seconds", "Tokens of prompts read per second, in the mean.", rate)
        rate = self._counts["tokens_predicted_total"] / writing if writing else 0.0
        gauge("predicted_tokens_seconds", "Tokens of a text written per second, in the mean.", rate)
        gauge("n_busy_slots_per_decode", "Texts that share a pass, in the mean.", passes.texts_per_pass)
        gauge("requests_processing", "Texts that are being written.", state.gate.num_inside)
        gauge("requests_deferred", "Texts that wait.", state.gate.num_waiting)
        for name, what in (
            ("spec_decode_num_drafts_total", "Trees that were verified."),
            ("spec_decode_num_draft_tokens_total", "Guesses that were verified."),
            ("spec_decode_num_accepted_tokens_total", "Guesses that were right."),
        ):
            counter(name, what, self._counts[name])
        lines.labelled(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Right guesses by their place behind the last token.",
            [(f'position="{position}"', self._accepted_at[position]) for position in sorted(self._accepted_at)],
        )
        lines.labelled(
            "tokens_by_stage_total",
            "Tokens by who proposed them.",
            [(f'stage="{name}"', count) for name, count in sorted(self._stages.items())],
        )
        counter("rows_total", "Rows of all passes.", passes.rows)
        counter("guesses_total", "Rows of guesses.", passes.guesses)
        counter("pass_seconds_total", "Seconds in passes.", passes.seconds)
        gauge("rows_per_pass", "Rows of a pass, in the mean.", passes.rows_per_pass)
        gauge("kv_memory_bytes", "Memory for keys and values.", state.engine.kv_memory)
        lines.labelled(
            "requests_total",
            "Requests by path and status.",
            [(f'path="{path}",status="{status}"', n) for (path, status), n in sorted(self._requests.items())],
        )
        lines.histogram(
            "time_to_first_token_seconds",
            "From a request to its text's first token.",
            [(bound, self._first[bound]) for bound in _FIRST_TOKEN],
            self._counts["first"],
            self._seconds["first"],
        )
        return str(lines)


class _Lines:
    """Metrics as text, version 0.0.4."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join([*self._lines, ""])

    def counter(self, name: str, what: str, value: float) -> None:
        self._head(name, what, "counter")
        self._lines.append(f"{self._prefix}{name} {value:.10g}")

    def gauge(self, name: str, what: str, value: float) -> None:
        self._head(name, what, "gauge")
        self._lines.append(f"{self._prefix}{name} {value:.10g}")

    def labelled(self, name: str, what: str, values: Sequence[tuple[str, float]]) -> None:
        self._head(name, what, "counter")
        self._lines += [f"{self._prefix}{name}{{{labels}}} {value:.10g}" for labels, value in values]

    def histogram(self, name: str, what: str, buckets: Sequence[tuple[float, int]], count: int, total: float) -> None:
        self._head(name, what, "histogram")
        self._lines += [f'{self._prefix}{name}_bucket{{le="{bound:g}"}} {value}' for bound, value in buckets]
        self._lines.append(f'{self._prefix}{name}_bucket{{le="+Inf"}} {count}')
        self._lines += [f"{self._prefix}{name}_sum {total:.10g}", f"{self._prefix}{name}_count {count}"]

    def _head(self, name: str, what: str, kind: str) -> None:
        self._lines += [f"# HELP {self._prefix}{name} {what}", f"# TYPE {self._prefix}{name} {kind}"]
