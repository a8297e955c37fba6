"""`pystaged verify`: generate a receipt's text again and compare."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import typer

import pystaged
from pystaged.cli.console import complain, draft_name, model_name, report, words
from pystaged.cli.options import Threads, check_device, option
from pystaged.loading import names
from pystaged.platform.files import read_small
from pystaged.platform.seen import SeenModel
from pystaged.receipts.receipt import KEPT_TEXT, MOST_BYTES, Receipt, text_hash
from pystaged.receipts.repeating import Difference, check_model, find_model, promise


def verify(
    files: list[Path] = typer.Argument(
        help="Receipts written by `generate --receipt`, or texts that tests keep.", metavar="FILE..."
    ),
    model: str | None = option(None, "The model, if it is not found here by its hash.", "--model", "-m", callback=None),
    plain: bool = option(False, "Decode without drafting: the same text, only slower.", "--plain"),
    draft: str = option("auto", "Draft, as in generate.", callback=None),
    device: str = option("cpu", "Device of the model; only cpu guarantees the same text.", callback=check_device),
    threads: Threads = 0,
) -> None:
    """Generate the texts of receipts again on this machine, and compare.

    Prints "same"; otherwise where and how much a text differs, and exits with status 1.
    A model is only downloaded if --model is a hub id.

    Example: pystaged generate "def fibonacci(n):" --receipt text.receipt && pystaged verify text.receipt
    """
    failed, told = False, set[str]()
    loaded: tuple[str, int, str] | None = None  # what the engine was chosen by
    needs = {file: _needs(file) for file in files}
    with ExitStack() as stack:
        for file in sorted(files, key=lambda file: [*needs.values()].index(needs[file])):  # each model is loaded once
            name = f"{file}: " if len(files) > 1 else ""
            try:
                kept = _kept(file)
                if kept is not None and kept.get("receipt") is None and len(files) > 1:
                    report(f"not checked: {file} has no receipt, because the model did not write exactly that text")
                    continue
                expected = Receipt.load(file)
                if loaded is None or loaded != needs[file]:
                    loaded = None
                    stack.close()
                    engine = stack.enter_context(_load(expected, model, draft, device, threads))
                    loaded = needs[file]
                if (said := promise(expected, device)) and said not in told:
                    told.add(said)
                    report(said)
                difference = pystaged.repeat(engine, expected, speculate=not plain)
                typer.echo(name + _words(difference, expected, engine))
                if kept is not None and text_hash(kept["text"]) != expected.text_sha256:
                    typer.echo(f"{name}the kept text is what an application made of this one, which is not checked")
                failed |= difference is not None
            except (OSError, ValueError) as error:
                if len(files) == 1:
                    raise
                said = words(error)
                complain(said if str(file) in said else name + said)
                failed = True
    raise typer.Exit(1 if failed or loaded is None else 0)


def _needs(file: Path) -> tuple[str, int, str] | None:
    """What the engine of a receipt is chosen by; None for a file without one."""
    with suppress(OSError, ValueError):
        receipt = Receipt.load(file)
        return receipt.model.sha256, receipt.n_ctx, receipt.kv
    return None


def _kept(file: Path) -> dict[str, Any] | None:
    """The members of a file that the plugin for pytest keeps, None for another one."""
    with suppress(OSError, ValueError, RecursionError):
        kept = json.loads(read_small(file, MOST_BYTES))
        if isinstance(kept, dict) and kept.get("format") == KEPT_TEXT and isinstance(kept.get("text"), str):
            return kept
    return None


def _load(expected: Receipt, model: str | None, draft: str, device: str, threads: int) -> pystaged.Engine:
    """The engine that a receipt needs. Raises FileNotFoundError, ValueError."""
    path = find_model(expected) if model is None else names.resolve(model_name(model))
    if path is None:
        record = expected.model
        raise FileNotFoundError(
            f"no model here has the receipt's SHA-256 {record.sha256}; its model was {record.file} ({record.name}), "
            f"{record.size} bytes; pass its file with --model"
        )
    check_model(expected, SeenModel.now(path))
    return pystaged.load(
        "bundled" if path == names.resolve("bundled") else path,  # by this name its draft is loaded, too
        draft=draft_name(draft),
        device=device,
        num_threads=threads,
        n_ctx=expected.n_ctx,
        kv=expected.kv,
        recycle=False,
        report=report,
    )


def _words(difference: Difference | None, receipt: Receipt, engine: pystaged.Engine) -> str:
    """That the texts are the same, or where and how far they differ."""

    def spelled(token: int | None) -> str:
        if token is None:
            return "the end"
        if token >= engine.tokenizer.num_tokens:
            return f"token {token}, which the model lacks,"
        return f"{engine.tokenizer.token_bytes(token, True).decode('utf-8', 'replace')!r} (token {token})"

    count = len(receipt.tokens)
    if difference is None:
        return f"same: {count} tokens, ended by {receipt.finish_reason}, text with SHA-256 {receipt.text_sha256}"
    if difference.what in ("end", "text"):
        theirs = repr(receipt.finish_reason) if difference.what == "end" else f"SHA-256 {receipt.text_sha256}"
        return f"differs: the {count} tokens are the same, but not the {difference.what}: {theirs} in the receipt"
    line = (
        f"differs: {difference.index} of {count} tokens are the same, then comes {spelled(difference.receipt)} "
        f"in the receipt and {spelled(difference.here)} here"
    )
    if not math.isnan(difference.gap):
        line += f"; the model's log-probabilities of the two are {abs(difference.gap):.2g} apart"
    return line
