"""`pystaged generate`: continue a prompt."""

from __future__ import annotations

from pathlib import Path

import typer

from pystaged.cli.options import LIMIT_HELP, MODEL_OPTION, OF_LOADING, OF_TEXTS, SHOWN, Given, Json, option, takes
from pystaged.options.table import SAMPLING, TEXT


@takes(
    SHOWN | OF_TEXTS | SAMPLING | OF_LOADING,
    max_tokens={"help": f"{LIMIT_HELP}; 128 unless given, 2048 with --chat."},
    speculate={"default": True},
    logprobs={"help": f"With --json. {TEXT['logprobs'].help}"},
)
def generate(
    prompt: str | None = typer.Argument(None, metavar="PROMPT", help="Text to continue; - reads standard input."),
    *,
    prompts: Path | None = option(
        None,
        "Continue the prompts of a file or - for standard input: one per line, in a .jsonl file an object with a "
        "'prompt' or, for --chat, 'messages'.",
    ),
    n: int | None = option(None, "Texts per prompt, with consecutive seeds (-n is --max-tokens).", "--n", min=1),
    model: str | None = MODEL_OPTION,
    chat: bool = option(
        False, "Answer the prompt, after what is piped in, as a question, with the model's chat template.", "--chat"
    ),
    suffix: str = option(
        "", "Write the text between the prompt and this, with a model trained for it, such as Qwen2.5-Coder."
    ),
    given: Given,
    verbose: bool = option(False, "Show statistics of each stage.", "--verbose", "-v"),
    as_json: Json = False,
    receipt: Path | None = option(
        None, "Write a receipt, with which `pystaged verify` generates the text again and compares.", metavar="FILE"
    ),
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
        "give a prompt, - for standard input, or --prompts with a file of them": prompt is None and prompts is None,
        "a prompt and --prompts cannot both be given": prompt is not None and prompts is not None,
        "--color and --show-tree show one text, not several": many and (given.paints or given["show_tree"]),
        "--receipt saves one text, not several; in Python each result has a receipt: result.receipt": many and receipt,
        "--system and --think are for --chat": not chat and (given["system"] or "think" in given),
        "--suffix is for prompts that are continued, not for --chat": chat and suffix,
        "--logprobs needs --json": "logprobs" in given and not as_json,
        "--receipt names a file; standard output has the text": receipt == Path("-"),
    }
    if wrong := [words for words, is_so in refused.items() if is_so]:
        raise typer.BadParameter("; ".join(wrong))
    from pystaged.cli.texts import write  # noqa: PLC0415  help must not wait for what a run imports

    write(given, model, prompt, prompts, n, suffix, receipt, verbose, as_json, chat)
