"""`pystaged generate`: continue a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pystaged.cli.options import LIMIT_HELP, OF_LOADING, OF_TEXTS, SHOWN, Given, Json, ModelName, at_least, takes
from pystaged.options.table import SAMPLING, TEXT


@takes(
    SHOWN | OF_TEXTS | SAMPLING | OF_LOADING,
    max_tokens={"help": f"{LIMIT_HELP}; 128 unless given, 2048 with --chat."},
    speculate={"default": True},
    logprobs={"help": f"With --json. {TEXT['logprobs'].help}"},
)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads it from standard input.")] = None,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Continue the prompts of a file or - for standard input: one per line, in a .jsonl file an object "
            "with a 'prompt' or, for --chat, 'messages'."
        ),
    ] = None,
    n: Annotated[
        int | None, at_least(1, "Number of texts per prompt, with consecutive seeds (-n is --max-tokens).", "--n")
    ] = None,
    model: ModelName = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Answer the prompt, after what is piped in, as a question, with the model's chat template."
        ),
    ] = False,
    suffix: Annotated[
        str,
        typer.Option(
            help="Write the text between the prompt and this, with a model trained for it, such as Qwen2.5-Coder."
        ),
    ] = "",
    given: Given,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show statistics of each stage.")] = False,
    as_json: Json = False,
    receipt: Annotated[
        Path | None,
        typer.Option(
            help="Write a receipt, with which `pystaged verify FILE` generates the text again and compares.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Continue a prompt, or several at once.

    The text goes to standard output, everything else to standard error. Several texts come in order, each under a line
    that names it; with --json each is an object on a line of its own.

    Example: pystaged generate "def fibonacci(n):" --max-tokens 64

    Example: pystaged generate "def fibonacci(n):" --color stages --show-tree

    Example: pystaged generate --chat "Why is the sky blue?" --model smollm2

    Example: pystaged generate --chat "Invent a person." --json-schema person.json --model smollm2

    Example: pystaged generate --prompts prompts.txt --n 4 --temperature 1 --json > texts.jsonl

    Example: pystaged generate "def fibonacci(n):" --receipt fibonacci.receipt

    Example: pystaged generate - --temperature 0.8 --top-p 0.95 --seed 7 < prompt.txt > text.txt
    """
    many = prompts is not None or n is not None
    refused: dict[str, object] = {
        "give a prompt, - for standard input, or --prompts with a file of them": (prompt is None) == (prompts is None),
        "--color and --show-tree show one text, not several": many and (given.paints or given["show_tree"]),
        "--receipt saves one text, not several; in Python each result has a receipt: result.receipt": many and receipt,
        "--system and --think are for --chat": not chat and (given["system"] or "think" in given),
        "--suffix is for prompts that are continued, not for --chat": chat and suffix,
        "--logprobs needs --json": "logprobs" in given and not as_json,
        "--receipt names a file; standard output has the text": receipt == Path("-"),
    }
    for words, is_so in refused.items():
        if is_so:
            raise typer.BadParameter(words)
    from pystaged.cli.texts import write  # noqa: PLC0415  help must not wait for what a run imports

    write(given, model, prompt, prompts, n, suffix, receipt, verbose, as_json, chat)
