"""The command line: text on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

import pystaged
from pystaged.cli import audit, bench, generate, info, models, ngram, pull, quantize, repl, rpc_server, tune
from pystaged.cli.console import errors

_INTERRUPTED = 130

app = typer.Typer(
    help="Staged speculative decoding for GGUF models on your own laptop.",
    epilog="Exit status: 0 done, 1 failed (the reason is on standard error), 2 wrong usage, 130 interrupted by Ctrl-C, "
    "141 nobody reads the output any more.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ngrams = typer.Typer(help="Tables of n-grams, the lowest stage.", no_args_is_help=True)
ngrams.command()(ngram.build)
app.command()(generate.generate)
app.command()(pull.pull)
app.command()(quantize.quantize)
app.add_typer(models.app, name="models")
app.command()(repl.repl)
app.add_typer(bench.app, name="bench")
app.command()(tune.tune)
app.command()(info.info)
app.command()(audit.audit)
app.command()(rpc_server.rpc_server)
app.add_typer(ngrams, name="ngram")


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


def main() -> None:
    """Run the command line; failures that a user can mend are one line, without a traceback."""
    try:
        app(prog_name=Path(sys.argv[0]).name)
    except SystemExit as end:
        # Typer turns Ctrl-C into this status without a word.
        if end.code == _INTERRUPTED:
            errors.print("[yellow]interrupted[/yellow]")
        raise
    except BrokenPipeError:
        # Whoever read our output has enough; a second failure when Python closes it would print a traceback.
        sys.stdout = None
        sys.exit(141)
    except (OSError, ValueError) as error:
        errors.print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(1)
