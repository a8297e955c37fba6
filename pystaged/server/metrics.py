"""/metrics in Prometheus' text format, with llama-server's names and further ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from pystaged.engine import Engine
from pystaged.server.gate import Gate
from pystaged.stats import GenerationStats, PassStats

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)  # seconds


class Metrics:
    """Counts requests and finished sequences. prefix: of all metric names."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._sums: dict[str, float] = defaultdict(float)
        self._accepted_at: Counter[int] = Counter()
        self._stages: Counter[str] = Counter()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._first: Counter[float] = Counter()
        self._passes = PassStats()  # of models that were unloaded
        self._longest = 0  # tokens of the longest sequence with its prompt

    def request_over(self, path: str, status: int) -> None:
        """Count a request by status and path; the path must be one of the server's own."""
        self._requests[path, status] += 1

    def text_over(self, stats: GenerationStats, first: float | None) -> None:
        """Count a sequence. first: seconds until its first token, None if it had none."""
        self._sums["prompt_tokens_total"] += stats.prompt_tokens - stats.reused_tokens
        self._sums["prompt_tokens_cached_total"] += stats.reused_tokens
        self._sums["tokens_predicted_total"] += stats.new_tokens
        self._sums["spec_decode_num_drafts_total"] += sum(stats.lengths.values()) if stats.drafted else 0
        self._sums["spec_decode_num_draft_tokens_total"] += stats.drafted
        self._sums["spec_decode_num_accepted_tokens_total"] += stats.accepted
        self._sums["prompt_seconds_total"] += stats.prefill_seconds
        self._sums["tokens_predicted_seconds_total"] += stats.decode_seconds
        for length, steps in dict(stats.lengths).items():  # a copy, because a cut sequence may still be in a pass
            for position in range(length):
                self._accepted_at[position] += steps
        for name, stage in stats.stages.items():
            self._stages[name] += stage.emitted
        self._longest = max(self._longest, stats.prompt_tokens + stats.new_tokens)
        if first is not None:
            self._sums["first_sum"] += first
            self._sums["first_count"] += 1
            for bound in _FIRST_TOKEN:
                self._first[bound] += first <= bound

    def passed(self, passes: PassStats) -> None:
        """Count the passes of a model that is unloaded."""
        self._passes = self._passes.plus(passes)

    def text(self, engines: Sequence[Engine], gates: Sequence[Gate]) -> str:
        """All metrics as text, including the loaded engines' and their gates'."""
        passes, sums = self._passes, self._sums
        for engine in engines:
            passes = passes.plus(engine.passes)
        reading, writing = sums["prompt_seconds_total"], sums["tokens_predicted_seconds_total"]
        read_rate = sums["prompt_tokens_total"] / reading if reading else 0.0
        write_rate = sums["tokens_predicted_total"] / writing if writing else 0.0
        lines: list[str] = []

        def add(kind: str, name: str, what: str, values: Mapping[str, float]) -> None:
            """Add a metric; `values` are by the suffix of its name."""
            lines.extend((f"# HELP {self._prefix}{name} {what}", f"# TYPE {self._prefix}{name} {kind}"))
            lines.extend(f"{self._prefix}{name}{labels} {value:.10g}" for labels, value in values.items())

        for kind, name, what, value in (
            ("counter", "prompt_tokens_total", "Prompt tokens evaluated.", None),
            ("counter", "prompt_tokens_cached_total", "Prompt tokens reused from other sequences.", None),
            ("counter", "prompt_seconds_total", "Seconds of prefill.", None),
            ("counter", "tokens_predicted_total", "Tokens generated.", None),
            ("counter", "tokens_predicted_seconds_total", "Seconds of decoding, summed over sequences.", None),
            ("counter", "n_decode_total", "Forward passes of the model.", passes.passes),
            ("counter", "n_tokens_max", "Tokens of the longest sequence, including its prompt.", self._longest),
            ("gauge", "prompt_tokens_seconds", "Mean prompt tokens evaluated per second.", read_rate),
            ("gauge", "predicted_tokens_seconds", "Mean tokens generated per second and sequence.", write_rate),
            ("gauge", "n_busy_slots_per_decode", "Mean sequences per pass.", passes.texts_per_pass),
            ("gauge", "requests_processing", "Sequences in progress.", sum(each.num_inside for each in gates)),
            ("gauge", "requests_deferred", "Sequences waiting.", sum(each.num_waiting for each in gates)),
            ("counter", "spec_decode_num_drafts_total", "Trees verified.", None),
            ("counter", "spec_decode_num_draft_tokens_total", "Drafted tokens verified.", None),
            ("counter", "spec_decode_num_accepted_tokens_total", "Drafted tokens accepted.", None),
            ("counter", "rows_total", "Rows of all passes.", passes.rows),
            ("counter", "guesses_total", "Rows of drafted tokens.", passes.guesses),
            ("counter", "pass_seconds_total", "Seconds in passes.", passes.seconds),
            ("gauge", "rows_per_pass", "Mean rows per pass.", passes.rows_per_pass),
            ("gauge", "kv_memory_bytes", "Memory for keys and values.", sum(each.kv_memory for each in engines)),
        ):
            add(kind, name, what, {"": sums[name] if value is None else value})
        accepted = {f'{{position="{position}"}}': self._accepted_at[position] for position in sorted(self._accepted_at)}
        stages = {f'{{stage="{name}"}}': count for name, count in sorted(self._stages.items())}
        requests = {f'{{path="{path}",status="{status}"}}': n for (path, status), n in sorted(self._requests.items())}
        what = "Drafted tokens accepted, by position in the draft."
        add("counter", "spec_decode_num_accepted_tokens_per_pos_total", what, accepted)
        add("counter", "tokens_by_stage_total", "Tokens by the stage that proposed them.", stages)
        add("counter", "requests_total", "Requests by path and status.", requests)
        buckets = {f'_bucket{{le="{bound:g}"}}': self._first[bound] for bound in _FIRST_TOKEN}
        total = {'_bucket{le="+Inf"}': sums["first_count"], "_sum": sums["first_sum"], "_count": sums["first_count"]}
        what = "Seconds from a request to its sequence's first token."
        add("histogram", "time_to_first_token_seconds", what, buckets | total)
        return "\n".join([*lines, ""])
