"""Commands that also accept other programs' names of options and commands."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pystaged.cli import help
from pystaged.options.aliases import COMMANDS, in_our_words, plainly, unknown

UsageError: Any = typer.BadParameter.__base__  # click's, or Typer's copy of it
# For who gives a command more arguments than it takes.
_ARGUMENTS = {
    "generate": 'more than a prompt is given; write: pystaged generate "SEVERAL WORDS" --model MODEL',
    "chat": 'more than a model and a question are given; write: pystaged chat MODEL "SEVERAL WORDS"',
}


class Command(TyperCommand):
    """A command that also accepts other programs' names for its options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help.help_of(self, ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = dict.fromkeys((*ctx.help_option_names, help.ALL), False)
        for each in self.params:
            if each.param_type_name == "option":
                options |= dict.fromkeys((*each.opts, *each.secondary_opts), not getattr(each, "is_flag", False))
        takes_prompt = not {each.name for each in self.params}.isdisjoint(("prompt", "question"))
        try:
            words, needless = in_our_words(args, options, ctx.info_name, takes_prompt=takes_prompt)
        except LookupError as error:
            ctx.fail(str(error.args[0]))
        if needless and not ctx.resilient_parsing:
            from pystaged.cli.console import report  # noqa: PLC0415  slow to import

            report(needless)
        try:
            return super().parse_args(ctx, words)
        except UsageError as error:
            if getattr(error, "option_name", "") == help.ALL:  # neither another option's value nor after --
                typer.echo(help.help_of(self, ctx, everything=True), nl=False)
                ctx.exit()
            if hasattr(error, "possibilities"):
                raise UsageError(unknown(error.option_name, options), ctx) from None
            error.message = plainly(error.message)
            if "unexpected extra argument" in error.message:
                error.message = _ARGUMENTS.get(ctx.info_name, error.message)
            raise


class Group(TyperGroup):
    """Commands that may also be called by other programs' names.

    hint: added to the error about a command that there is not.
    """

    hint = ""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help.help_of(self, ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click's; no arguments ask for help, which some versions of Typer do not show then."""
        shown = self.no_args_is_help and not (args or ctx.resilient_parsing)
        rest: list[str] = super().parse_args(ctx, ["--help"] if shown else args)
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name."""
        words = " ".join([*ctx.command_path.split()[1:], args[0]])
        ours = COMMANDS.get(words) if args[0] not in self.commands else None
        if isinstance(ours, str):
            ctx.fail(f"{words}: {ours}")
        if ours is None:
            try:
                return super().resolve_command(ctx, args)
            except UsageError as error:
                if error.message == f"No such command {args[0]!r}.":
                    error.message += self.hint
                raise
        if ctx.parent and list(ours[:-1]) == ctx.command_path.split()[1:]:
            return super().resolve_command(ctx, [ours[-1], *args[1:]])
        root = ctx.find_root()
        return root.command.resolve_command(root, [*ours, *args[1:]])
