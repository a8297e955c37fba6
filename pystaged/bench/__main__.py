"""The command line of the benchmarks."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import pystaged
from pystaged import hub
from pystaged._core import Session
from pystaged.bench import machine, models, pairs, passes
from pystaged.decode import Decoder
from pystaged.pair import Pair
from pystaged.policy import FixedPolicy

app = typer.Typer(help="Measure pystaged on this machine.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _main() -> None:
    """Measure pystaged on this machine."""


@app.command("passes")
def passes_command(
    model: Annotated[
        str, typer.Option(help="GGUF file, 'house', or a GPT-2 Large made once: 'random' or 'grown'.")
    ] = "random",
    quantization: Annotated[str, typer.Option("--type", help="Type of a model to be made.")] = "Q8_0",
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes per row count.")] = 11,
    threads: Annotated[int, typer.Option(help="0 takes one per physical core.")] = 0,
    peer: Annotated[bool, typer.Option(help="Measure llama.cpp too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time one pass over n = 1 to 32 rows, the curve on which speculation lives.

    Example: python -m pystaged.bench passes --model random --type Q4_0
    """
    path = models.find(model, quantization.upper())
    result = passes.measure(
        path, repeats=repeats, kernel=os.environ.get("PYSTAGED_KERNEL", ""), num_threads=threads, peer=peer
    )
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
    else:
        Console().print(result.table())


@app.command()
def speedup(
    model: Annotated[str, typer.Option(help="As in passes.")] = "grown",
    draft: Annotated[str, typer.Option(help="Path of a draft, 'house', or 'none' for n-grams alone.")] = "house",
    quantization: Annotated[str, typer.Option("--type", help="Type of a model to be made.")] = "Q8_0",
    prompts: Annotated[Path | None, typer.Option(help="File in HumanEval's format.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts at most.")] = 82,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 96,
    nodes: Annotated[int, typer.Option(help="Trees of this many nodes, 4 leaves a pass; 0 lets cost decide.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per prompt, of which the median counts.")] = 1,
    threads: Annotated[int, typer.Option(help="0 takes one per physical core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plain against staged decoding over a set of prompts: same tokens, tokens per step, speed.

    Example: python -m pystaged.bench speedup --model grown --limit 10
    """
    texts = pairs.load_prompts(prompts or hub.house(hub.HOUSE_PROMPTS))[:limit]
    policy = FixedPolicy(width=4, depth=8, budget=nodes) if nodes else None
    path = models.find(model, quantization.upper())
    errors = Console(stderr=True)
    smaller = None if draft == "none" else draft
    summaries = {}
    with Progress(console=errors) as progress:
        task = progress.add_task(path.name, total=len(texts) * len(pairs.MODES))
        for mode, sampling in pairs.MODES.items():
            # A fresh engine, so that nothing learnt in one mode helps the next.
            with pystaged.load(path, draft=smaller, num_threads=threads, policy=policy, report=errors.print) as engine:
                found = pairs.compare(engine, texts, sampling, max_tokens, repeats, lambda: progress.advance(task))
            summaries[mode] = found.summary()
    if as_json:
        report = {"model": path.name, "draft": draft, "max_tokens": max_tokens, "machine": machine.describe()}
        typer.echo(json.dumps({**report, "modes": summaries}))
        return
    table = Table(title=f"{path.name}, draft {draft}, {len(texts)} prompts, {max_tokens} tokens each", box=None)
    table.add_column("")
    for mode in summaries:
        table.add_column(mode, justify="right")
    for figure in next(iter(summaries.values())):
        table.add_row(figure.replace("_", " "), *(_show(summary[figure]) for summary in summaries.values()))
    Console().print(table)


@app.command()
def lossless(
    model: Annotated[str, typer.Option(help="As in passes.")] = "house",
    draft: Annotated[str, typer.Option(help="Path of a draft, or 'house'.")] = "house",
    quantization: Annotated[str, typer.Option("--type", help="Type of a model to be made.")] = "Q8_0",
    prompts: Annotated[Path | None, typer.Option(help="File in HumanEval's format.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts at most.")] = 82,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 96,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each sampling.")] = 2,
) -> None:
    """Check that every way of drafting writes what plain decoding writes. Ends with 1 if one does not.

    Example: python -m pystaged.bench lossless --limit 10
    """
    pair = Pair(models.find(model, quantization.upper()), draft, 0, Console(stderr=True).print)
    if pair.draft is None:
        raise typer.BadParameter("a draft is needed")
    lines = pairs.load_prompts(prompts or hub.house(hub.HOUSE_PROMPTS))[:limit]
    texts = [pair.tokenizer.encode(line) for line in lines]
    ways = pairs.drafters(pair.target, pair.draft, pair.table)
    session = Session(pair.target)
    decoders = {way: Decoder(session, drafter) for way, drafter in ways.items()}
    decoders["as measured costs decide"] = pair.decoder(0, None)
    runs = [
        (f"{mode}, seed {seed}", replace(sampling, seed=seed))
        for mode, sampling in pairs.MODES.items()
        for seed in range(1 if sampling.is_greedy else seeds)
    ]
    title = f"{len(texts)} prompts, {max_tokens} tokens each: texts that differ from plain decoding"
    table = Table("drafted by", title=title, box=None)
    columns = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("checking", total=len(runs) * len(decoders))
        for name, sampling in runs:
            table.add_column(name, justify="right")
            expected = pairs.expect(session, texts, sampling, max_tokens)
            different = []
            for decoder in decoders.values():
                different.append(len(pairs.check_decoder(decoder, expected, max_tokens)))
                progress.advance(task)
            columns.append(different)
    for way, counts in zip(decoders, zip(*columns, strict=True), strict=True):
        table.add_row(way, *map(str, counts))
    Console().print(table)
    if any(map(any, columns)):
        raise typer.Exit(1)


@app.command("parts")
def parts_command(
    model: Annotated[str, typer.Option(help="As in passes.")] = "house",
    draft: Annotated[str, typer.Option(help="Path of a draft, or 'house'.")] = "house",
    quantization: Annotated[str, typer.Option("--type", help="Type of a model to be made.")] = "Q8_0",
    prompts: Annotated[Path | None, typer.Option(help="File in HumanEval's format.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts at most.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 96,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of a tree.")] = 12,
) -> None:
    """What shared noise and the n-grams below the draft bring: acceptance, tokens per step, draft passes per token.

    Example: python -m pystaged.bench parts
    """
    pair = Pair(models.find(model, quantization.upper()), draft, 0, Console(stderr=True).print)
    if pair.draft is None:
        raise typer.BadParameter("a draft is needed")
    lines = pairs.load_prompts(prompts or hub.house(hub.HOUSE_PROMPTS))[:limit]
    texts = [pair.tokenizer.encode(line) for line in lines]
    session = Session(pair.target)
    title = f"{len(texts)} prompts, {max_tokens} tokens each, trees of {nodes} nodes"
    headings = ("", "tokens per step", "draft passes per token", "acceptance at depth")
    table = Table(*headings, title=title, box=None)
    for mode, sampling in pairs.MODES.items():
        for way, drafter in pairs.parts(pair.target, pair.draft, pair.table, nodes).items():
            stats = pairs.run_texts(Decoder(session, drafter), texts, sampling, max_tokens)
            passes_per_token = stats.drafters["draft"].passes / stats.new_tokens
            depths = _show(stats.acceptance_at_depth[:6])
            table.add_row(f"{mode}: {way}", f"{stats.tokens_per_step:.3f}", f"{passes_per_token:.3f}", depths)
    Console().print(table)


def _show(value: float | int | list[float]) -> str:
    if isinstance(value, list):
        return " ".join(f"{item:.2f}" for item in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    app()
