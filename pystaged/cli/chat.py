"""`pystaged chat`: a conversation with a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from pystaged.cli.options import (
    GRAMMARS,
    LIMIT_HELP,
    OF_LOADING,
    SHOWN,
    Given,
    ModelArgument,
    ModelToo,
    either,
    one_of,
    takes,
)
from pystaged.options.table import SAMPLING, TEXT, Option
from pystaged.platform.files import expanded

_OVERFLOW = Option("drop", "In a full context: forget the oldest turns, or stop the conversation.", type=str)


@takes(
    SHOWN
    | {name: TEXT[name] for name in ("max_tokens", "stop", "stop_loops", *GRAMMARS)}
    | SAMPLING
    | {"context_overflow": _OVERFLOW, **OF_LOADING},
    context_overflow={"metavar": "drop|stop"} | one_of("drop", "stop"),
    max_tokens={"help": f"{LIMIT_HELP}; 2048 unless given.", "callback": None, "show_default": False},
)
def chat(
    model: ModelArgument = None,
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="QUESTION", help="Answer this, after what is piped in, and leave; - reads it from standard input."
        ),
    ] = None,
    *,
    named: ModelToo = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Continue a conversation saved with /save; with --prompt-cache it is not read again."
        ),
    ] = None,
    given: Given,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats/--no-stats",
            "--verbose",
            help="Show after each answer its speed, and how much faster than plain decoding it was.",
        ),
    ] = False,
) -> None:
    """Chat with a model, using its chat template. The model stays loaded; each turn evaluates new tokens only.

    The model is smollm2 unless you name another, and sampling is what its makers recommend. Piped input is one
    question.

    Example: pystaged chat smollm2 "Why is the sky blue?"

    Example: pystaged chat smollm2 --temperature 0.7 --top-p 0.9

    Example: pystaged chat smollm2 --system "Answer in one sentence." < question.txt

    Example: pystaged chat smollm2 --system @instructions.txt
    """
    if named is not None and question is None:
        model, question = None, model
    alone = model if named is None and question is None else None
    if alone and re.search(r"[ ?!]|^-$", alone) and not expanded(alone).exists():
        raise typer.BadParameter(f"{model!r} is no model; a question comes after one: chat smollm2 {model!r}")
    from pystaged.cli.turns import converse  # noqa: PLC0415  help must not wait for what a run imports

    converse(either(model, named), question, given, resume, stats=stats)
