"""Compute a report's figures from single runs."""

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
_FEWEST = 3  # prompts that an interval needs
_MOST_SPREAD = 1.5  # of a baseline's speeds on the same text, for ratios over it
_Key = TypeVar("_Key", int, str)
_Text = tuple[str, int]  # sampling and prompt


@dataclass(slots=True)
class Row:
    """Figures of one method under one sampling, in one category or all. Unknown figures are None; sequences that ended
    before any token could be timed are left out.

    speedup: over plain decoding on the same prompts, by total tokens and seconds; interval: its 95 % confidence
    interval by the bootstrap over prompts; speedups: of single sequences, least: the smallest. over_best_baseline,
    over_best_baseline_interval: the same over best_baseline, the fastest on these prompts. tokens_per_step: see
    GenerationStats. first_token_ms: median. different: number of own sequences that differ from plain decoding.
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
    parts: dict[str, float] = field(default_factory=dict)


Tables = dict[str, dict[str, list[Row]]]


def tables(methods: Sequence[Method], outcome: Outcome) -> Tables:
    """Rows by sampling and category, beginning with all prompts except the misleading ones. Those have a table of their
    own, by sampling, at the end."""
    usual = [run for run in outcome.runs if not run.is_misleading and not run.is_repeat]
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
    """Rows for some runs in the methods' order; the first is plain decoding."""
    texts: dict[str, dict[_Text, Run]] = {each.key: {} for each in methods}
    for run in runs:
        # A sequence that ended at once has no speed.
        if run.measurement.is_timed:
            texts[run.method][run.sampling, run.prompt] = run
    plain = texts[methods[0].key]
    baselines = [each.key for each in methods if each.is_baseline and texts[each.key]]
    best = max(baselines, key=lambda key: _ratio(texts[key], plain) or 0.0, default="")
    spreads = _spreads(outcome)
    found = []
    for each in methods:
        row = Row(each.key, each.is_baseline, outcome.notes[each.key], peak_bytes=outcome.memory.get(each.key) or None)
        found.append(row)
        if texts[each.key]:
            _fill(row, texts[each.key], plain)
        if spreads.get(each.key, 1.0) > _MOST_SPREAD:
            row.notes = [*row.notes, f"its speeds on one text differ by {spreads[each.key]:.1f}x: no ratio over it"]
        if spreads.get(methods[0].key, 1.0) > _MOST_SPREAD:
            row.speedup = row.interval = row.least = None
            row.speedups = []
        if best and spreads.get(best, 1.0) <= _MOST_SPREAD and texts[each.key]:
            row.over_best_baseline = _ratio(texts[each.key], texts[best])
            row.over_best_baseline_interval = _interval(texts[each.key], texts[best])
            row.best_baseline = best
    return found


def _spreads(outcome: Outcome) -> dict[str, float]:
    """By method, how much its speeds on the same text differ at most: the fastest over the slowest."""
    speeds: dict[tuple[str, str, int], list[float]] = {}
    for run in outcome.runs:
        if run.measurement.is_timed:
            speeds.setdefault((run.method, run.sampling, run.prompt), []).append(tokens_per_second([run.measurement]))
    found: dict[str, float] = {}
    for (method, *_), those in speeds.items():
        found[method] = max(found.get(method, 1.0), max(those) / min(those))
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
    row.parts = _sum(each.parts for each in measured)
    if not row.is_baseline:
        pairs = [
            (run.measurement.tokens, plain[text].measurement.tokens) for text, run in mine.items() if text in plain
        ]
        row.different = sum(tokens != expected for tokens, expected in pairs)


def _ratio(mine: Mapping[_Text, Run], others: Mapping[_Text, Run]) -> float | None:
    """Speed-up over `others` on the sequences that both have."""
    shared = mine.keys() & others.keys()
    base = tokens_per_second(others[text].measurement for text in shared)
    return tokens_per_second(mine[text].measurement for text in shared) / base if base else None


def _interval(mine: Mapping[_Text, Run], others: Mapping[_Text, Run]) -> tuple[float, float] | None:
    """95 % confidence interval of _ratio, by the bootstrap: prompts are drawn with replacement."""
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
