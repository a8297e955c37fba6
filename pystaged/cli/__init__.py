"""The command line: text on standard output, everything else on standard error."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import pystaged
from pystaged import _program
from pystaged.cli.command import Command, Group

# What `pystaged --help` says of each command. Its module, of the same name, is imported when the command is run; in it
# `app` holds several commands, or a function of that name is the command.
_COMMANDS = {
    "generate": "Continue a prompt.",
    "chat": "Talk with a model.",
    "serve": "Serve a model to clients of OpenAI's interface, and a page to talk with it.",
    "models": "List the models that are here, or remove one.",
    "pull": "Download a model into the cache and print its path.",
    "quantize": "Write a model in another type, with llama.cpp's quantizer.",
    "bench": "Measure speed on this machine: our ways to decode, and what people would use instead.",
    "tune": "Measure again what passes cost on this machine, and show it.",
    "info": "Show what this build and machine offer, and what a model is.",
    "audit": "Check each token of an output against what the model chooses when it evaluates one row at a time.",
    "verify": "Make the text of a receipt again, and compare.",
    "rpc-server": "Lend this machine to a pystaged elsewhere, which names it with --device rpc:HOST:PORT.",
    "ngram": "Tables of n-grams, the lowest stage.",
}


class _Commands(Group):
    """Lists commands without importing them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, line in _COMMANDS.items():
            self.add_command(TyperCommand(name, help=line))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, the real one."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and _command(listed.name or ""), rest


def _command(name: str) -> Any:
    """Import a command."""
    module = import_module(f"pystaged.cli.{name.replace('-', '_')}")
    parent = typer.Typer()
    if hasattr(module, "app"):
        parent.add_typer(module.app, name=name)
    else:
        parent.command(cls=Command)(getattr(module, module.__name__.rpartition(".")[2]))
    return typer.main.get_group(parent).commands[name]


app = typer.Typer(
    cls=_Commands,
    help="Staged speculative decoding for GGUF models on your own laptop.",
    epilog="Exit status: 0 done, 1 failed (the reason is on standard error), 2 wrong usage, 130 interrupted by Ctrl-C, "
    "141 nobody reads the output any more.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    # The command's module has been imported.
    _program.let_tidy_up()


def main() -> None:
    """Run the command line and leave with its exit status; failures that a user can mend are one line, without a
    traceback."""
    status = 0
    try:
        _run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
        if status == _program.INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _say("interrupted", "yellow")
    except (OSError, ValueError, ImportError) as error:
        status = 1
        from pystaged.cli.console import words  # noqa: PLC0415

        _say("error: ", "bold red", words(error))
    if status:
        # Lest Python tries again to write what could not be written, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


def _run() -> None:
    try:
        app(prog_name="pystaged")
    finally:
        sys.stdout.flush()


def _say(word: str, style: str, more: str = "") -> None:
    from rich.text import Text  # noqa: PLC0415

    from pystaged.cli.console import errors  # noqa: PLC0415

    errors.print(Text.assemble((word, style), more))
