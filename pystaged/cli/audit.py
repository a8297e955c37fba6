"""`pystaged audit`: replay a text row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pystaged.backends.audit import audit as replay
from pystaged.backends.devices import open_session
from pystaged.cli.console import open_engine, read_prompt
from pystaged.cli.options import LoadOptions, MaxTokens, SamplingOptions, grouped, usage
from pystaged.config import GenerationConfig
from pystaged.sampling import bind


@grouped
def audit(
    model: Annotated[str, typer.Argument(help="Path of a GGUF file, name in the cache, hub id, 'smollm2' or 'house'.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from standard input.")],
    loading: LoadOptions,
    sampling: SamplingOptions,
    output: Annotated[
        Path | None, typer.Option(help="What `generate --json` printed for that prompt; by default it is made now.")
    ] = None,
    max_tokens: MaxTokens = 128,
) -> None:
    """Check each token of an output against what the model chooses when it evaluates one row at a time.

    Reports the first difference and the gap between the two best tokens there; leaves with status 1 if there is one.

    Example: pystaged audit path/to/model.gguf --device metal --prompt "def fibonacci(n):"
    """
    with usage():
        config = sampling.config()
        GenerationConfig(max_tokens=max_tokens, sampling=config)
    prompt = read_prompt(prompt)
    with open_engine(model, loading) as engine:
        tokens = _tokens(output) if output else engine.generate(prompt, max_tokens=max_tokens, sampling=config).tokens
        session = open_session(engine.model)
        begun = engine.tokenizer.encode(prompt)
        difference = replay(session, begun, tokens, bind(config, engine.tokenizer, len(begun)))
        session.close()
        if difference is None:
            typer.echo(f"{len(tokens)} tokens, each the model's own choice when evaluated alone")
            return
        emitted, replayed = (
            repr(engine.tokenizer.token_bytes(token).decode("utf-8", "replace"))
            for token in (difference.emitted, difference.replayed)
        )
    typer.echo(
        f"token {difference.index + 1} of {len(tokens)} differs: {emitted} was written, {replayed} is chosen when "
        f"evaluated alone; there the two best tokens are {difference.gap:.2g} apart (log p)"
    )
    raise typer.Exit(1)


def _tokens(path: Path) -> list[int]:
    try:
        tokens = json.loads(path.read_text("utf-8"))["tokens"]
        if not all(isinstance(token, int) for token in tokens):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not what `pystaged generate --json` prints") from None
    return list(tokens)
