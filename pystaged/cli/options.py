"""Options that several commands have, declared once; groups of them are dataclasses."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from pystaged.files import expanded

if TYPE_CHECKING:
    from pystaged import SamplingConfig


def check(value: Any) -> Any:
    """Refuse what nothing can take: words whose bytes were no text, integers of more than 32 bits, nan."""
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, str) and any("\ud800" <= character <= "\udfff" for character in each):
            raise typer.BadParameter(f"{each!a} is not valid UTF-8 text.")
        if isinstance(each, int) and abs(each) >= 2**31:
            raise typer.BadParameter(f"{each} is out of range.")
        if isinstance(each, float) and math.isnan(each):
            raise typer.BadParameter(f"{each} is no number.")
    return value


@contextmanager
def usage() -> Iterator[None]:
    """What is wrong with options is wrong usage."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None


def check_device(name: str) -> str:
    """Refuse what is no name of a device."""
    from pystaged.backends import devices  # noqa: PLC0415

    with usage():
        devices.check(check(name))
    return name


def check_type(name: str) -> str:
    """Refuse what is no type of a file; "" stands for none."""
    from pystaged.loading import quantize  # noqa: PLC0415

    with usage():
        return quantize.check_type(name) if name else name


def _check_kv(value: str) -> str:
    if value not in ("f16", "q8_0"):
        raise typer.BadParameter(f"f16 or q8_0, not {value}")
    return value


_SIZE = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGT]?)(I?B)?", re.IGNORECASE)
_MOST_BYTES = 1 << 24  # of a schema, grammar or message


def size(value: str | int) -> int:
    """Bytes, as people write them: 2G, 2GB and 2 GiB are 2 * 2**30."""
    found = _SIZE.fullmatch(str(value).strip())
    number = float(found[1]) * 1024 ** ("KMGT".find(found[2].upper()) + 1 if found[2] else 0) if found else 0.0
    if found and number < 1:
        raise typer.BadParameter(f"{value!r} is too little for anything; leave it out, or write 512M or 2.5G.")
    if not found or number >= 2**63:
        raise typer.BadParameter(f"{value!r} is no size; write 512M or 2.5G.")
    return int(number)


def either(model: str | None, named: str | None) -> str | None:
    """The model that a command's argument or --model names, None for neither."""
    if model is not None and named is not None:
        raise typer.BadParameter("name the model once, by MODEL or --model")
    return named if model is None else model


def read_system(words: str) -> str:
    """A message, or that in the file that it names."""
    return read_text(words[1:]).rstrip("\n") if words.startswith("@") else words


def read_text(path: str) -> str:
    """The text in a file or pipe. Raises OSError and ValueError where there is none."""
    with expanded(path).open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than {_MOST_BYTES / 1e6:.0f} MB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None


class Color(str, Enum):
    """What generated text is painted by."""

    NONE = "none"
    STAGES = "stages"


DEFAULT_MODEL = "smollm2; house where that is not installed"  # names.default_model
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Path of a GGUF file, name in the cache, hub id, 'smollm2' or 'house'.",
        show_default=DEFAULT_MODEL,
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Path of a GGUF file, name in the cache, hub id, 'smollm2' or 'house'.",
        show_default=DEFAULT_MODEL,
    ),
]
ModelToo = Annotated[str | None, typer.Option("--model", "-m", help="The same as MODEL.", show_default=False)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="New tokens at most.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End the text before this string; may be repeated.", callback=check)
]
StopLoops = Annotated[
    bool | None,
    typer.Option(
        help="End a text that repeats itself: one span three times over, 128 tokens or more.",
        show_default="on for answers",
    ),
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
System = Annotated[
    str,
    typer.Option(
        "--system",
        metavar="TEXT|@FILE",
        callback=read_system,
        help="How the model is to answer: a message before all others.",
    ),
]
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
        typer.Option(
            help="Draft with the same vocabulary, or a draft head, named likewise; 'none' for n-grams alone, 'auto'."
        ),
    ] = "auto"
    device: Annotated[
        str,
        typer.Option(help="Where the target runs: cpu, metal, gpu, auto, rpc:HOST:PORT,..., or a name from info."),
    ] = "cpu"
    draft_device: Annotated[str, typer.Option(help="Where the draft runs, likewise.")] = "cpu"
    threads: Threads = 0
    kv: KeysAndValues = "f16"

    def __post_init__(self) -> None:
        from pystaged.backends import devices  # noqa: PLC0415

        with usage():
            devices.check(check(self.device), self.kv)
            devices.check(check(self.draft_device))


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
    memory: Annotated[
        bool,
        typer.Option(
            "--memory/--no-memory", help="Draft from what the model said before, kept in the cache, 10 MB at most."
        ),
    ] = True


_RULES = "Penalties and other rules"


@dataclass
class SamplingOptions:
    """How tokens are chosen; the fields are those of SamplingConfig, but for lists, which are words here. What is not
    given is None."""

    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always takes the likeliest token.", show_default="0; of answers, as the model's makers recommend"
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Keep this many of the likeliest tokens; 0 keeps all.", show_default="0; of answers likewise"
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Keep the fewest tokens that have this probability together.", show_default="1; of answers likewise"
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Keep tokens at least this likely relative to the likeliest.", show_default="0; of answers likewise"
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same text; -1 draws one.", show_default="0; of answers -1")
    ] = None
    typical_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_RULES, help="Keep the tokens of usual surprise with this probability.", show_default="1.0"
        ),
    ] = None
    xtc_probability: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_RULES, help="How often to exclude the top choices; 0 is never.", show_default="0.0"
        ),
    ] = None
    xtc_threshold: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_RULES, help="Those at least this likely, but for the least likely.", show_default="0.1"
        ),
    ] = None
    temperature_last: Annotated[
        bool, typer.Option("--temperature-last", rich_help_panel=_RULES, help="Filter first, as llama.cpp does.")
    ] = False
    repeat_penalty: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_RULES, help="Divide logits of tokens that the text has; 1 is off.", show_default="1.0"
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_RULES, help="Lower logits of tokens that the text has; 0 is off.", show_default="0.0"
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(rich_help_panel=_RULES, help="The same for each time that it has them.", show_default="0.0"),
    ] = None
    repeat_last_n: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_RULES, help="Tokens these three look back, prompt included; -1 for all.", show_default="64"
        ),
    ] = None
    dry_multiplier: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_RULES, help="Penalty for what makes a repetition longer; 0 is off.", show_default="0.0"
        ),
    ] = None
    dry_base: Annotated[
        float | None, typer.Option(rich_help_panel=_RULES, help="How it grows with each token.", show_default="1.75")
    ] = None
    dry_allowed_length: Annotated[
        int | None,
        typer.Option(rich_help_panel=_RULES, help="Tokens that may be repeated without it.", show_default="2"),
    ] = None
    dry_penalty_last_n: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_RULES, help="Tokens it looks back, prompt included; -1 for all.", show_default="-1"
        ),
    ] = None
    dry_sequence_breaker: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_RULES,
            help="No repetition goes beyond this text; may be repeated, 'none' for no such text. "
            "By default a new line, a colon, a quote and an asterisk.",
            callback=check,
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias",
            "-l",
            rich_help_panel=_RULES,
            help="Make a token likelier or less so: 15043+1, 15043-inf, ' Hello=-2.5'; may be repeated.",
            callback=check,
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_RULES,
            help="New tokens before which the text may not end.",
            callback=check,
            show_default="0",
        ),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", rich_help_panel=_RULES, help="The text may not end by itself.")
    ] = False

    def given(self) -> dict[str, Any]:
        """Those that were given, by the names of SamplingConfig. Raises ValueError for a bias that is none."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found = {
            name: value for name, value in found.items() if value is not None and value is not False and value != []
        }
        if "logit_bias" in found:
            found["logit_bias"] = _biases(found["logit_bias"])
        breakers = found.pop("dry_sequence_breaker", None)
        if breakers:
            found["dry_sequence_breakers"] = [text for text in breakers if text != "none"]
        return found | ({"seed": None} if self.seed == -1 else {})

    def config(self, recommended: Mapping[str, Any] | None = None) -> SamplingConfig:
        """The same for the engine.

        Args:
            recommended: fields of an answer that are not given; its seed is drawn then.

        Raises:
            ValueError: naming the option that is out of range.
        """
        from pystaged import SamplingConfig  # noqa: PLC0415

        defaults = {} if recommended is None else {**recommended, "seed": None}
        return SamplingConfig(**defaults | self.given())


def _biases(words: list[str]) -> dict[int | str, float]:
    """Biases as llama.cpp has them written, 15043+1 or 15043-1, or TEXT=BIAS.

    Raises:
        ValueError: naming what is neither.
    """
    biases: dict[int | str, float] = {}
    for word in words:
        by_number = re.fullmatch(r"(\d+)([+-].+)", word)
        token, bias = by_number.groups() if by_number else word.rpartition("=")[::2]
        try:
            number = float(bias if token else "")
        except ValueError:
            raise ValueError(f"--logit-bias is written 15043+1, 15043-1 or TEXT=BIAS, not {word!r}") from None
        biases[int(token) if by_number else token] = number
    return biases


@dataclass
class GrammarOptions:
    """What the text must be; one of them at most."""

    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|JSON", help="The text is JSON that meets this schema.", show_default=False),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="The text matches this expression.", callback=check, show_default=False)
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(metavar="FILE|GRAMMAR", help="The text follows this grammar, Lark's or GBNF.", show_default=False),
    ] = None

    def options(self) -> dict[str, Any]:
        """The same for the engine. Raises OSError and ValueError for a file that cannot be read."""
        found: dict[str, Any] = {"regex": self.regex} if self.regex is not None else {}
        if self.json_schema is not None:
            is_file = self.json_schema.lstrip()[:1] != "{"
            found["json_schema"] = _read_grammar(self.json_schema) if is_file else self.json_schema
        if self.grammar is not None:
            is_file = not re.search(r"::=|\bstart\s*(\[[^\]]*\]\s*)?:", self.grammar)
            found["grammar"] = _read_grammar(self.grammar) if is_file else self.grammar
        if len(found) > 1:
            raise typer.BadParameter("give one of --json-schema, --regex and --grammar")
        return found


def _read_grammar(path: str) -> str:
    """The schema or grammar in a file or pipe."""
    if not path:
        raise typer.BadParameter("a schema or grammar is empty")
    return read_text(path)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command as Typer reads it: where a parameter is a dataclass, its fields become the options."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    # Before Python 3.11 get_type_hints makes Optional of what is None by default, and Typer does not look into that.
    signature = inspect.signature(command, eval_str=True).parameters
    hints = {name: parameter.annotation for name, parameter in signature.items()}
    for name, parameter in signature.items():
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
