"""`pystaged models`: what is in the cache."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pystaged import files
from pystaged.cli.console import report
from pystaged.loading import cache

app = typer.Typer(help="List the models in the cache, or remove one.", invoke_without_command=True)


@app.callback()
def models(context: typer.Context) -> None:
    """List the models in the cache: size, type, shape and license.

    Example: pystaged models
    """
    if context.invoked_subcommand:
        return
    found = cache.models()
    if found:
        table = Table(box=None, pad_edge=False)
        for heading in ("name", "MB", "type", "shape", "license"):
            table.add_column(heading, justify="right" if heading == "MB" else "left", no_wrap=True)
        for model in found:
            cells = (model.name, f"{model.bytes / 1e6:.1f}", model.type, model.shape, model.license or "unknown")
            table.add_row(*map(Text, cells))
        Console(soft_wrap=True, highlight=False).print(table)
    else:
        report(f"no models in {cache.folder()}; get one with: pystaged pull openai-community/gpt2")
    leftovers = files.leftovers(cache.folder())
    if leftovers:
        size = sum(part.stat().st_size for part in leftovers)
        report(
            f"and {_count(len(leftovers))} of writers that were killed, {size / 1e6:.1f} MB; "
            "remove with: pystaged models remove --leftovers"
        )


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="As `pystaged models` lists it.", show_default=False)] = "",
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Unfinished files of writers that were killed.")
    ] = False,
) -> None:
    """Remove a model from the cache. What other programs put into Hugging Face's cache, or still have there, stays.

    Example: pystaged models remove openai-community/gpt2:q8_0
    """
    if bool(name) == leftovers:
        raise typer.BadParameter("name a model, or --leftovers")
    if leftovers:
        parts = files.leftovers(cache.folder())
        freed = sum(part.stat().st_size for part in parts)
        for part in parts:
            files.remove_leftover(part)
        report(f"removed {_count(len(parts))}, {freed / 1e6:.1f} MB freed")
        return
    freed = cache.remove(name)
    report(f"removed, {freed / 1e6:.1f} MB freed" if freed else "removed; the file it led to stays, for others use it")


def _count(number: int) -> str:
    return f"{number} unfinished file{'' if number == 1 else 's'}"
