"""The command line of the benchmarks for who works on pystaged; users have `pystaged bench`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pystaged._core import Model, Session
from pystaged.bench import models, pairs, passes
from pystaged.cli.options import Json, Threads
from pystaged.decoding.loop import Decoder
from pystaged.loading import names
from pystaged.loading.pair import Pair

app = typer.Typer(help="Measure pystaged on this machine.", no_args_is_help=True, pretty_exceptions_enable=False)


ModelName = Annotated[
    str, typer.Option("--model", help="GGUF file, 'house', or a GPT-2 Large made once: 'random' or 'grown'.")
]
Quantization = Annotated[str, typer.Option("--type", help="Type of a model to be made.")]
DraftName = Annotated[str, typer.Option("--draft", help="Path of a draft, or 'house'.")]
Prompts = Annotated[Path | None, typer.Option(help="File in HumanEval's format; else the shipped one.")]
Limit = Annotated[int, typer.Option(min=1, help="Prompts at most.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="New tokens per prompt.")]


@app.callback()
def _main() -> None:
    """Measure pystaged on this machine."""


@app.command("passes")
def passes_command(
    model: ModelName = "random",
    quantization: Quantization = "Q8_0",
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes per row count.")] = 11,
    threads: Threads = 0,
    peer: Annotated[bool, typer.Option(help="Measure llama.cpp too.")] = True,
    as_json: Json = False,
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
def lossless(
    model: ModelName = "house",
    draft: DraftName = "house",
    quantization: Quantization = "Q8_0",
    prompts: Prompts = None,
    limit: Limit = 82,
    max_tokens: MaxTokens = 96,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each sampling.")] = 2,
) -> None:
    """Check that every way of drafting writes what plain decoding writes. Ends with 1 if one does not.

    Example: python -m pystaged.bench lossless --limit 10
    """
    pair, smaller, texts = _open(model, draft, quantization, prompts, limit)
    session = Session(pair.target)
    ways = pairs.drafters(pair.target, smaller, pair.table)
    decoders = {way: Decoder(session, drafter) for way, drafter in ways.items()}
    decoders["as measured costs decide"] = pair.decoder(0, None)
    runs = {
        f"{mode}, seed {seed}": replace(sampling, seed=seed)
        for mode, sampling in pairs.MODES.items()
        for seed in range(1 if sampling.is_greedy else seeds)
    }
    different: dict[str, list[int]] = {way: [] for way in decoders}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("checking", total=len(runs) * len(decoders))
        for sampling in runs.values():
            expected = pairs.expect(session, texts, sampling, max_tokens)
            for way, decoder in decoders.items():
                different[way].append(len(pairs.check_decoder(decoder, expected, max_tokens)))
                progress.advance(task)
    title = f"{len(texts)} prompts, {max_tokens} tokens each: texts that differ from plain decoding"
    table = Table("drafted by", *runs, title=title, box=None)
    for way, counts in different.items():
        table.add_row(way, *map(str, counts))
    Console().print(table)
    if any(map(any, different.values())):
        raise typer.Exit(1)


@app.command("parts")
def parts_command(
    model: ModelName = "house",
    draft: DraftName = "house",
    quantization: Quantization = "Q8_0",
    prompts: Prompts = None,
    limit: Limit = 82,
    max_tokens: MaxTokens = 96,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of a tree.")] = 12,
) -> None:
    """What shared noise and the n-grams below the draft bring: acceptance, tokens per step, draft passes per token.

    Example: python -m pystaged.bench parts --limit 20
    """
    pair, smaller, texts = _open(model, draft, quantization, prompts, limit)
    session = Session(pair.target)
    title = f"{len(texts)} prompts, {max_tokens} tokens each, trees of {nodes} nodes"
    headings = ("", "tokens per step", "draft passes per token", "acceptance at depth 1, 2, ...")
    table = Table(*headings, title=title, box=None)
    for mode, sampling in pairs.MODES.items():
        for way, drafter in pairs.parts(pair.target, smaller, pair.table, nodes).items():
            stats = pairs.run_texts(Decoder(session, drafter), texts, sampling, max_tokens)
            passes_per_token = stats.drafters["draft"].passes / stats.new_tokens
            depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_at_depth[:8])
            table.add_row(f"{mode}: {way}", f"{stats.tokens_per_step:.3f}", f"{passes_per_token:.3f}", depths)
    Console().print(table)


def _open(
    model: str, draft: str, quantization: str, prompts: Path | None, limit: int
) -> tuple[Pair, Model, list[NDArray[np.int32]]]:
    """A target with its draft, the draft itself, and the tokens of the prompts."""
    pair = Pair(models.find(model, quantization.upper()), draft, 0, Console(stderr=True).print)
    if pair.draft is None:
        raise typer.BadParameter("a draft is needed")
    lines = pairs.load_prompts(prompts or names.house(names.HOUSE_PROMPTS))[:limit]
    return pair, pair.draft, [pair.tokenizer.encode(line) for line in lines]


if __name__ == "__main__":
    app()
