"""`pystaged generate`: continue a prompt."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import pystaged
from pystaged.batch import results
from pystaged.cli.console import errors, open_engine, read_prompt, reading_bar, report
from pystaged.cli.options import (
    Color,
    Colors,
    FormOptions,
    Json,
    LoadOptions,
    ModelName,
    SamplingOptions,
    ShowTree,
    System,
    Think,
    check,
    grouped,
)
from pystaged.cli.painting import show, summary
from pystaged.config import GenerationConfig
from pystaged.engine import Prompt
from pystaged.files import read_small
from pystaged.result import GenerationResult
from pystaged.streams import Stream, Writer

_SHOWN = 40  # characters of a prompt
_MOST_BYTES = 1 << 26  # of a file of prompts


@grouped
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from standard input.", show_default=False)
    ] = None,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Continue the prompts of a file: one per line, in a .jsonl file an object with a 'prompt'."),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, help="Texts of each prompt, with one seed after the other; -n is --max-tokens."),
    ] = None,
    model: ModelName = "house",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="New tokens at most; 128, or with --chat what has room.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask the prompt, by the model's chat template.")] = False,
    system: System = "",
    think: Think = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; may be repeated.", callback=check)
    ] = None,
    form: FormOptions,
    sampling: SamplingOptions,
    loading: LoadOptions,
    speculate: Annotated[bool, typer.Option(help="Draft; the text is the same without, only slower.")] = True,
    color: Colors = Color.NONE,
    show_tree: ShowTree = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what each stage did.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt, or several at once.

    The text goes to standard output, everything else to standard error. Several texts come in order, each under a line
    that names it; with --json each is an object on a line of its own.

    Example: pystaged generate "def fibonacci(n):" --max-tokens 64

    Example: pystaged generate "def fibonacci(n):" --color stages --show-tree

    Example: pystaged generate --chat "Why is the sky blue?" --model smollm2

    Example: pystaged generate --chat "Invent a person." --json-schema person.json --model smollm2

    Example: pystaged generate --prompts prompts.txt --n 4 --temperature 1 --json > texts.jsonl

    Example: pystaged generate - --temperature 0.8 --top-p 0.95 --seed 7 < prompt.txt > text.txt
    """
    # Before a model is loaded, which may take a while.
    config = GenerationConfig(
        max_tokens=128 if max_tokens is None else max_tokens,
        stop=stop or (),
        speculate=speculate,
        sampling=sampling.config(),
        **form.options(),
    )
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give either a prompt or --prompts with a file of them")
    several = prompts is not None or n is not None
    if several and (color is not Color.NONE or show_tree):
        raise typer.BadParameter("--color and --show-tree show one text, not several")
    if not chat and (system or think is not None):
        raise typer.BadParameter("--system and --think are for --chat")
    texts = [read_prompt(prompt or "")] if prompts is None else _read_prompts(prompts)
    with open_engine(model, loading) as engine:
        asked: list[Prompt] = [*texts]
        if chat:
            asked = [_question(engine, text, system, think) for text in texts]
            room = engine.n_ctx if max_tokens is None else max_tokens
            config = replace(config, max_tokens=room, stop=(*config.stop, *engine.chat_format.stop))
        if several:
            named = [text for text in texts for _ in range(n or 1)]
            found = results(engine, asked, config, n or 1)
            _write_several(engine, named, found, as_json=as_json, verbose=verbose)
            return
        with reading_bar() as progress:
            stream = Stream(Writer(engine, asked[0], replace(config, progress=progress)))
            result = stream.finish() if as_json else show(stream, engine.tokenizer, color, show_tree=show_tree)
    if as_json:
        typer.echo(json.dumps(_fields(result)))
        return
    errors.print(summary(result.stats, color))
    if verbose:
        errors.print(stats_table(result.stats))
        read = result.stats.prompt_tokens - result.stats.reused_tokens
        report(f"read {read} tokens of the prompt in {result.stats.prefill_seconds:.2f} seconds; seed {result.seed}")


def _question(engine: pystaged.Engine, text: str, system: str, think: bool | None) -> Prompt:
    """What the model reads when a text is asked."""
    begun = [{"role": "system", "content": system}] if system else []
    options = {} if think is None else {"enable_thinking": think}
    return engine.chat_format.encode([*begun, {"role": "user", "content": text}], template_options=options)


def _write_several(
    engine: pystaged.Engine,
    prompts: Sequence[str],
    found: Generator[GenerationResult, None, None],
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    """Write a text of each prompt, in order and as soon as each is there."""
    begin, number, tokens = time.monotonic(), 0, 0
    with closing(found):
        for number, (prompt, result) in enumerate(zip(prompts, found, strict=True), 1):
            tokens += len(result.tokens)
            if as_json:
                typer.echo(json.dumps({"prompt": prompt, **_fields(result)}))
            else:
                typer.echo(f"==> {number}: {_begin(prompt)}, seed {result.seed} <==\n{result.text}\n")
            sys.stdout.flush()
    if as_json:
        return
    seconds = time.monotonic() - begin
    report(f"{number} texts, {tokens} tokens in {seconds:.1f} seconds, {tokens / seconds:.1f} per second together")
    if verbose:
        passes = engine.passes
        report(
            f"{passes.passes} passes of the target in {passes.seconds:.2f} seconds; each for "
            f"{passes.texts_per_pass:.1f} texts and of {passes.rows_per_pass:.1f} rows, in the mean; "
            f"{passes.guess_share:.0%} of these were guesses"
        )


def _read_prompts(path: Path) -> list[str]:
    """The prompts of a file.

    Raises:
        ValueError: there are none, or a line is no prompt.
    """
    if path.suffix == ".jsonl":
        from pystaged.bench.pairs import load_prompts  # noqa: PLC0415

        found = load_prompts(path)
    else:
        lines = read_small(path, _MOST_BYTES).decode().replace("\r\n", "\n").split("\n")
        found = [line for line in lines if line]
    if not found:
        raise ValueError(f"{path} has no prompts")
    return found


def _begin(prompt: str) -> str:
    """A prompt on a part of a line."""
    return repr(prompt if len(prompt) <= _SHOWN else prompt[:_SHOWN] + "...")


def _fields(result: GenerationResult) -> dict[str, Any]:
    """A result, for JSON."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "stages": [stage.name.lower() for stage in result.stages],
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "stats": result.stats.to_dict(),
    }


def stats_table(stats: pystaged.GenerationStats) -> Table:
    """What each stage did for a text."""
    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "drafted", "accepted", "emitted", "passes", "seconds"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name, stage in stats.stages.items():
        if name == "grammar" and not stage.drafted:
            continue
        work = stats.drafters.get(name)
        passes = stats.steps if name == "target" else work.passes if work else 0
        seconds = stats.target_seconds if name == "target" else work.seconds if work else 0.0
        table.add_row(name, str(stage.drafted), str(stage.accepted), str(stage.emitted), str(passes), f"{seconds:.3f}")
    depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_at_depth)
    table.caption = (
        f"acceptance at depth 1, 2, ...: {depths or '-'}; weight bytes per token relative to plain decoding: "
        f"{stats.relative_weight_bytes:.2f}; share of time in Python: {stats.python_share:.1%}; "
        f"rows per pass: {stats.rows_per_pass:.1f}; guesses among this text's rows: {stats.guess_share:.0%}"
    )
    return table
