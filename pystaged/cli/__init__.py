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
from pystaged.cli import help
from pystaged.cli.command import Command, Group, UsageError
from pystaged.platform import ctrl_c as _ctrl_c

# Commands and their lines in `pystaged --help`. A command's module has its name and is imported only to run it; it
# holds `app` for a group of commands, or the command as a function of that name.
_COMMANDS = {
    "generate": "Continue a prompt.",
    "chat": "Chat with a model.",
    "serve": "Run a server for clients of OpenAI, Anthropic and Ollama, and a page.",
    "models": "List the models on this machine, or remove one.",
    "pull": "Download a model into the cache and print its path.",
    "quantize": "Convert a model to another type with llama.cpp's quantizer.",
    "bench": "Measure plain and staged decoding, and other programs, on this machine.",
    "info": "Show this build, this machine's devices, and a model's properties.",
    "diff": "Compare two models, quantizations or KV types on the same prompts.",
    "verify": "Generate the text of a receipt again, and compare.",
    "rpc-server": "Run layers of models for other machines (--device rpc:HOST:PORT).",
    "distill": "Train a draft for a model on the model's own answers.",
    "ngram": "Build tables of n-grams to draft from.",
}


class _Commands(Group):
    """Lists commands without importing them."""

    hint = ' To ask a model, write: pystaged chat MODEL "QUESTION"'

    def __init__(self, **settings: Any) -> None:
        commands = {name: TyperCommand(name, help=line) for name, line in _COMMANDS.items()}
        super().__init__(**settings | {"commands": commands})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in click; also accepts `help COMMAND` and `version`, as other programs do."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args == ["version"]:
            args = ["--version"]
        if args[-1:] and args[-1] in help.WORDS and not any(word.startswith("-") for word in args[:-1]):
            self._show_help(ctx, args)
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except UsageError as error:
            if hasattr(error, "option_name"):
                error.message = f"{error.option_name} comes after a command, as in: pystaged chat {error.option_name}"
                error.possibilities = None
            raise
        return rest

    def _show_help(self, ctx: Any, args: list[str]) -> None:
        """Show a command's help and leave, without what parsing of options needs, which is slow to import."""
        command, words = self, args[:-1]
        while words and hasattr(command, "resolve_command"):
            name, command, words = command.resolve_command(ctx, words)
            ctx = type(ctx)(command, info_name=name, parent=ctx)
        typer.echo(help.help_of(command, ctx, everything=args[-1] == help.ALL), nl=False)
        ctx.exit()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that the arguments name."""
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
    "141 output pipe closed.",
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
        bool, typer.Option("--version", "-v", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version
    # All modules are imported, so Ctrl-C can clean up from here on.
    _ctrl_c.let_tidy_up()


def main() -> None:
    """Run the command line and leave with its exit status; failures that a user can mend are one line, without a
    traceback."""
    status = 0
    failure: Exception | str = ""
    try:
        _run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except (OSError, ValueError, ImportError) as error:
        # Of an extension module that Ctrl-C interrupts while it is imported, the exception is lost in an ImportError.
        status = _ctrl_c.INTERRUPTED if isinstance(error.__cause__, KeyboardInterrupt) else 1
        failure = error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "new thread" not in str(error):
            raise
        status, failure = 1, "not enough memory; a smaller model or a smaller --n-ctx needs less"
    if failure or status == _ctrl_c.INTERRUPTED:
        from pystaged.cli.console import complain, errors  # noqa: PLC0415

        if status == _ctrl_c.INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            errors.print("interrupted", style="yellow")
        else:
            complain(failure)
    if status:
        # Otherwise Python tries to write the output again at exit, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


def _run() -> None:
    try:
        app(prog_name="pystaged")
    finally:
        sys.stdout.flush()
