"""`pystaged generate`: continue a prompt."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.table import Table

import pystaged
from pystaged.cli.console import errors, open_engine
from pystaged.cli.options import (
    Colors,
    Device,
    DraftDevice,
    DraftName,
    Json,
    MaxTokens,
    MinP,
    ModelName,
    Seed,
    ShowTree,
    Temperature,
    Threads,
    TopK,
    TopP,
)
from pystaged.cli.painting import Color, show, summary


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    model: ModelName = "house",
    draft: DraftName = "auto",
    device: Device = "cpu",
    draft_device: DraftDevice = "cpu",
    speculate: Annotated[bool, typer.Option(help="Draft; the text is the same without, only slower.")] = True,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")] = None,
    threads: Threads = 0,
    color: Colors = Color.NONE,
    show_tree: ShowTree = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what each stage did.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt.

    The text goes to standard output, everything else to standard error.

    Example: pystaged generate "def fibonacci(n):" --max-tokens 64

    Example: pystaged generate "def fibonacci(n):" --color stages --show-tree

    Example: pystaged generate - --temperature 0.8 --top-p 0.95 --seed 7 < prompt.txt > text.txt
    """
    # Before a model is loaded, which may take a while.
    pystaged.SamplingConfig(temperature, top_k, top_p, min_p, seed)
    if prompt == "-":
        prompt = sys.stdin.read()
    with open_engine(model, draft, device, draft_device, threads) as engine:
        stream = engine.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop or (),
            speculate=speculate,
        )
        result = stream.finish() if as_json else show(stream, engine.tokenizer, color, show_tree=show_tree)
    if as_json:
        fields = {
            "text": result.text,
            "tokens": result.tokens,
            "stages": [stage.name.lower() for stage in result.stages],
            "finish_reason": result.finish_reason,
            "stats": result.stats.to_dict(),
        }
        typer.echo(json.dumps(fields))
        return
    errors.print(summary(result.stats, color))
    if verbose:
        errors.print(_stats_table(result.stats))


def _stats_table(stats: pystaged.GenerationStats) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "drafted", "accepted", "emitted", "passes", "seconds"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name, stage in stats.stages.items():
        work = stats.drafters.get(name)
        passes = stats.steps if name == "target" else work.passes if work else 0
        seconds = stats.target_seconds if name == "target" else work.seconds if work else 0.0
        table.add_row(name, str(stage.drafted), str(stage.accepted), str(stage.emitted), str(passes), f"{seconds:.3f}")
    depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_at_depth)
    table.caption = (
        f"acceptance at depth 1, 2, ...: {depths or '-'}; weight bytes per token relative to plain decoding: "
        f"{stats.relative_weight_bytes:.2f}; share of time in Python: {stats.python_share:.1%}"
    )
    return table
