"""A benchmark's report: for terminals, as JSON, and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pystaged.bench.suite import Outcome
from pystaged.bench.summary import ALL, WORST, Row, Tables
from pystaged.platform.files import whole_file

_STAGED = "staged"


def _figure(field: str, form: str, unit: float = 1) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = getattr(row, field)
        return "-" if value is None else form.format(*value if isinstance(value, tuple) else [value / unit])

    return cell


# Cell and meaning by heading, the most important first: a narrow terminal shows only the first columns.
_COLUMNS: dict[str, tuple[Callable[[Row], str], str]] = {
    "tokens/s": (_figure("tokens_per_second", "{:.1f}"), "new tokens per second of decoding, without prefill"),
    "x plain": (_figure("speedup", "{:.2f}"), "speed-up over plain decoding on the same prompts, by total tokens/s"),
    "95 %": (_figure("interval", "{:.2f}-{:.2f}"), "its 95 % confidence interval, by the bootstrap over prompts"),
    "least": (_figure("least", "{:.2f}"), "smallest speed-up of a single prompt"),
    "per step": (_figure("tokens_per_step", "{:.2f}"), "tokens per pass of the target"),
    "x best baseline": (
        _figure("over_best_baseline", "{:.2f}"),
        "speed-up over the fastest baseline, on prompts that both had",
    ),
    "its 95 %": (_figure("over_best_baseline_interval", "{:.2f}-{:.2f}"), "95 % confidence interval of that"),
    "first ms": (_figure("first_token_ms", "{:.0f}"), "median time to the first token"),
    "MB": (_figure("peak_bytes", "{:.0f}", 1e6), "peak memory of a process with this method only"),
    "prompts": (lambda row: str(row.prompts or "-"), "number of prompts"),
}
# Columns whose figures differ between categories.
_OF_CATEGORIES = [name for name in _COLUMNS if name not in ("first ms", "MB")]


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a benchmark and their conditions.

    conditions: machine, versions, files and settings. tables: see summary.tables. passes: T(n), see PassTimes.to_dict.
    """

    conditions: dict[str, Any]
    tables: Tables
    passes: dict[str, Any]
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Everything for JSON, including single runs."""
        return {
            "conditions": self.conditions,
            "complete": self.outcome.complete,
            "seconds": self.outcome.seconds,
            "tables": {
                sampling: {category: [asdict(row) for row in rows] for category, rows in parts.items()}
                for sampling, parts in self.tables.items()
            },
            "passes": self.passes,
            "runs": [run.to_dict() for run in self.outcome.runs],
        }

    def write(self, folder: Path) -> list[str]:
        """Write report.md and report.json; returns their file names."""
        with whole_file(folder / "report.json") as path:
            path.write_text(json.dumps(self.to_dict()), encoding="utf-8")
        with whole_file(folder / "report.md") as path:
            path.write_text(self.markdown(), encoding="utf-8")
        return ["report.md", "report.json"]

    def terminal(self, width: int) -> Iterator[Table | Text]:
        """Tables and notes: all methods for each sampling, and staged decoding by category.

        Args:
            width: of the terminal, in characters.
        """
        notes: dict[str, None] = {}
        for title, headings, rows in self._parts():
            sizes = range(len(headings), 1, -1)
            tables = (_table(title, headings[:columns], rows) for columns in sizes)
            yield next((table for table in tables if _width(table) <= width), _table(title, headings[:2], rows))
            yield Text()
            notes |= dict.fromkeys(f"{row.name}: {note}" for _, row in rows for note in row.notes)
        for note in notes:
            yield Text(note, style="dim")
        for part in ("model", "draft"):
            if file := self.conditions[part]:
                yield Text(_file_line(part, file).removeprefix("- "), style="dim")
        load = self.conditions["load"]
        yield Text(self._load(), style="bold yellow" if load["busy"] else "dim")

    def markdown(self) -> str:
        """The report as a Markdown page."""
        model, draft = self.conditions["model"], self.conditions["draft"]
        lines = [f"# {model['name']}, draft {draft['name'] if draft else 'none'}", "", *self._conditions(), ""]
        if not self.outcome.complete:
            lines += ["**Interrupted: these are the results until then.**", ""]
        for title, headings, rows in self._parts():
            cells = [[_bold(name), *_cells(row, headings)] for name, row in rows]
            lines += [f"## {title}", "", *markdown_table(["", *headings], cells), ""]
        for sampling, parts in self.tables.items():
            if sampling != WORST and len(parts) > 2:
                cells = [
                    [_bold(row.name), *(_cells(parts[category][at], ["tokens/s"])[0] for category in parts)]
                    for at, row in enumerate(parts[ALL])
                ]
                lines += [f"## {sampling}, tokens per second by category", "", *markdown_table(["", *parts], cells), ""]
        lines += [f"- *{heading}*: {meaning}." for heading, (_, meaning) in _COLUMNS.items()]
        lines += ["", *self._remarks()]
        return "\n".join(lines) + "\n"

    def _parts(self) -> Iterator[tuple[str, list[str], list[tuple[str, Row]]]]:
        """Title, headings and rows of each table."""
        for sampling, parts in self.tables.items():
            used = max(row.prompts for row in parts[ALL])
            title = (
                f"{sampling}, {used} prompt{'s' if used > 1 else ''}, at most {self.conditions['max_tokens']} tokens"
            )
            if sampling != WORST:
                yield title, list(_COLUMNS), [(row.name, row) for row in parts[ALL]]
            staged = [
                (category, row)
                for category, rows in parts.items()
                for row in rows
                if row.name == _STAGED and (len(parts) > 2 or sampling == WORST)
            ]
            if staged:
                yield f"{title}: staged by {'sampling' if sampling == WORST else 'category'}", _OF_CATEGORIES, staged

    def _load(self) -> str:
        load, cores = self.conditions["load"], self.conditions["machine"]["logical_cores"]
        line = f"other programs: {load['mean']:.1f} running threads on average, at most {load['most']:.0f}"
        return f"{line}, beside {self.conditions['threads']} of ours on {cores} logical cores" + (
            ": the machine was busy, so these figures say little" if load["busy"] else ""
        )

    def _conditions(self) -> list[str]:
        found = self.conditions
        machine, prompts = found["machine"], found["prompts"]
        cores = f"{machine['logical_cores']} logical cores"
        kernel = f"{found['threads']} threads, kernel {found['kernel']}"
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        table = f"a table of {found['ngram_table']:,} tokens" if found["ngram_table"] else "no table"
        used = ", ".join(f"{count} {category}" for category, count in prompts["used"].items())
        return [
            f"- machine: {machine['processor']}, {cores}, {machine['system']}; {kernel}",
            f"- versions: Python {machine['python']}, {versions}",
            *(_file_line(part, found[part]) for part in ("model", "draft") if found[part]),
            f"- n-grams: {table}; recycled candidates of {found['warm'] or 'no'} other prompts",
            f"- prompts: {prompts['file']} (SHA-256 {prompts['sha256'][:16]}): {used}",
            f"- {self._load()}",
            f"- single prompts in turn; {self.outcome.seconds / 60:.0f} minutes, {found['date']}",
            f"- made by `{found['command']}`",
        ]

    def _remarks(self) -> list[str]:
        usual = [(sampling, row) for sampling, parts in self.tables.items() for row in parts[ALL]]
        lines = dict.fromkeys(f"- {row.name}: {note}" for _, row in usual for note in row.notes)
        for sampling, row in usual:
            if row.acceptance_at_depth:
                rates = ", ".join(f"{rate:.2f}" for rate in row.acceptance_at_depth)
                lines[f"- {sampling}, {row.name}: acceptance at depth 1, 2, ...: {rates}"] = None
            if total := sum(row.parts.values()):
                shares = ", ".join(f"{part} {seconds / total:.1%}" for part, seconds in row.parts.items())
                lines[f"- {sampling}, {row.name}: time by part: {shares}"] = None
        different = [
            f"- {sampling}, {row.name}: {row.different} sequences differ from plain decoding"
            for sampling, row in usual
            if row.different
        ]
        return [*lines, *(different or ["- All of pystaged's outputs equal plain decoding's, token for token."])]


def _table(title: str, headings: Sequence[str], rows: Sequence[tuple[str, Row]]) -> Table:
    figures = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    table = Table(Column(no_wrap=True), *figures, title=title, box=None, title_justify="left", pad_edge=False)
    for name, row in rows:
        style = "bold" if name in (_STAGED, ALL) else "dim" if row.is_baseline else ""
        table.add_row(name, *_cells(row, headings), style=style)
    return table


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], worded: Collection[str] = ()) -> list[str]:
    """A table's lines in Markdown, with numbers in all columns but the first and those with the headings `worded`."""
    rule = "".join(["|---", *("|---" if heading in worded else "|--:" for heading in headings[1:]), "|"])
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in (headings, *rows))
    first, *others = (f"| {' | '.join(row)} |" for row in escaped)
    return [first, rule, *others]


def _bold(name: str) -> str:
    return f"**{name}**" if name in (_STAGED, ALL) else name


def _file_line(part: str, file: dict[str, Any]) -> str:
    about = f"; {file['about']}" if file["about"] else ""
    return f"- {part}: {file['name']}, {file['bytes'] / 1e6:.1f} MB, SHA-256 {file['sha256'][:16]}{about}"


def _cells(row: Row, headings: Sequence[str]) -> list[str]:
    return [_COLUMNS[heading][0](row) for heading in headings]


def _width(table: Table) -> int:
    """Width of a table in characters."""
    return Console(width=1000).measure(table).maximum
