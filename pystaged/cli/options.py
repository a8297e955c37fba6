"""Options that several commands have, declared once; groups of them are dataclasses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from pystaged import SamplingConfig


def check(value: Any) -> Any:
    """Refuse what C++ cannot take: words whose bytes were no text, integers of more than 32 bits."""
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, str) and any("\ud800" <= character <= "\udfff" for character in each):
            raise typer.BadParameter(f"{each!a} is not valid UTF-8 text.")
        if isinstance(each, int) and abs(each) >= 2**31:
            raise typer.BadParameter(f"{each} is out of range.")
    return value


@contextmanager
def usage() -> Iterator[None]:
    """What is wrong with options is wrong usage."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None


def _check_kv(value: str) -> str:
    if value not in ("f16", "q8_0"):
        raise typer.BadParameter(f"f16 or q8_0, not {value}")
    return value


_SIZE = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGT]?)(I?B)?", re.IGNORECASE)


def size(value: str | int) -> int:
    """Bytes, as people write them: 2G, 2GB and 2 GiB are 2 * 2**30."""
    found = _SIZE.fullmatch(str(value).strip())
    number = float(found[1]) * 1024 ** ("KMGT".find(found[2].upper()) + 1 if found[2] else 0) if found else 0.0
    if found and number < 1:
        raise typer.BadParameter(f"{value!r} is too little for anything; leave it out, or write 512M or 2.5G.")
    if not found or number >= 2**63:
        raise typer.BadParameter(f"{value!r} is no size; write 512M or 2.5G.")
    return int(number)


def either(model: str | None, named: str | None, default: str) -> str:
    """The model that a command's argument or --model names."""
    if model is not None and named is not None:
        raise typer.BadParameter("name the model once, by MODEL or --model")
    return next((name for name in (model, named) if name is not None), default)


class Color(str, Enum):
    """What generated text is painted by."""

    NONE = "none"
    STAGES = "stages"


ModelName = Annotated[
    str,
    typer.Option("--model", "-m", help="Path of a GGUF file, name in the cache, hub id, 'smollm2' or 'house'."),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Path of a GGUF file, name in the cache, hub id, 'smollm2' or 'house'.",
        show_default=False,
    ),
]
ModelToo = Annotated[str | None, typer.Option("--model", "-m", help="The same as MODEL.", show_default=False)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="New tokens at most.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End the text before this string; may be repeated.", callback=check)
]
Threads = Annotated[int, typer.Option(min=0, help="0 takes one per physical core.", callback=check)]
KeysAndValues = Annotated[
    str,
    typer.Option(
        "--kv",
        callback=_check_kv,
        help="How keys and values are stored: f16, or q8_0 for half the memory and slightly other texts.",
    ),
]
KvMemory = Annotated[
    int | None,
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        parser=size,
        help="Memory for the keys and values of all texts, such as 2G; a quarter of what is free by default. One text "
        "alone always fits.",
    ),
]
Colors = Annotated[Color, typer.Option("--color", help="Paint each token by who proposed it; in terminals only.")]
ShowTree = Annotated[bool, typer.Option("--show-tree", help="Draw each tree, its accepted path bright.")]
System = Annotated[str, typer.Option("--system", help="How the model is to answer: a message before all others.")]
Think = Annotated[
    bool | None,
    typer.Option("--think/--no-think", help="Whether models that can think first do; else as the model likes."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@dataclass
class PairOptions:
    """What drafts for the model, and where and how both run."""

    draft: Annotated[
        str,
        typer.Option(help="Draft with the same vocabulary, named like the model; 'none' for n-grams alone, 'auto'."),
    ] = "auto"
    device: Annotated[
        str,
        typer.Option(
            help="Where the target runs: cpu, metal, gpu, auto, rpc:HOST:PORT,..., or a name from info.", callback=check
        ),
    ] = "cpu"
    draft_device: Annotated[str, typer.Option(help="Where the draft runs, likewise.", callback=check)] = "cpu"
    threads: Threads = 0
    kv: KeysAndValues = "f16"


@dataclass
class LoadOptions(PairOptions):
    """The same, the lowest stage, and how long texts may be."""

    ngrams: Annotated[
        Path | None,
        typer.Option(help="Table of n-grams that drafts for the draft; by default the one beside the draft's file."),
    ] = None
    n_ctx: Annotated[
        int,
        typer.Option(
            "--n-ctx",
            "-c",
            min=0,
            help="Tokens of prompt and text; 0 for what the model was trained for, 8192 at most.",
            callback=check,
        ),
    ] = 0
    kv_memory: KvMemory = None
    keep_packed: Annotated[
        bool,
        typer.Option("--keep-packed", help="Load at once from now on, from a copy in the cache as large as the model."),
    ] = False


@dataclass
class SamplingOptions:
    """How tokens are chosen; the fields are those of SamplingConfig, in its order."""

    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(help="Keep the fewest tokens that have this probability together.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the likeliest.")] = 0.0
    seed: Annotated[int, typer.Option(help="Same seed, same text; -1 draws one.")] = 0

    def config(self) -> SamplingConfig:
        """The same for the engine. Raises ValueError naming the option that is out of range."""
        from pystaged import SamplingConfig  # noqa: PLC0415

        seed = None if self.seed == -1 else self.seed
        return SamplingConfig(self.temperature, self.top_k, self.top_p, self.min_p, seed)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command as Typer reads it: where a parameter is a dataclass, its fields become the options."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        found = {name: parameter.default}
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            found = {option.name: option.default for option in fields(hints[name])}
            hints |= get_type_hints(hints[name], include_extras=True)
        for each, default in found.items():
            parameters.append(
                inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each])
            )

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{option.name: values.pop(option.name) for option in fields(group)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
