"""`pystaged ngram`: tables of n-grams."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import Progress, TextColumn

from pystaged import _core
from pystaged.cli.console import errors, model_name, report
from pystaged.cli.options import Threads, usage
from pystaged.drafting.corpus import sample_documents
from pystaged.drafting.table import MOST_TOKENS, NgramTable
from pystaged.files import destination
from pystaged.loading import names
from pystaged.loading.tables import table_path

app = typer.Typer(help="Tables of n-grams, the lowest stage.", no_args_is_help=True)


@app.command()
def build(
    model: Annotated[
        str, typer.Option(help="The draft whose text is counted: path, name in the cache, hub id, or 'house-draft'.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; beside the draft if not given, where generate finds it.", show_default=False),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens to sample.")] = 1_000_000,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.5,
    seed: Annotated[int, typer.Option(help="Same seed, same table.")] = 0,
    threads: Threads = 0,
) -> None:
    """Sample text from a draft and count the n-grams that draft for it.

    Example: pystaged ngram build --model draft.gguf
    """
    path = names.resolve_draft("house", "house") if model == "house-draft" else names.resolve(model_name(model))
    if path is None:
        raise FileNotFoundError("there is no house draft in this installation")
    target = destination(out or table_path(path))  # before the work, not after it
    tokenizer = _core.Tokenizer(os.fsencode(path))
    drafts = _core.Model(os.fsencode(path), os.environ.get("PYSTAGED_KERNEL", ""), threads)
    start = next((token for token in reversed(range(tokenizer.num_tokens)) if tokenizer.is_end(token)), None)
    if start is None:
        raise ValueError(f"{path} has no token that ends a text, so none to begin with")
    with usage():
        sampled = sample_documents(drafts, start, tokens, temperature=temperature, seed=seed)
    columns = (*Progress.get_default_columns(), TextColumn("{task.completed}/{task.total} tokens"))
    with Progress(*columns, console=errors) as progress:
        task = progress.add_task("sampling", total=tokens)

        def documents() -> Iterator[NDArray[np.int32]]:
            for document in sampled:
                progress.advance(task, len(document))
                yield document

        table = NgramTable.build(documents(), vocab_size=tokenizer.num_tokens, vocab_hash=tokenizer.fingerprint)
    table.save(target)
    report(f"{table.num_tokens} tokens counted, {target.stat().st_size / 1e6:.2f} MB in {target}")
    if target == table_path(path).resolve():
        report(f"it is used whenever {path.name} drafts")
    else:
        report(f"to be found without being named it must lie at {table_path(path)}")
