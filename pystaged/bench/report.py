"""A benchmark's report: for the terminal, as JSON, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pystaged.bench.suite import Outcome
from pystaged.bench.summary import Row
from pystaged.files import whole_file


def _figure(field: str, form: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = getattr(row, field)
        return "-" if value is None else format(value, form)

    return cell


def _spread(row: Row) -> str:
    return "{:.2f} {:.2f} {:.2f}".format(*row.spread) if row.spread else "-"


def _megabytes(row: Row) -> str:
    return f"{row.peak_bytes / 1e6:.0f}" if row.peak_bytes else "-"


# By heading, cell and meaning. The more important ones first: a narrow terminal shows as many as it can.
_COLUMNS: dict[str, tuple[Callable[[Row], str], str]] = {
    "tokens/s": (_figure("tokens_per_second", ".1f"), "new tokens per second of decoding, the prompt apart"),
    "x plain": (_figure("speedup", ".2f"), "over plain decoding on the same prompts, all tokens together"),
    "x best peer": (_figure("over_best_peer", ".2f"), "over the fastest peer under this sampling, on its prompts"),
    "per step": (_figure("tokens_per_step", ".2f"), "tokens per pass of the target"),
    "x plain, by prompt": (_spread, "least, median and most of a prompt"),
    "weights": (
        _figure("relative_weight_bytes", ".2f"),
        "weight bytes read per token, relative to plain decoding (Spector & Ré's Table 1)",
    ),
    "first ms": (_figure("first_token_ms", ".0f"), "median time to the first token"),
    "MB": (_megabytes, "most memory of a process of its own; transformers' rows share one"),
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, and on what.

    conditions: machine, versions, files and settings, for JSON. tables: rows by sampling. passes: T(n), as
    PassTimes.to_dict.
    """

    conditions: dict[str, Any]
    tables: dict[str, list[Row]]
    passes: dict[str, Any]
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Everything, single runs too, for JSON."""
        return {
            "conditions": self.conditions,
            "complete": self.outcome.complete,
            "seconds": self.outcome.seconds,
            "tables": {sampling: [asdict(row) for row in rows] for sampling, rows in self.tables.items()},
            "passes": self.passes,
            "runs": [run.to_dict() for run in self.outcome.runs],
        }

    def write(self, folder: Path) -> list[str]:
        """Write report.md, report.json and, where matplotlib is installed, pictures; returns their names."""
        with whole_file(folder / "report.json") as path:
            path.write_text(json.dumps(self.to_dict()), encoding="utf-8")
        pictures: list[str] = []
        if find_spec("matplotlib"):
            pictures = import_module("pystaged.bench.plots").draw(folder, self.tables, self.passes)
        with whole_file(folder / "report.md") as path:
            path.write_text(self.markdown(pictures), encoding="utf-8")
        return ["report.md", "report.json", *pictures]

    def terminal(self, width: int) -> Iterator[Table | Text]:
        """A table and its notes for each sampling.

        Args:
            width: of the terminal, in characters.
        """
        for sampling, rows in self.tables.items():
            sizes = range(len(_COLUMNS), 1, -1)
            tables = (self._table(sampling, rows, columns) for columns in sizes)
            yield next((table for table in tables if _width(table) <= width), self._table(sampling, rows, 2))
            for row in rows:
                for note in row.notes:
                    yield Text(f"{row.name}: {note}", style="dim")
            yield Text()

    def markdown(self, pictures: list[str]) -> str:
        """The whole as a page.

        Args:
            pictures: names of files beside it.
        """
        model, draft = self.conditions["model"], self.conditions["draft"]
        lines = [f"# {model['name']}, draft {draft['name'] if draft else 'none'}", "", *self._conditions(), ""]
        if not self.outcome.complete:
            lines += ["**Interrupted: these are the results until then.**", ""]
        for sampling, rows in self.tables.items():
            lines += [f"## {self._title(sampling)}", "", f"| | {' | '.join(_COLUMNS)} | prompts |"]
            lines.append("|---" + "|--:" * (len(_COLUMNS) + 1) + "|")
            for row in rows:
                name = f"**{row.name}**" if row.name == "staged" else row.name
                lines.append(f"| {name} | {' | '.join(_cells(row))} | {row.prompts or '-'} |")
            lines += ["", *_remarks(rows), ""]
        lines += [f"- *{heading}*: {meaning}." for heading, (_, meaning) in _COLUMNS.items()]
        lines += ["", *(f"![{name.partition('.')[0]}]({name})" for name in pictures)]
        return "\n".join(lines) + "\n"

    def _table(self, sampling: str, rows: list[Row], num_columns: int) -> Table:
        table = Table(title=self._title(sampling), box=None, title_justify="left", pad_edge=False)
        table.add_column("", no_wrap=True)
        for heading in list(_COLUMNS)[:num_columns]:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            style = "bold" if row.name == "staged" else "dim" if row.is_peer else ""
            table.add_row(row.name, *_cells(row)[:num_columns], style=style)
        return table

    def _title(self, sampling: str) -> str:
        used, tokens = self.conditions["prompts"]["used"], self.conditions["max_tokens"]
        return f"{sampling}, {used} prompt{'s' if used > 1 else ''}, {tokens} tokens each"

    def _conditions(self) -> list[str]:
        found = self.conditions
        machine, prompts = found["machine"], found["prompts"]
        cores = f"{machine['logical_cores']} logical cores"
        kernel = f"{found['threads']} threads, kernel {found['kernel']}"
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        peers = f"; the peers had {prompts['peers']} of them, evenly spread" if prompts["peers"] else ""
        times = "once" if found["repeats"] == 1 else f"{found['repeats']} times"
        return [
            f"- machine: {machine['processor']}, {cores}, {machine['system']}; {kernel}",
            f"- versions: Python {machine['python']}, {versions}",
            *(_file_line(part, found[part]) for part in ("model", "draft") if found[part]),
            f"- prompts: {prompts['used']} of {prompts['file']} (SHA-256 {prompts['sha256'][:16]}){peers}",
            f"- everything in turn, {times}; {self.outcome.seconds / 60:.0f} minutes, {found['date']}",
            f"- made by `{found['command']}`",
        ]


def _file_line(part: str, file: dict[str, Any]) -> str:
    about = f"; {file['about']}" if file["about"] else ""
    return f"- {part}: {file['name']}, {file['bytes'] / 1e6:.1f} MB, SHA-256 {file['sha256'][:16]}{about}"


def _remarks(rows: list[Row]) -> list[str]:
    lines = [f"- {row.name}: {note}" for row in rows for note in row.notes]
    for row in rows:
        if row.acceptance_at_depth:
            rates = ", ".join(f"{rate:.2f}" for rate in row.acceptance_at_depth)
            lines.append(f"- {row.name}: acceptance at depth 1, 2, ...: {rates}")
        if total := sum(row.parts.values()):
            shares = ", ".join(f"{part} {seconds / total:.1%}" for part, seconds in row.parts.items())
            lines.append(f"- {row.name}: time by part: {shares}")
    different = [f"- {row.name}: {row.different} texts differ from plain decoding" for row in rows if row.different]
    return lines + (different or ["- All of pystaged's texts are plain decoding's, token for token."])


def _cells(row: Row) -> list[str]:
    return [cell(row) for cell, _ in _COLUMNS.values()]


def _width(table: Table) -> int:
    """Characters that a table needs."""
    return Console(width=1000).measure(table).maximum
