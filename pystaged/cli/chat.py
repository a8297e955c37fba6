"""`pystaged chat`: a conversation with a model."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from pystaged.cli import options
from pystaged.cli.options import MODEL_ARGUMENT, MODEL_TOO, Given, either, one_of, option
from pystaged.options.table import SAMPLING, TEXT, Option
from pystaged.platform.files import expanded

_OVERFLOW = Option("drop", "In a full context: forget the oldest turns, or stop the conversation.", type=str)
_STATS = Option(
    False, "Show answers' speed and gain over plain decoding.", flags=("--stats/--no-stats", "--verbose"), type=bool
)


@options.takes(
    options.SHOWN
    | {name: TEXT[name] for name in ("max_tokens", "stop", "stop_loops", *options.GRAMMARS)}
    | SAMPLING
    | {"context_overflow": _OVERFLOW, "stats": _STATS, **options.OF_LOADING},
    context_overflow={"metavar": "drop|stop"} | one_of("drop", "stop"),
    max_tokens={"help": f"{options.LIMIT_HELP}; 2048 unless given.", "callback": None, "show_default": False},
)
def chat(
    model: str | None = MODEL_ARGUMENT,
    question: str | None = typer.Argument(
        None, help="Answer this, after what is piped in, and leave; - reads it from standard input.", metavar="QUESTION"
    ),
    *,
    named: str | None = MODEL_TOO,
    resume: Path | None = option(
        None, "Continue a conversation saved with /save; with --prompt-cache it is not read again.", metavar="FILE"
    ),
    given: Given,
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

    converse(either(model, named), question, given, resume)
