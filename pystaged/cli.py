"""The command line: text on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import pystaged
from pystaged import _core, _llama, hub

app = typer.Typer(
    help="Staged speculative decoding for GGUF models on your own laptop.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the fewest tokens that have this probability together.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the likeliest.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")] = None,
    threads: Annotated[int, typer.Option(help="0 takes one per physical core.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object with text, tokens, finish_reason and stats.")
    ] = False,
) -> None:
    """Continue a prompt.

    Example: pystaged generate "def fibonacci(n):" --max-tokens 64
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    with pystaged.load(model, num_threads=threads) as engine:
        stream = engine.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop or (),
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
            "finish_reason": result.finish_reason,
            "stats": result.stats.to_dict(),
        }
        typer.echo(json.dumps(fields))
        return
    typer.echo()
    stats = result.stats
    errors.print(f"[dim]{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} per second[/dim]")


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="Path of a GGUF file, or 'house'.")] = "house",
) -> None:
    """Show what this build and machine offer, and what a model is.

    Example: pystaged info path/to/model.gguf
    """
    path = hub.resolve(model)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    with pystaged.load(model) as engine:
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
        table.add_row(name, value)
    Console(soft_wrap=True, highlight=False).print(table)


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
        errors.print("[bold red]error:[/bold red]", str(error), markup=True)
        sys.exit(1)
