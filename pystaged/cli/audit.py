"""`pystaged audit`, the former name of `pystaged verify --by-row`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pystaged.cli.console import open_engine, read_prompt, report
from pystaged.cli.options import MODEL_HELP, LoadOptions, MaxTokens, SamplingOptions, grouped, usage
from pystaged.cli.verify import replayed
from pystaged.config import GenerationConfig


@grouped
def audit(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from standard input.")],
    loading: LoadOptions,
    sampling: SamplingOptions,
    output: Annotated[
        Path | None, typer.Option(help="Output of `generate --json` for that prompt; generated now if not given.")
    ] = None,
    max_tokens: MaxTokens = 128,
) -> None:
    """Compare each token of a text with the model's choice when it evaluates one row at a time.

    This command will be removed in the next release; `generate --receipt` and `verify --by-row` do the same.
    """
    with usage():
        config = sampling.config()
        GenerationConfig(max_tokens=max_tokens, sampling=config)
    prompt = read_prompt(prompt)
    report("pystaged audit will be removed in the next release: use generate --receipt FILE and verify FILE --by-row")
    with open_engine(model, loading) as engine:
        tokens = _tokens(output) if output else engine.generate(prompt, max_tokens=max_tokens, sampling=config).tokens
        said, is_same = replayed(engine, engine.tokenizer.encode(prompt).tolist(), tokens, config)
    typer.echo(said)
    raise typer.Exit(0 if is_same else 1)


def _tokens(path: Path) -> list[int]:
    try:
        tokens = json.loads(path.read_text("utf-8"))["tokens"]
        if not all(isinstance(token, int) for token in tokens):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not output of `pystaged generate --json`") from None
    return list(tokens)
