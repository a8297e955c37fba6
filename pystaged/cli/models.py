"""`pystaged models`: what is in the cache."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pystaged.cli.console import report
from pystaged.loading import cache

app = typer.Typer(help="Models in the cache.", invoke_without_command=True)


@app.callback()
def models(context: typer.Context) -> None:
    """List the models in the cache: size, type, shape and license.

    Example: pystaged models
    """
    if context.invoked_subcommand:
        return
    found = cache.models()
    if not found:
        report(f"no models in {cache.folder()}; get one with: pystaged pull openai-community/gpt2")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "MB", "type", "shape", "license"):
        table.add_column(heading, justify="right" if heading == "MB" else "left", no_wrap=True)
    for model in found:
        cells = (model.name, f"{model.bytes / 1e6:.1f}", model.type, model.shape, model.license or "unknown")
        table.add_row(*map(Text, cells))
    Console(soft_wrap=True, highlight=False).print(table)


@app.command()
def remove(name: Annotated[str, typer.Argument(help="As `pystaged models` lists it.")]) -> None:
    """Remove a model from the cache.

    Example: pystaged models remove openai-community/gpt2:q8_0
    """
    report(f"{cache.remove(name) / 1e6:.1f} MB freed")
