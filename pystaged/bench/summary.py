"""From single runs to the figures of a report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pystaged.bench.contenders import Contender
from pystaged.bench.suite import Outcome, Run

_Key = TypeVar("_Key", int, str)


@dataclass(slots=True)
class Row:
    """One contender under one sampling. Figures that are not known are None.

    speedup: over plain decoding on the same prompts, all tokens together; speedups: per prompt, medians of repeats.
    over_best_peer: likewise over the fastest peer. tokens_per_step, relative_weight_bytes: as in GenerationStats.
    first_token_ms: median. different: prompts whose tokens were not those of plain decoding; ours only.
    """

    name: str
    is_peer: bool
    notes: list[str]
    prompts: int = 0
    tokens_per_second: float | None = None
    speedup: float | None = None
    speedups: list[float] = field(default_factory=list)
    over_best_peer: float | None = None
    tokens_per_step: float | None = None
    relative_weight_bytes: float | None = None
    first_token_ms: float | None = None
    peak_bytes: int | None = None
    different: int | None = None
    acceptance_at_depth: list[float] = field(default_factory=list)
    emitted: dict[str, int] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def spread(self) -> tuple[float, float, float] | None:
        """Least, median and most speed-up of a prompt."""
        if not self.speedups:
            return None
        return min(self.speedups), statistics.median(self.speedups), max(self.speedups)


def rows(contenders: Sequence[Contender], outcome: Outcome, sampling: str) -> list[Row]:
    """The rows of one sampling, in the contenders' order; the first is plain decoding."""
    runs: dict[str, list[Run]] = {each.key: [] for each in contenders}
    for run in outcome.runs:
        if run.sampling == sampling:
            runs[run.contender].append(run)
    plain = runs[contenders[0].key]
    peers = [runs[each.key] for each in contenders if each.is_peer and runs[each.key]]
    best = max(peers, key=_rate, default=[])
    found = []
    for each in contenders:
        row = Row(each.key, each.is_peer, outcome.notes[each.key], peak_bytes=outcome.memory.get(each.key) or None)
        found.append(row)
        if runs[each.key]:
            _fill(row, runs[each.key], plain, best)
    return found


def _fill(row: Row, mine: list[Run], plain: list[Run], best: list[Run]) -> None:
    measured = [run.measurement for run in mine]
    tokens, steps = sum(each.counted for each in measured), sum(each.steps for each in measured)
    row.prompts = len({run.prompt for run in mine})
    row.tokens_per_second = _rate(mine)
    row.speedup, row.over_best_peer = _ratio(mine, plain), _ratio(mine, best)
    speeds, base = _speeds(mine), _speeds(plain)
    row.speedups = [speeds[prompt] / base[prompt] for prompt in sorted(speeds.keys() & base.keys())]
    row.tokens_per_step = tokens / steps if steps else None
    row.relative_weight_bytes = sum(each.relative_weight_bytes * each.counted for each in measured) / tokens or None
    row.first_token_ms = 1e3 * statistics.median(each.first_token_seconds for each in measured)
    offered, taken = _sum(each.offered for each in measured), _sum(each.taken for each in measured)
    row.acceptance_at_depth = [round(taken.get(depth, 0) / offered[depth], 3) for depth in sorted(offered)[:8]]
    row.emitted = {name: int(count) for name, count in _sum(each.emitted for each in measured).items()}
    row.parts = _sum(each.parts for each in measured)
    if not row.is_peer:
        expected = {run.prompt: run.measurement.tokens for run in plain}
        row.different = len({run.prompt for run in mine if run.measurement.tokens != expected.get(run.prompt)})


def _rate(runs: Iterable[Run]) -> float:
    """Tokens per second, all together."""
    found = [run.measurement for run in runs]
    return sum(each.counted for each in found) / sum(each.seconds for each in found)


def _ratio(mine: list[Run], others: list[Run]) -> float | None:
    """How much faster than others on the prompts that both continued."""
    shared = {run.prompt for run in mine} & {run.prompt for run in others}
    if not shared:
        return None
    return _rate(run for run in mine if run.prompt in shared) / _rate(run for run in others if run.prompt in shared)


def _speeds(runs: list[Run]) -> dict[int, float]:
    """Tokens per second by prompt, medians of repeats."""
    found: dict[int, list[float]] = {}
    for run in runs:
        found.setdefault(run.prompt, []).append(run.measurement.tokens_per_second)
    return {prompt: statistics.median(speeds) for prompt, speeds in found.items()}


def _sum(counts: Iterable[Mapping[_Key, float]]) -> dict[_Key, float]:
    total: dict[_Key, float] = {}
    for each in counts:
        for key, count in each.items():
            total[key] = total.get(key, 0) + count
    return total
