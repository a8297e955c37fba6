"""The command line: text on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import pystaged
from pystaged import _core, _llama, hub
from pystaged.ngram import NgramTable
from pystaged.pair import Pair
from pystaged.policy import FixedPolicy
from pystaged.sample import sample_documents

app = typer.Typer(
    help="Staged speculative decoding for GGUF models on your own laptop.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ngram = typer.Typer(help="Tables of n-grams, the lowest stage.", no_args_is_help=True)
app.add_typer(ngram, name="ngram")
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pystaged {pystaged.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    del version


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    model: Annotated[str, typer.Option(help="Path of a GGUF file, or 'house'.")] = "house",
    draft: Annotated[
        str,
        typer.Option(help="Path of a draft with the same vocabulary, 'house', 'none' for n-grams alone, 'auto'."),
    ] = "auto",
    speculate: Annotated[bool, typer.Option(help="Draft; the text is the same without, only slower.")] = True,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the fewest tokens that have this probability together.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the likeliest.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")] = None,
    threads: Annotated[int, typer.Option(help="0 takes one per physical core.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what each stage did.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object with text, tokens, finish_reason and stats.")
    ] = False,
) -> None:
    """Continue a prompt.

    Example: pystaged generate "def fibonacci(n):" --max-tokens 64
    """
    # Before a model is loaded, which may take a while.
    pystaged.SamplingConfig(temperature, top_k, top_p, min_p, seed)
    if prompt == "-":
        prompt = sys.stdin.read()
    with pystaged.load(model, draft=_draft(draft), num_threads=threads, report=_report) as engine:
        stream = engine.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop or (),
            speculate=speculate,
        )
        with stream:
            for piece in stream:
                if not as_json:
                    typer.echo(piece.text, nl=False)
            result = stream.result
    if as_json:
        fields = {
            "text": result.text,
            "tokens": result.tokens,
            "stages": [stage.name.lower() for stage in result.stages],
            "finish_reason": result.finish_reason,
            "stats": result.stats.to_dict(),
        }
        typer.echo(json.dumps(fields))
        return
    typer.echo()
    stats = result.stats
    errors.print(
        f"[dim]{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} per second, "
        f"{stats.tokens_per_step:.2f} per step[/dim]"
    )
    if verbose:
        errors.print(_stats_table(stats))


def _draft(name: str) -> str | None:
    return None if name == "none" else name


def _report(line: str) -> None:
    errors.print(line, style="dim", markup=False)


def _stats_table(stats: pystaged.GenerationStats) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "drafted", "accepted", "emitted", "passes", "seconds"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name, stage in stats.stages.items():
        work = stats.drafters.get(name)
        passes = stats.steps if name == "target" else work.passes if work else 0
        seconds = stats.target_seconds if name == "target" else work.seconds if work else 0.0
        table.add_row(name, str(stage.drafted), str(stage.accepted), str(stage.emitted), str(passes), f"{seconds:.3f}")
    depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_at_depth)
    table.caption = (
        f"acceptance at depth 1, 2, ...: {depths or '-'}; weight bytes per token relative to plain decoding: "
        f"{stats.relative_weight_bytes:.2f}; share of time in Python: {stats.python_share:.1%}"
    )
    return table


@app.command()
def tune(
    model: Annotated[str, typer.Option(help="Path of a GGUF file, or 'house'.")] = "house",
    draft: Annotated[str, typer.Option(help="As in generate.")] = "auto",
    threads: Annotated[int, typer.Option(help="0 takes one per physical core.")] = 0,
) -> None:
    """Measure again what passes cost on this machine, and show it.

    Example: pystaged tune --model path/to/model.gguf --draft path/to/draft.gguf
    """
    pair = Pair(model, _draft(draft), threads, _report)
    target, smaller = pair.target_cost(again=True), pair.draft_cost(again=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("rows", "target ms", "T(n)/T(1)", *(("draft ms",) if smaller else ())):
        table.add_column(heading, justify="right")
    for n, seconds in target.measured.items():
        row = [str(n), f"{1e3 * seconds:.2f}", f"{seconds / target.measured[1]:.2f}"]
        if smaller:
            row.append(f"{1e3 * smaller.measured[n]:.2f}" if n in smaller.measured else "-")
        table.add_row(*row)
    Console(soft_wrap=True, highlight=False).print(table)


@ngram.command("build")
def ngram_build(
    model: Annotated[str, typer.Option(help="The draft whose text is counted: path of a GGUF file, or 'house-draft'.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to sample.")] = 1_000_000,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.5,
    seed: Annotated[int, typer.Option(help="Same seed, same table.")] = 0,
    threads: Annotated[int, typer.Option(help="0 takes one per physical core.")] = 0,
) -> None:
    """Sample text from a draft and count the n-grams that draft for it.

    Example: pystaged ngram build --model draft.gguf --tokens 1000000 --out draft.ngram.npz
    """
    path = hub.resolve_draft("house", "house") if model == "house-draft" else hub.resolve(model)
    if path is None:
        raise FileNotFoundError("there is no house draft in this installation")
    tokenizer = _core.Tokenizer(str(path))
    drafts = _core.Model(str(path), os.environ.get("PYSTAGED_KERNEL", ""), threads)
    start = next(token for token in reversed(range(tokenizer.num_tokens)) if tokenizer.is_end(token))
    columns = (*Progress.get_default_columns(), TextColumn("{task.completed}/{task.total} tokens"))
    with Progress(*columns, console=errors) as progress:
        task = progress.add_task("sampling", total=tokens)

        def documents() -> Iterator[NDArray[np.int32]]:
            for document in sample_documents(drafts, start, tokens, temperature=temperature, seed=seed):
                progress.advance(task, len(document))
                yield document

        table = NgramTable.build(documents(), vocab_size=tokenizer.num_tokens, vocab_hash=tokenizer.fingerprint)
    table.save(out)
    errors.print(f"[dim]{table.num_tokens} tokens counted, {out.stat().st_size / 1e6:.2f} MB in {out}[/dim]")


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="Path of a GGUF file, or 'house'.")] = "house",
) -> None:
    """Show what this build and machine offer, and what a model is.

    Example: pystaged info path/to/model.gguf
    """
    path = hub.resolve(model)
    with pystaged.load(model, draft=None, policy=FixedPolicy(width=1, depth=0, budget=0)) as engine:
        loaded = engine.model
        rows = {
            "pystaged": pystaged.__version__,
            "llama-cpp-python": _llama.VERSION,
            "kernel": f"{loaded.kernel} (of {', '.join(_core.kernels())})",
            "threads": str(loaded.num_threads),
            "model": str(path),
            "name": loaded.name,
            "shape": f"GPT-2, {loaded.num_layers} layers, {loaded.width} wide, {loaded.num_heads} heads",
            "context": f"{loaded.max_context} tokens",
            "vocabulary": f"{loaded.vocab_size} tokens",
            "weights": f"{loaded.weight_type}, {loaded.file_bytes / 1e6:.1f} MB file, "
            f"{loaded.weight_bytes / 1e6:.1f} MB read per pass",
        }
    for name, value in rows.items():
        typer.echo(f"{name:<18}{value}")


def main() -> None:
    """Run the command line; failures that a user can mend are one line, without a traceback."""
    try:
        app(prog_name=Path(sys.argv[0]).name)
    except KeyboardInterrupt:
        errors.print("[yellow]interrupted[/yellow]")
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has enough; a second failure when Python closes it would print a traceback.
        sys.stdout = None
        sys.exit(141)
    except (OSError, ValueError) as error:
        errors.print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(1)
