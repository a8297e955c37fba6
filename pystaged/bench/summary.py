"""From single runs to the figures of a report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from pystaged.bench.methods import Method
from pystaged.bench.suite import SAMPLINGS, Outcome, Run
from pystaged.bench.worker import tokens_per_second

ALL = "all"
WORST = "misleading prompts"
_RESAMPLES = 2000
_FEWEST = 3  # prompts that an interval is told of
_Key = TypeVar("_Key", int, str)
_Text = tuple[str, int]  # sampling and prompt


@dataclass(slots=True)
class Row:
    """One method's texts under one sampling, of one category or all. Figures that are not known are None; a text
    that ended before any token could be timed is none of these.

    speedup: over plain decoding on the same prompts, all tokens by all seconds; interval: 95 % over prompts, by the
    bootstrap; speedups: of single texts, least: of them. over_best_baseline, over_best_baseline_interval: likewise over
    best_baseline, the fastest on these prompts. tokens_per_step: as in GenerationStats. first_token_ms: median.
    different: texts whose tokens were not those of plain decoding; ours only.
    """

    name: str
    is_baseline: bool
    notes: list[str]
    prompts: int = 0
    tokens_per_second: float | None = None
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    least: float | None = None
    over_best_baseline: float | None = None
    over_best_baseline_interval: tuple[float, float] | None = None
    best_baseline: str = ""
    tokens_per_step: float | None = None
    first_token_ms: float | None = None
    peak_bytes: int | None = None
    different: int | None = None
    speedups: list[float] = field(default_factory=list)
    acceptance_at_depth: list[float] = field(default_factory=list)
    emitted: dict[str, int] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


Tables = dict[str, dict[str, list[Row]]]


def tables(methods: Sequence[Method], outcome: Outcome) -> Tables:
    """Rows by sampling and category, those of all prompts first, which the misleading ones are none of. These have a
    table of their own, by sampling, after the others."""
    usual = [run for run in outcome.runs if not run.is_misleading]
    worst = [run for run in outcome.runs if run.is_misleading]
    found: Tables = {}
    for sampling in SAMPLINGS:
        runs = [run for run in usual if run.sampling == sampling]
        found[sampling] = _by(methods, outcome, runs, lambda run: run.category)
    if worst:
        ours = [each for each in methods if each.meets_misleading]
        found[WORST] = _by(ours, outcome, worst, lambda run: run.sampling)
    return found


def _by(
    methods: Sequence[Method], outcome: Outcome, runs: Sequence[Run], part: Callable[[Run], str]
) -> dict[str, list[Row]]:
    found = {ALL: rows(methods, outcome, runs)}
    for name in dict.fromkeys(map(part, runs)):
        found[name] = rows(methods, outcome, [run for run in runs if part(run) == name])
    return found


def rows(methods: Sequence[Method], outcome: Outcome, runs: Iterable[Run]) -> list[Row]:
    """Figures of some runs in the methods' order; the first is plain decoding."""
    texts: dict[str, dict[_Text, Run]] = {each.key: {} for each in methods}
    for run in runs:
        # One that ended at once says how its writer ends texts, not how fast it is.
        if run.measurement.is_timed:
            texts[run.method][run.sampling, run.prompt] = run
    plain = texts[methods[0].key]
    baselines = [each.key for each in methods if each.is_baseline and texts[each.key]]
    best = max(baselines, key=lambda key: _ratio(texts[key], plain) or 0.0, default="")
    found = []
    for each in methods:
        row = Row(each.key, each.is_baseline, outcome.notes[each.key], peak_bytes=outcome.memory.get(each.key) or None)
        found.append(row)
        if texts[each.key]:
            _fill(row, texts[each.key], plain)
        if best and texts[each.key]:
            row.over_best_baseline = _ratio(texts[each.key], texts[best])
            row.over_best_baseline_interval = _interval(texts[each.key], texts[best])
            row.best_baseline = best
    return found


def _fill(row: Row, mine: dict[_Text, Run], plain: dict[_Text, Run]) -> None:
    measured = [run.measurement for run in mine.values()]
    steps = sum(each.steps for each in measured)
    row.prompts = len({run.prompt for run in mine.values()})
    row.tokens_per_second = tokens_per_second(measured)
    row.speedup, row.interval = _ratio(mine, plain), _interval(mine, plain)
    row.speedups = [ratio for text in mine if (ratio := _ratio({text: mine[text]}, plain))]
    row.least = min(row.speedups, default=None)
    row.tokens_per_step = sum(each.counted for each in measured) / steps if steps else None
    row.first_token_ms = 1e3 * statistics.median(each.first_token_seconds for each in measured)
    offered, taken = _sum(each.offered for each in measured), _sum(each.taken for each in measured)
    row.acceptance_at_depth = [round(taken.get(depth, 0) / offered[depth], 3) for depth in sorted(offered)[:8]]
    row.emitted = {name: int(count) for name, count in _sum(each.emitted for each in measured).items()}
    row.parts = _sum(each.parts for each in measured)
    if not row.is_baseline:
        pairs = [
            (run.measurement.tokens, plain[text].measurement.tokens) for text, run in mine.items() if text in plain
        ]
        row.different = sum(tokens != expected for tokens, expected in pairs)


def _ratio(mine: Mapping[_Text, Run], others: Mapping[_Text, Run]) -> float | None:
    """How much faster than others on the texts that both wrote."""
    shared = mine.keys() & others.keys()
    base = tokens_per_second(others[text].measurement for text in shared)
    return tokens_per_second(mine[text].measurement for text in shared) / base if base else None


def _interval(mine: Mapping[_Text, Run], others: Mapping[_Text, Run]) -> tuple[float, float] | None:
    """In which _ratio is with 95 %, had there been other prompts: of prompts drawn anew, with what was measured."""
    shared = sorted(mine.keys() & others.keys())
    prompts = sorted({prompt for _, prompt in shared})
    if len(prompts) < _FEWEST:
        return None
    # Tokens and seconds of both, by prompt.
    sums = np.zeros((len(prompts), 4))
    for text in shared:
        each, other = mine[text].measurement, others[text].measurement
        sums[prompts.index(text[1])] += each.counted, each.seconds, other.counted, other.seconds
    drawn = np.random.default_rng(0).integers(len(prompts), size=(_RESAMPLES, len(prompts)))
    tokens, seconds, base_tokens, base_seconds = np.moveaxis(sums[drawn].sum(axis=1), 1, 0)
    low, high = np.quantile(tokens / seconds / (base_tokens / base_seconds), [0.025, 0.975])
    return float(low), float(high)


def _sum(counts: Iterable[Mapping[_Key, float]]) -> dict[_Key, float]:
    total: dict[_Key, float] = {}
    for each in counts:
        for key, count in each.items():
            total[key] = total.get(key, 0) + count
    return total
