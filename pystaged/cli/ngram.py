"""`pystaged ngram`: build tables of n-grams."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray

import pystaged
from pystaged import _core
from pystaged.cli.command import Command, Group
from pystaged.cli.console import model_name, progress_bars, report
from pystaged.cli.options import MODEL_ARGUMENT, MODEL_TOO, Threads, either, option
from pystaged.distill.samples import sampled_texts
from pystaged.drafting.table import MOST_TOKENS, NgramTable, OtherVocabularyError
from pystaged.loading import names
from pystaged.loading.tables import table_path
from pystaged.platform.files import writable

app = typer.Typer(cls=Group, help="Build tables of n-grams to draft from.", no_args_is_help=True)


@app.command(cls=Command)
def build(
    model: str | None = MODEL_ARGUMENT,
    *,
    named: str | None = MODEL_TOO,
    out: Path | None = option(None, "File to write; by default beside the model's file, where generate finds it."),
    tokens: int = option(
        1_000_000, "Tokens to sample; SmolLM2 writes half a million an hour on two cores.", min=1, max=MOST_TOKENS
    ),
    temperature: float | None = option(None, "Sampling temperature.", min=0.01, show_default="1.5, of chat models 1"),
    seed: int = option(0, "Same seed, same table.", callback=None, min=0, max=2**32 - 1),
    threads: Threads = 0,
) -> None:
    """Sample text from a model and count its n-grams, to draft for a model with the same vocabulary. Ctrl-C ends the
    sampling early and counts the text so far. An existing table that counts at least twice --tokens is not replaced.

    A model with a chat template asks itself questions and answers them; every second answer is greedy.

    Example: pystaged ngram build draft.gguf
    """
    name = either(model, named, "whose text is counted")
    if out is None and name in names.PACKAGED:
        raise typer.BadParameter(f"the folder of {name} belongs to a package; name a file of your own with --out")
    path = names.resolve(model_name(name))
    target = writable(out, table_path(path))
    tokenizer = _core.Tokenizer(os.fsencode(path))
    before = _counted(target, tokenizer.fingerprint)
    if before >= 2 * tokens:
        raise ValueError(
            f"{target} was counted on {before} tokens, not {tokens}; name another file with --out, or remove it"
        )
    sampled, left = list[NDArray[np.int32]](), tokens
    try:
        with (
            pystaged.load(path, draft=None, recycle=False, num_threads=threads, report=report) as engine,
            closing(sampled_texts(engine, temperature, seed)) as texts,
            progress_bars("{task.completed} of {task.total} tokens") as progress,
        ):
            report(f"sampling {tokens} tokens; SmolLM2 writes half a million an hour on two cores, larger models fewer")
            progress("sampling", 0, tokens)
            for text in texts:
                sampled.append(text[:left])
                left -= len(sampled[-1])
                progress("sampling", tokens - left, tokens)
                if not left:
                    break
    except KeyboardInterrupt:
        if not any(map(len, sampled)):
            raise
    table = NgramTable.build(sampled, vocab_size=tokenizer.num_tokens, vocab_hash=tokenizer.fingerprint)
    if before > table.num_tokens:
        report(f"{target} is kept: it was counted on {before} tokens, and only {table.num_tokens} are sampled so far")
        raise typer.Exit(130)
    table.save(target)
    report(f"{table.num_tokens} tokens counted, {target.stat().st_size / 1e6:.2f} MB in {target}")
    report(f"it is for targets with exactly this vocabulary: when {path.name} drafts, or n-grams draft for it")
    if target != table_path(path).resolve():
        report(f"to be found without being named it must lie at {table_path(path)}")
    if left:
        report("stopped early: the table counts the texts until then")
        raise typer.Exit(130)


def _counted(path: Path, vocabulary: str) -> int:
    """The number of tokens that a file's table was counted on, 0 for no file. Raises ValueError for any other file."""
    try:
        return NgramTable.load(path, vocab_hash=vocabulary).num_tokens if path.exists() else 0
    except OtherVocabularyError:
        raise
    except ValueError as error:
        raise ValueError(f"{path} is no n-gram table; remove it, or name another file with --out") from error
