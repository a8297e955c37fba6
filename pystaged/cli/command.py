"""Commands that also accept other programs' names of options and commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pystaged.aliases import COMMANDS, OPTIONS, PROMPT, meant
from pystaged.validation import plainly

UsageError: Any = typer.BadParameter.__base__  # click's, or Typer's copy of it


# For who gives a command more arguments than it takes.
_ARGUMENTS = {
    "generate": 'more than a prompt is given; write: pystaged generate "SEVERAL WORDS" --model MODEL',
    "chat": 'more than a model and a question are given; write: pystaged chat MODEL "SEVERAL WORDS"',
}


class Command(TyperCommand):
    """A command that also accepts other programs' names for its options."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Typer keeps the line breaks of all paragraphs but the first, and then breaks the lines again.
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(self.help or ""))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click's."""
        try:
            return super().parse_args(ctx, list(self._in_our_words(ctx, args)))
        except UsageError as error:
            if not hasattr(error, "possibilities"):
                error.message = plainly(error.message)
                if "unexpected extra argument" in error.message:
                    error.message = _ARGUMENTS.get(ctx.info_name, error.message)
                raise
            ours = {word: word for word in self._options() if word.startswith("--")}
            likely = meant(error.option_name, ours | {word: own for word, own in OPTIONS.items() if own in ours})
            hint = f"; did you mean {ours.get(likely) or OPTIONS[likely]}?" if likely else ""
            raise UsageError(f"there is no option {error.option_name}{hint}", ctx) from None

    def _options(self) -> dict[str, Any]:
        return {word: option for option in self.params for word in (*option.opts, *option.secondary_opts)}

    def _in_our_words(self, ctx: Any, args: list[str]) -> Iterator[str]:
        """The arguments with our names of options. Fails where there is no such option."""
        options = self._options()
        arguments = {param.name for param in self.params if param.param_type_name == "argument"}
        rest = iter(args)
        for arg in rest:
            word, equals, value = arg.partition("=")
            ours = "" if word in options else OPTIONS.get(word, "")
            if ours == PROMPT and arguments & {"prompt", "question"}:
                yield from [value] if equals else []
                continue
            if ours.startswith("--") and ours not in options:
                ctx.fail(f"{word} is {ours} here, and {ctx.info_name} has none")
            if ours == f"is the command {ctx.info_name} here":
                continue
            if ours and not ours.startswith("--") and ours != PROMPT:
                ctx.fail(f"{word} {ours}")
            option = options.get(ours or word)
            yield ours + equals + value if ours and option else arg
            if word == "--":
                yield from rest
            elif option and not equals and not getattr(option, "is_flag", False):
                yield from islice(rest, 1)  # its value


class Group(TyperGroup):
    """Commands that may also be called by other programs' names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name."""
        words = " ".join([*ctx.command_path.split()[1:], args[0]])
        ours = COMMANDS.get(words) if args[0] not in self.commands else None
        if isinstance(ours, str):
            ctx.fail(f"{words}: {ours}")
        if ours is None:
            return super().resolve_command(ctx, args)
        if not ctx.resilient_parsing:
            from pystaged.cli.console import report  # noqa: PLC0415  slow to import

            report(f"{words} is here: {' '.join(['pystaged', *ours, *args[1:]])}")
        if ctx.parent and list(ours[:-1]) == ctx.command_path.split()[1:]:
            return super().resolve_command(ctx, [ours[-1], *args[1:]])
        root = ctx.find_root()
        return root.command.resolve_command(root, [*ours, *args[1:]])
