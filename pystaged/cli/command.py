"""Commands that also accept other programs' names of options and commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pystaged.cli import help
from pystaged.options.aliases import COMMANDS, NEEDLESS, OPTIONS, PROMPT, PROMPT_FILE, WITH_VALUE, meant, plainly

UsageError: Any = typer.BadParameter.__base__  # click's, or Typer's copy of it
# For who gives a command more arguments than it takes.
_ARGUMENTS = {
    "generate": 'more than a prompt is given; write: pystaged generate "SEVERAL WORDS" --model MODEL',
    "chat": 'more than a model and a question are given; write: pystaged chat MODEL "SEVERAL WORDS"',
}

_PROMPTS = {"prompt", "question"}  # names of arguments
_LETTERS = re.compile("-[A-Za-z]{2,5}")  # an option of llama.cpp, which click would take for several of one letter
_ANY_OBJECT = '{"type": "object"}'  # Ollama's --format json
_SWITCHES, _SWITCH = ("-fa", "--flash-attn"), ("on", "off", "auto", "1", "0")


class Command(TyperCommand):
    """A command that also accepts other programs' names for its options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help.help_of(self, ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(self._in_our_words(ctx, args)))
        except UsageError as error:
            if not hasattr(error, "possibilities"):
                error.message = plainly(error.message)
                if "unexpected extra argument" in error.message:
                    error.message = _ARGUMENTS.get(ctx.info_name, error.message)
                raise
            raise UsageError(self._unknown(error.option_name), ctx) from None

    def _options(self) -> dict[str, Any]:
        return {word: option for option in self.params for word in (*option.opts, *option.secondary_opts)}

    def _unknown(self, word: str) -> str:
        """A sentence about an option that there is not."""
        ours = {word: word for word in self._options() if word.startswith("--")}
        likely = meant(word, ours | {word: own for word, own in OPTIONS.items() if own in ours})
        hint = f"; did you mean {ours.get(likely) or OPTIONS[likely]}?" if likely else ""
        return f"there is no option {word}{hint}"

    def _in_our_words(self, ctx: Any, args: list[str]) -> Iterator[str]:
        """The arguments with our names of options. Fails where there is no such option, and names all of them."""
        options = self._options()
        takes_prompt = {param.name for param in self.params if param.param_type_name == "argument"} & _PROMPTS
        prompts: list[str] = []
        needless: dict[str, list[str]] = {}  # by reason
        refused: list[str] = []
        rest = list(reversed(args))
        while rest:
            arg = rest.pop()
            word, equals, value = arg.partition("=")
            if word.startswith("--") and word not in options:
                word = word.replace("_", "-")
            following = rest[-1] if rest else ""
            ours = word if word in options else OPTIONS.get(word, "")
            option = options.get(ours)
            if word == "--format" and (value or following) == "json":
                value, rest[-1:] = (_ANY_OBJECT, rest[-1:]) if equals else ("", [_ANY_OBJECT])
            if word == help.ALL:
                typer.echo(help.help_of(self, ctx, everything=True), nl=False)
                ctx.exit()
            elif word == "--":
                prompts[:0], rest = reversed(rest), []
            elif ours == "--color" and option and not equals and following[:1] in ("", "-"):
                yield from [ours, "stages"]  # a switch in llama.cpp
            elif option:
                yield ours + equals + value
                if rest and not equals and not getattr(option, "is_flag", False):
                    yield rest.pop()
            elif ours in (PROMPT, PROMPT_FILE) and takes_prompt and (equals or rest):
                from pystaged.cli.options import read_text  # noqa: PLC0415  slow to import

                value = value if equals else rest.pop()
                prompts.append(value if ours == PROMPT else read_text(value).removesuffix("\n"))
            elif word in NEEDLESS:
                needless.setdefault(NEEDLESS[word], []).append(word)
                if rest and not equals and (word in WITH_VALUE or (word in _SWITCHES and following in _SWITCH)):
                    rest.pop()
            elif ours == f"is the command {ctx.info_name} here":
                pass
            elif ours.startswith("--"):
                refused.append(f"{word} is {ours} here, and {ctx.info_name} has none")
            elif ours and ours not in (PROMPT, PROMPT_FILE):
                refused.append(f"{word} {ours}")
            elif (word.startswith("--") or _LETTERS.fullmatch(word)) and word not in ctx.help_option_names:
                refused.append(self._unknown(word))
            else:
                yield arg
        if refused:
            ctx.fail("; ".join(refused))
        if needless and not ctx.resilient_parsing:
            from pystaged.cli.console import report  # noqa: PLC0415  slow to import

            told = (f"{', '.join(words)} {'are' if words[1:] else 'is'}{why[2:]}" for why, words in needless.items())
            report("; ".join(told))
        yield from prompts and ["--", *prompts]


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
