"""Pictures for a report, with matplotlib (`pip install 'pystaged[bench]'`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pystaged.bench.summary import Row

_COLORS = ("#4477aa", "#ee6677", "#ccbb44", "#66ccee")
_STAGES = {"target": "#4477aa", "draft": "#228833", "ngram": "#ccbb44"}


def draw(folder: Path, tables: dict[str, list[Row]], passes: dict[str, Any]) -> list[str]:
    """Write the pictures; returns their file names.

    Args:
        tables: rows by sampling.
        passes: see PassTimes.to_dict.
    """
    pictures: dict[str, Callable[[Axes], None]] = {
        "speedup.png": lambda axes: _speedups(axes, tables),
        "passes.png": lambda axes: _passes(axes, passes),
        "stages.png": lambda axes: _shares(axes, tables, "emitted", "Share of the tokens, by stage"),
        "parts.png": lambda axes: _shares(axes, tables, "parts", "Share of the time, by part of the step"),
    }
    for name, picture in pictures.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        picture(figure.add_subplot())
        figure.savefig(folder / name, dpi=90)
    return list(pictures)


def _speculating(tables: dict[str, list[Row]]) -> dict[str, Row]:
    """pystaged's rows that draft, by name and sampling."""
    return {
        f"{row.name}, {sampling}": row
        for sampling, rows in tables.items()
        for row in rows[1:]
        if not row.is_baseline and row.prompts
    }


def _speedups(axes: Axes, tables: dict[str, list[Row]]) -> None:
    """Figure 2 of Spector & Ré."""
    chosen = {name: row for name, row in _speculating(tables).items() if name == "staged"}
    if chosen:  # an interrupted run may have none
        axes.hist([row.speedups for row in chosen.values()], bins=16, label=list(chosen), color=_COLORS[: len(chosen)])
        axes.legend(fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(title="Speed-up over plain decoding, by prompt", xlabel="tokens per second, over plain", ylabel="prompts")


def _passes(axes: Axes, passes: dict[str, Any]) -> None:
    rows, times = [each["n"] for each in passes["passes"]], [each["ms"] for each in passes["passes"]]
    axes.plot(rows, times, marker="o", color=_COLORS[0], label="T(n)")
    floor = [each["floor_ms"] for each in passes["passes"]]
    axes.plot(rows, floor, color=_COLORS[1], linestyle="--", label="floor: reading the weights, or the products")
    axes.set(title="One pass of the target", xlabel="rows n", ylabel="ms", ylim=(0, None))
    axes.legend()


def _shares(axes: Axes, tables: dict[str, list[Row]], field: str, title: str) -> None:
    amounts: dict[str, dict[str, float]] = {name: getattr(row, field) for name, row in _speculating(tables).items()}
    left = dict.fromkeys(amounts, 0.0)
    for at, part in enumerate(dict.fromkeys(part for values in amounts.values() for part in values)):
        shares = [values.get(part, 0.0) / (sum(values.values()) or 1.0) for values in amounts.values()]
        color = _STAGES.get(part, _COLORS[at % len(_COLORS)])
        axes.barh(list(amounts), shares, left=list(left.values()), label=part, color=color)
        left = {name: start + share for (name, start), share in zip(left.items(), shares, strict=True)}
    axes.invert_yaxis()
    axes.set(title=title, xlim=(0, 1))
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, fontsize=8)
