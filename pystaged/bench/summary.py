"""From single runs to the figures of a report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pystaged.bench.contenders import Contender
from pystaged.bench.suite import Outcome, Run


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

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def rows(contenders: Sequence[Contender], outcome: Outcome, sampling: str) -> list[Row]:
    """The rows of one sampling, in the contenders' order; the first is plain decoding."""
    runs: dict[str, list[Run]] = {each.key: [] for each in contenders}
    for run in outcome.runs:
        if run.sampling == sampling:
            runs[run.contender].append(run)
    plain = runs[contenders[0].key]
    peers = [runs[each.key] for each in contenders if each.is_peer and runs[each.key]]
    best = max(peers, key=_rate, default=[])
    expected = {run.prompt: run.measurement.tokens for run in plain}
    found = []
    for each in contenders:
        mine = runs[each.key]
        row = Row(each.key, each.is_peer, outcome.notes[each.key], peak_bytes=outcome.memory.get(each.key) or None)
        found.append(row)
        if not mine:
            continue
        row.prompts = len({run.prompt for run in mine})
        row.tokens_per_second = _rate(mine)
        row.speedup, row.over_best_peer = _ratio(mine, plain), _ratio(mine, best)
        row.speedups = _ratios_by_prompt(mine, plain)
        row.tokens_per_step = _tokens_per_step(mine)
        row.relative_weight_bytes = _weight_bytes(mine)
        row.first_token_ms = 1e3 * statistics.median(run.measurement.first_token_seconds for run in mine)
        row.acceptance_at_depth = _acceptance(mine)
        row.emitted = dict(sum((Counter(run.measurement.emitted) for run in mine), Counter[str]()))
        for run in mine:
            for part, seconds in run.measurement.parts.items():
                row.parts[part] = row.parts.get(part, 0.0) + seconds
        if not each.is_peer:
            row.different = len({run.prompt for run in mine if run.measurement.tokens != expected.get(run.prompt)})
    return found


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


def _ratios_by_prompt(mine: list[Run], plain: list[Run]) -> list[float]:
    speeds, base = _speeds(mine), _speeds(plain)
    return [statistics.median(speeds[at]) / statistics.median(base[at]) for at in sorted(speeds.keys() & base.keys())]


def _speeds(runs: list[Run]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for run in runs:
        found.setdefault(run.prompt, []).append(run.measurement.tokens_per_second)
    return found


def _tokens_per_step(runs: list[Run]) -> float | None:
    steps = sum(run.measurement.steps for run in runs)
    return sum(run.measurement.counted for run in runs) / steps if steps else None


def _weight_bytes(runs: list[Run]) -> float | None:
    tokens = sum(run.measurement.counted for run in runs)
    return sum(run.measurement.relative_weight_bytes * run.measurement.counted for run in runs) / tokens or None


def _acceptance(runs: list[Run]) -> list[float]:
    offered, taken = Counter[int](), Counter[int]()
    for run in runs:
        offered.update({int(depth): count for depth, count in run.measurement.offered.items()})
        taken.update({int(depth): count for depth, count in run.measurement.taken.items()})
    return [round(taken[depth] / offered[depth], 3) for depth in sorted(offered)[:8]]
