"""`pystaged bench`: speed on this machine, against what people would use instead."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pystaged.bench.contest import Contest
from pystaged.bench.report import Report
from pystaged.cli.console import draft_name, errors, report
from pystaged.cli.options import Json
from pystaged.files import whole_file

_WIDE = 160  # characters, where nobody says how many there are


def bench(
    model: Annotated[
        str, typer.Option(help="GGUF file, 'house', or a GPT-2 Large made once: 'grown' or 'random'.")
    ] = "house",
    draft: Annotated[str, typer.Option(help="Path of a draft, 'house', or 'none' for n-grams alone.")] = "house",
    quantization: Annotated[str, typer.Option("--type", help="Type of a model to be made.")] = "Q8_0",
    prompts: Annotated[Path | None, typer.Option(help="File in HumanEval's format; else the shipped one.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts at most, evenly spread over the file.")] = 82,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Times to run everything.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="For all; 0 takes one per physical core.")] = 0,
    peers: Annotated[bool, typer.Option(help="Measure the peers that are installed, too.")] = True,
    peer_limit: Annotated[int, typer.Option(min=1, help="Prompts for the peers at most, evenly spread.")] = 10,
    llama_cpp: Annotated[Path | None, typer.Option(help="Folder of a llama.cpp build: its programs take part.")] = None,
    accept: Annotated[
        str | None,
        typer.Option(help="Instead: what drafts with this acceptance at depth 1, 2, ... would gain; as 0.8,0.6,0.5."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.md, report.json and pictures.")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed on this machine: our ways to decode, and what people would use instead.

    Greedy and at T = 1, top-k 50; the same files and prompts for all, in turn. Ctrl-C ends it early, and what was
    measured by then is reported.

    Example: pystaged bench --limit 10

    Example: pystaged bench --model grown --llama-cpp ~/llama.cpp/build/bin --out report

    Example: pystaged bench --model big.gguf --draft small.gguf --accept 0.8,0.7,0.6
    """
    contest = Contest(
        model=model,
        draft=draft_name(draft),
        quantization=quantization.upper(),
        prompts=prompts,
        limit=limit,
        max_tokens=max_tokens,
        repeats=repeats,
        threads=threads,
        peers=peers,
        peer_limit=peer_limit,
        llama_cpp=llama_cpp,
        accept=_rates(accept) if accept is not None else [],
    )
    if out:
        # Now, not after half an hour.
        out.mkdir(parents=True, exist_ok=True)
        if not find_spec("matplotlib"):
            report("there will be no pictures: matplotlib is not installed; run: pip install 'pystaged[bench]'")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=None, left="")

        def progress(doing: str, done: float, left: float) -> None:
            words = f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left" if left else ""
            bar.update(task, description=doing, completed=done, total=done + left if left else None, left=words)

        found = contest.run(progress)
    if out:
        _write(found, out)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=_WIDE)
        for part in found.terminal(console.width):
            console.print(part, soft_wrap=not console.is_terminal)
    if not found.outcome.complete:
        report("these are the results until then")
        raise typer.Exit(130)


def _write(found: Report, folder: Path) -> None:
    with whole_file(folder / "report.json") as path:
        path.write_text(json.dumps(found.to_dict()), encoding="utf-8")
    names = []
    if find_spec("matplotlib"):
        names = import_module("pystaged.bench.plots").draw(folder, found.tables, found.passes)
    with whole_file(folder / "report.md") as path:
        path.write_text(found.markdown(names), encoding="utf-8")
    report(f"{', '.join(['report.md', 'report.json', *names])} are in {folder}")


def _rates(accept: str) -> list[float]:
    """The numbers of --accept."""
    try:
        rates = [float(word) for word in accept.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"--accept takes probabilities between 0 and 1, as 0.8,0.6,0.5; not '{accept}'")
    return rates
