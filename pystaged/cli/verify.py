"""`pystaged verify`: generate a receipt's text again and compare."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import pystaged
from pystaged.backends.audit import audit
from pystaged.backends.devices import open_session
from pystaged.chain import Chain
from pystaged.cli.console import draft_name, model_name, report, words
from pystaged.cli.options import Threads, check_device
from pystaged.config import SamplingConfig
from pystaged.kept_texts import text_of
from pystaged.loading import names
from pystaged.loading.seen import SeenModel
from pystaged.receipt import Receipt, text_hash
from pystaged.repeating import Difference, check_model, find_model, promise
from pystaged.sampling import bind


def verify(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Receipts written by `generate --receipt`, texts that tests keep, or chains of receipts.",
            metavar="FILE...",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model, if it is not found by its hash in the package or the cache.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Decode without drafting: the same text, only slower.")
    ] = False,
    by_row: Annotated[
        bool,
        typer.Option(
            "--by-row",
            help="Instead evaluate the receipt's tokens one row at a time, and compare each with the model's "
            "choice: for devices that round differently in larger passes.",
        ),
    ] = False,
    draft: Annotated[str, typer.Option(help="Draft, as in generate.")] = "auto",
    device: Annotated[
        str, typer.Option(help="Device of the model; only cpu guarantees the same text.", callback=check_device)
    ] = "cpu",
    threads: Threads = 0,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Texts of a chain to verify; all by default.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed that draws the sample; by default a new one.", show_default=False)
    ] = None,
) -> None:
    """Generate the texts of receipts again on this machine, and compare.

    Prints "same"; otherwise where and how much a text differs, and exits with status 1.
    A model is only downloaded if --model is a hub id.

    Example: pystaged generate "def fibonacci(n):" --receipt text.receipt && pystaged verify text.receipt

    Example: pystaged verify text.receipt --by-row --device metal

    Example: pystaged verify evaluation.chain --sample 20
    """
    seed_used = secrets.randbits(32) if seed is None else seed
    failed, num_checked = False, 0
    with _Verifier(model, draft, device, threads, plain, by_row) as verifier:
        for file in files:
            name = f"{file}: " if len(files) > 1 else ""
            num_checked += 1
            try:
                chain = Chain.load(file)
                if chain is not None:
                    failed |= not verifier.chain(chain, sample, seed_used, name)
                    continue
                kept = text_of(file)
                if kept is not None and not kept[1] and len(files) > 1:
                    report(f"not checked: {file} has no receipt, because the model did not write exactly that text")
                    num_checked -= 1
                    continue
                if sample is not None or seed is not None:
                    raise typer.BadParameter(f"--sample and --seed are for receipt chains; {file} is none")
                failed |= not verifier.file(file, name, kept[0] if kept else None)
            except (OSError, ValueError) as error:
                if len(files) == 1:
                    raise
                said = words(error)
                report(f"error: {said if str(file) in said else name + said}")
                failed = True
    raise typer.Exit(1 if failed or not num_checked else 0)


class _Verifier:
    """Repeats texts of receipts, with one engine at a time."""

    def __init__(self, model: str | None, draft: str, device: str, threads: int, plain: bool, by_row: bool) -> None:
        self._model, self._draft, self._device, self._threads = model, draft, device, threads
        self._plain, self._by_row = plain, by_row
        self._engine: pystaged.Engine | None = None
        self._loaded: tuple[str, int, str] | None = None  # what the engine was loaded for
        self._told: set[str] = set()

    def __enter__(self) -> _Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._loaded = None

    def file(self, file: Path, name: str, kept: str | None) -> bool:
        """Print whether a receipt's text is the same; returns it. name: before each line. kept: the text that a test
        keeps with this receipt."""
        expected = Receipt.load(file)
        said, is_same = self._text(expected)
        typer.echo(name + said)
        if kept is not None and text_hash(kept) != expected.text_sha256:
            typer.echo(f"{name}the kept text is what an application made of this one, which is not checked")
        return is_same

    def chain(self, chain: Chain, sample: int | None, seed: int, name: str) -> bool:
        """Print which texts of a chain differ or cannot be verified; returns whether all are the same."""
        typer.echo(f"{name}chain of {chain.count} texts, SHA-256 {chain.sha256}")
        positions = chain.sample(sample, seed)
        if len(positions) < chain.count:
            typer.echo(f"{name}sample of {len(positions)}, drawn with seed {seed}")
        failed = differ = 0

        def cannot(_: int, error: OSError | ValueError) -> None:
            nonlocal failed
            failed += 1
            report(f"{name}not verified: {words(error)}")

        for position, expected in chain.receipts(positions, cannot):
            try:
                said, is_same = self._text(expected)
            except (OSError, ValueError) as error:
                cannot(position, ValueError(f"line {position + 2}: {words(error)}"))
                continue
            if not is_same:
                differ += 1
                typer.echo(f"{name}text {position + 1}: {said}")
        count = len(positions)
        for what, number in (("not verified", failed), ("differ", differ)):
            if number:
                typer.echo(f"{name}{what}: {number} of {count} texts")
        if not failed and not differ:
            typer.echo(f"{name}same: {count} texts")
        return not failed and not differ

    def _text(self, expected: Receipt) -> tuple[str, bool]:
        """Whether a text is the same: in words, and as a bool. Raises as pystaged.load and pystaged.repeat."""
        if self._by_row and expected.config.grammar is not None:
            raise typer.BadParameter("--by-row cannot check the text of a schema, expression or grammar")
        engine = self._engine_for(expected)
        said = promise(expected, self._device)
        if said and said not in self._told:
            self._told.add(said)
            report(said)
        if self._by_row:
            return replayed(engine, expected.prompt, expected.tokens, expected.config.sampling)
        difference = pystaged.repeat(engine, expected, speculate=not self._plain)
        if difference is not None:
            return _words(difference, expected, engine), False
        count, ended = len(expected.tokens), expected.finish_reason
        return f"same: {count} tokens, ended by {ended}, text with SHA-256 {expected.text_sha256}", True

    def _engine_for(self, expected: Receipt) -> pystaged.Engine:
        """The last engine if it has what the receipt needs, else another."""
        needed = expected.model.sha256, expected.n_ctx, expected.kv
        if self._engine is None or self._loaded != needed:
            path = _model_of(expected, self._model)
            self.__exit__()
            self._engine = pystaged.load(
                "bundled" if path == names.resolve("bundled") else path,  # by this name its draft is loaded, too
                draft=draft_name(self._draft),
                device=self._device,
                num_threads=self._threads,
                n_ctx=expected.n_ctx,
                kv=expected.kv,
                recycle=False,
                report=report,
            )
            self._loaded = needed
        return self._engine


def _model_of(expected: Receipt, model: str | None) -> Path:
    """The file of a receipt's model. Raises FileNotFoundError, ValueError."""
    path = find_model(expected) if model is None else names.resolve(model_name(model))
    if path is None:
        record = expected.model
        raise FileNotFoundError(
            f"no model here has the receipt's SHA-256 {record.sha256}; its model was {record.file} ({record.name}), "
            f"{record.size} bytes; pass its file with --model"
        )
    check_model(expected, SeenModel.now(path))
    return path


def replayed(
    engine: pystaged.Engine, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingConfig
) -> tuple[str, bool]:
    """Whether each token is the model's choice when it evaluates one row at a time: in words, and as a bool."""
    with closing(open_session(engine.model)) as session:
        found = audit(session, np.asarray(prompt, np.int32), tokens, bind(sampling, engine.tokenizer, len(prompt)))
    if found is None:
        return f"{len(tokens)} tokens, each the model's own choice when evaluated alone", True
    emitted, chosen = (
        repr(engine.tokenizer.token_bytes(token).decode("utf-8", "replace"))
        for token in (found.emitted, found.replayed)
    )
    return (
        f"token {found.index + 1} of {len(tokens)} differs: {emitted} was written, {chosen} is chosen when "
        f"evaluated alone; there the two best tokens are {found.gap:.2g} apart (log p)"
    ), False


def _words(difference: Difference, receipt: Receipt, engine: pystaged.Engine) -> str:
    """Where and how far the texts differ."""

    def spelled(token: int | None) -> str:
        if token is None:
            return "the end"
        if token >= engine.tokenizer.num_tokens:
            return f"token {token}, which the model lacks,"
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
