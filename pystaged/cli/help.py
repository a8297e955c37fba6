"""The help of a command, in 80 columns: what is common first, the rest where it is asked for."""

from __future__ import annotations

import inspect
import re
from typing import Any

ALL = "--help-all"
WORDS = ("-h", "--help", ALL)
_MOST_SHOWN = 16  # options; of commands with more, help shows those that are common
_COMMON = {
    *("alias", "api_key", "chat", "draft", "device", "host", "json_schema", "max_tokens", "model", "n_ctx", "named"),
    *("parallel", "port", "prompts", "resume", "seed", "stats", "stop", "system", "temperature", "think", "top_p"),
}
_OPTION_COLUMN = 26
_EXAMPLE = "Example: "


def help_of(command: Any, ctx: Any, *, everything: bool = False) -> str:
    """The help of a command; with `everything` all options in groups, defaults, ranges, paragraphs and examples."""
    formatter = ctx.make_formatter()
    command.format_usage(ctx, formatter)
    # Line breaks within a paragraph are the source's.
    paragraphs = [" ".join(each.split()) for each in inspect.cleandoc(command.help or "").split("\n\n")]
    text = [each for each in paragraphs if not each.startswith(_EXAMPLE)]
    examples = [each.removeprefix(_EXAMPLE) for each in paragraphs if each.startswith(_EXAMPLE)]
    with formatter.indentation():
        for each in text if everything else text[:1]:
            formatter.write_paragraph()
            formatter.write_text(each)
        for each in examples if everything else examples[:2]:
            formatter.write_paragraph()
            formatter.write(f"  {each}\n")
    for name, rows in _groups(command, ctx, everything=everything).items():
        with formatter.section(name):
            formatter.write_dl(rows, col_max=_OPTION_COLUMN)
    if command.epilog:
        formatter.write_paragraph()
        formatter.write_text(command.epilog)
    return str(formatter.getvalue())


def _groups(command: Any, ctx: Any, *, everything: bool) -> dict[str, list[tuple[str, str]]]:
    """By title, lines of names and what is said about them."""
    params = [each for each in command.get_params(ctx) if each.name != "help" and not each.hidden]
    arguments = [each for each in params if each.param_type_name == "argument"]
    options = [each for each in params if each not in arguments]
    shown = [each for each in options if everything or len(options) <= _MOST_SHOWN or each.name in _COMMON]
    groups: dict[str, list[tuple[str, str]]] = {}
    for each in (*arguments, *shown):
        title = "Arguments" if each in arguments else (everything and each.rich_help_panel) or "Options"
        words = _about(each, ctx) if everything else _first_sentence(each.help or "")
        groups.setdefault(title, []).append((_spelling(each), words))
    if hasattr(command, "commands"):
        lines = {name: " ".join((each.help or "").split()).split(": ")[0] for name, each in command.commands.items()}
        groups["Commands"] = [(name, _first_sentence(line)) for name, line in lines.items()]
    elif len(shown) < len(options):
        groups["Options"].append((ALL, f"Show all {len(options)} options, in groups."))
    return groups


def _about(param: Any, ctx: Any) -> str:
    """All that is said about a parameter, with its default and range."""
    _, words = param.get_help_record(ctx) or ("", "")
    return re.sub(r"default: \((.*)\)(?=;|\])", r"default: \1", words)


def _spelling(param: Any) -> str:
    """A parameter's names, and what its value is called."""
    value = param.metavar or param.name.upper()
    if param.param_type_name == "argument":
        return str(value)
    names = ", ".join([*sorted(param.opts, key=len), *param.secondary_opts])
    return names if param.is_flag else f"{names} {value}"


def _first_sentence(words: str) -> str:
    return re.split(r"(?<=\.)\s|;\s", words.strip(), maxsplit=1)[0].rstrip(".") + "."
