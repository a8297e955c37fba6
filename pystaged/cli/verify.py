"""`pystaged verify`: generate a receipt's text again and compare."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

import typer

import pystaged
from pystaged.cli.console import complain, model_name, open_engine, report, words
from pystaged.cli.options import Given, Threads, check_device, option
from pystaged.loading import names
from pystaged.platform.seen import SeenModel
from pystaged.receipts.receipt import Receipt, kept_text, text_hash
from pystaged.receipts.repeating import check_model, described, find_model, promise


def verify(
    files: list[Path] = typer.Argument(
        help="Receipts written by `generate --receipt`, or texts that tests keep.", metavar="FILE"
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
                kept = kept_text(file)
                if kept is not None and kept.get("receipt") is None and len(files) > 1:
                    report(f"not checked: {file} has no receipt, because the model did not write exactly that text")
                    continue
                expected = Receipt.load(file)
                if loaded is None or loaded != needs[file]:
                    loaded = None
                    stack.close()
                    path = find_model(expected) if model is None else names.resolve(model_name(model))
                    check_model(expected, SeenModel.now(path))
                    given = Given(draft=draft, device=device, num_threads=threads, recycle=False)
                    given.update(n_ctx=expected.n_ctx, kv=expected.kv)
                    bundled = path == names.resolve("bundled")  # by this name its draft is loaded, too
                    engine = stack.enter_context(open_engine("bundled" if bundled else str(path), given))
                    loaded = needs[file]
                if (said := promise(expected, device)) and said not in told:
                    told.add(said)
                    report(said)
                difference = pystaged.repeat(engine, expected, speculate=not plain)
                typer.echo(name + described(difference, expected, engine.tokenizer))
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
