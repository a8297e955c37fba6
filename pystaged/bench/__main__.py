"""The command line of the benchmarks."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console

from pystaged.bench import models, passes

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


if __name__ == "__main__":
    app()
