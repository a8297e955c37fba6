"""`pystaged verify`: make a receipt's text again and compare."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

import pystaged
from pystaged.cli.console import draft_name, model_name, report
from pystaged.cli.options import Threads, check_device
from pystaged.loading import names
from pystaged.loading.seen import SeenModel
from pystaged.receipt import Receipt
from pystaged.repeating import Difference, check_model, find_model, promise


def verify(
    receipt: Annotated[
        Path, typer.Argument(help="What `generate --receipt` wrote.", metavar="FILE", show_default=False)
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model, where it is not found by its hash: it is looked for in the package and the cache.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Without drafting; the text is the same, only slower.")
    ] = False,
    draft: Annotated[str, typer.Option(help="What drafts, as in generate.")] = "auto",
    device: Annotated[
        str, typer.Option(help="Where the target runs; only of cpu the same text is promised.", callback=check_device)
    ] = "cpu",
    threads: Threads = 0,
) -> None:
    """Make the text of a receipt again on this machine, and compare.

    Says "same", or where the text differs and how far, and leaves with status 1 if it does.
    A model is only downloaded where --model names one of the hub.

    Example: pystaged generate "def fibonacci(n):" --receipt text.receipt && pystaged verify text.receipt
    """
    expected = Receipt.load(receipt)
    house = names.resolve("house")
    path = find_model(expected) if model is None else names.resolve(model_name(model))
    if path is None:
        record = expected.model
        raise FileNotFoundError(
            f"no model here has the receipt's SHA-256 {record.sha256}; it calls it {record.file} ({record.name}), "
            f"{record.size} bytes; name its file with --model"
        )
    check_model(expected, SeenModel.now(path))
    said = promise(expected, device)
    if said:
        report(said)
    with pystaged.load(
        "house" if path == house else path,  # by name it has a draft
        draft=draft_name(draft),
        device=device,
        num_threads=threads,
        n_ctx=expected.n_ctx,
        kv=expected.kv,
        memory=False,
        report=report,
    ) as engine:
        difference = engine.repeat(expected, speculate=not plain)
        if difference is None:
            count, ended = len(expected.tokens), expected.finish_reason
            typer.echo(f"same: {count} tokens, ended by {ended}, text with SHA-256 {expected.text_sha256}")
            return
        typer.echo(_words(difference, expected, engine))
    raise typer.Exit(1)


def _words(difference: Difference, receipt: Receipt, engine: pystaged.Engine) -> str:
    """Where and how far the texts differ."""

    def spelled(token: int | None) -> str:
        if token is None:
            return "the end"
        if token >= engine.tokenizer.num_tokens:
            return f"token {token}, which the model has not,"
        return f"{engine.tokenizer.token_bytes(token, True).decode('utf-8', 'replace')!r} (token {token})"

    count = len(receipt.tokens)
    if difference.what == "end":
        return f"differs: the {count} tokens are the same, but the end is not: {receipt.finish_reason!r} in the receipt"
    if difference.what == "text":
        return (
            f"differs: the {count} tokens are the same, but the receipt has another text, SHA-256 {receipt.text_sha256}"
        )
    line = (
        f"differs: {difference.index} of {count} tokens are the same, then comes {spelled(difference.receipt)} "
        f"in the receipt and {spelled(difference.here)} here"
    )
    if not math.isnan(difference.gap):
        line += f"; the model's log-probabilities of the two are {abs(difference.gap):.2g} apart"
    return line
