"""`pystaged generate`: continue a prompt."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

import pystaged
from pystaged.cli.console import errors, open_engine, read_prompt, reading_bar, report
from pystaged.cli.options import (
    Color,
    Colors,
    Json,
    LoadOptions,
    ModelName,
    SamplingOptions,
    ShowTree,
    System,
    Think,
    check,
    grouped,
)
from pystaged.cli.painting import show, summary
from pystaged.config import TextOptions


@grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    *,
    model: ModelName = "house",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="New tokens at most; 128, or with --chat what has room.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask the prompt, by the model's chat template.")] = False,
    system: System = "",
    think: Think = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; may be repeated.", callback=check)
    ] = None,
    sampling: SamplingOptions,
    loading: LoadOptions,
    speculate: Annotated[bool, typer.Option(help="Draft; the text is the same without, only slower.")] = True,
    color: Colors = Color.NONE,
    show_tree: ShowTree = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what each stage did.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt.

    The text goes to standard output, everything else to standard error.

    Example: pystaged generate "def fibonacci(n):" --max-tokens 64

    Example: pystaged generate "def fibonacci(n):" --color stages --show-tree

    Example: pystaged generate --chat "Why is the sky blue?" --model smollm2

    Example: pystaged generate - --temperature 0.8 --top-p 0.95 --seed 7 < prompt.txt > text.txt
    """
    # Before a model is loaded, which may take a while.
    config = sampling.config()
    prompt = read_prompt(prompt)
    if not chat and (system or think is not None):
        raise typer.BadParameter("--system and --think are for --chat.")
    with open_engine(model, loading) as engine, reading_bar() as progress:
        options: TextOptions = {
            "stop": stop or (),
            "speculate": speculate,
            "sampling": config,
            "progress": progress,
        }
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        if chat:
            begun = [{"role": "system", "content": system}] if system else []
            stream = engine.stream_chat(
                [*begun, {"role": "user", "content": prompt}],
                template_options={} if think is None else {"enable_thinking": think},
                **options,
            )
        else:
            stream = engine.stream(prompt, **options)
        result = stream.finish() if as_json else show(stream, engine.tokenizer, color, show_tree=show_tree)
    if as_json:
        fields = {
            "text": result.text,
            "tokens": result.tokens,
            "stages": [stage.name.lower() for stage in result.stages],
            "finish_reason": result.finish_reason,
            "seed": result.seed,
            "stats": result.stats.to_dict(),
        }
        typer.echo(json.dumps(fields))
        return
    errors.print(summary(result.stats, color))
    if verbose:
        errors.print(stats_table(result.stats))
        read = result.stats.prompt_tokens - result.stats.reused_tokens
        report(f"read {read} tokens of the prompt in {result.stats.prefill_seconds:.2f} seconds; seed {result.seed}")


def stats_table(stats: pystaged.GenerationStats) -> Table:
    """What each stage did for a text."""
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
