"""Options of commands, most of them made from pystaged.options."""

from __future__ import annotations

import inspect
import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from pystaged.files import expanded
from pystaged.options import ALL, LOADING, SAMPLING, flags

if TYPE_CHECKING:
    from pystaged import SamplingConfig


def check(value: Any) -> Any:
    """Refuse invalid values: text that is not UTF-8, integers of more than 32 bits, nan."""
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, str) and any("\ud800" <= character <= "\udfff" for character in each):
            raise typer.BadParameter(f"{each!a} is not valid UTF-8 text.")
        if isinstance(each, int) and abs(each) >= 2**31:
            raise typer.BadParameter(f"{each} is out of range.")
        if isinstance(each, float) and math.isnan(each):
            raise typer.BadParameter(f"{each} is not a number.")
    return value


def token_limit(tokens: int | None) -> int | None:
    """--max-tokens; 0, and llama.cpp's -1, are as many as a context has room for."""
    from pystaged.config import NO_LIMIT  # noqa: PLC0415

    return NO_LIMIT if check(tokens) in (0, -1) else tokens


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def usage() -> Iterator[None]:
    """Turn errors about options into usage errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None


def check_device(name: str) -> str:
    """Refuse an invalid name of a device."""
    from pystaged.backends import devices  # noqa: PLC0415

    with usage():
        devices.check(check(name))
    return name


def check_type(name: str | None) -> str | None:
    """Refuse an invalid type of a file; "" and None stand for none."""
    from pystaged.loading import quantize  # noqa: PLC0415

    with usage():
        return quantize.check_type(name) if name else name


def check_kv(value: str) -> str:
    """Refuse an unknown type of KV cache; "" stands for none."""
    if value not in ("", "f16", "q8_0"):
        raise typer.BadParameter(f"must be f16 or q8_0, not {value}")
    return value


_SIZE = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGT]?)(I?B)?", re.IGNORECASE)
_MOST_BYTES = 1 << 24  # of a schema, grammar or message


def size(value: str | int) -> int:
    """Parse a number of bytes: 2G, 2GB and 2 GiB are 2 * 2**30."""
    found = _SIZE.fullmatch(str(value).strip())
    number = float(found[1]) * 1024 ** ("KMGT".find(found[2].upper()) + 1 if found[2] else 0) if found else 0.0
    if found and number < 1:
        raise typer.BadParameter(f"{value!r} is too small; leave it out, or write 512M or 2.5G.")
    if not found or number >= 2**63:
        raise typer.BadParameter(f"{value!r} is not a size; write 512M or 2.5G.")
    return int(number)


def either(model: str | None, named: str | None) -> str | None:
    """The model that a command's argument or --model names, None for neither."""
    if model is not None and named is not None:
        raise typer.BadParameter("name the model once, by MODEL or --model")
    return named if model is None else model


def read_system(words: str) -> str:
    """A system message, or the content of the file that it names."""
    return read_text(words[1:]).rstrip("\n") if words.startswith("@") else words


def read_text(path: str) -> str:
    """The text of a file or pipe. Raises OSError and ValueError if it cannot be read or is not text."""
    with expanded(path).open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than {_MOST_BYTES / 1e6:.0f} MB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None


class Color(str, Enum):
    """What generated text is coloured by."""

    NONE = "none"
    STAGES = "stages"


# Typer's settings for options, besides their table.
_TYPER: dict[str, dict[str, Any]] = {
    "json_schema": {"metavar": "FILE|JSON"},
    "grammar": {"metavar": "FILE|GRAMMAR"},
    "kv": {"callback": check_kv},
    "kv_memory": {"metavar": "SIZE", "parser": size, "callback": None},
    "prompt_cache": {"metavar": "FOLDER|auto"},
    "prompt_cache_size": {"metavar": "SIZE", "parser": size, "callback": None, "show_default": "8G"},
    "seed": {"callback": None},  # has 64 bits
}
_MORE = {
    "dry_sequence_breakers": " May be repeated; 'none' for no strings.",
    "logit_bias": " Written 15043+1, 15043-inf or ' Hello=-2.5'; may be repeated.",
    "stop": " May be repeated.",
}


def spelled(name: str, **settings: Any) -> Any:
    """An option of pystaged.options for Typer.

    Args:
        **settings: arguments of typer.Option that replace the usual ones.
    """
    option = ALL[name]
    usual: dict[str, Any] = {"help": option.help + _MORE.get(name, ""), "callback": check}
    if name in ("n_ctx", "num_threads"):  # others are checked by their config
        usual["min"] = option.ge
    return typer.Option(*flags(name, option), **usual | _TYPER.get(name, {}) | settings)


LIMIT_HELP = "Maximum number of new tokens; 0 or -1 for as many as the context has room for"
MODEL_HELP = "Path of a GGUF file, name in the cache, hub id, 'smollm2' or 'bundled'."
DEFAULT_MODEL = "smollm2; bundled if that is not installed"  # names.default_model
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help=MODEL_HELP,
        show_default=DEFAULT_MODEL,
    ),
]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=DEFAULT_MODEL)]
ModelToo = Annotated[str | None, typer.Option("--model", "-m", help="The same as MODEL.", show_default=False)]
MaxTokens = Annotated[int, spelled("max_tokens", min=-1, callback=token_limit)]
Stop = Annotated[list[str] | None, spelled("stop")]
StopLoops = Annotated[bool | None, spelled("stop_loops", show_default="on for answers")]
Threads = Annotated[int, spelled("num_threads")]
KeysAndValues = Annotated[str, spelled("kv")]
ContextLength = Annotated[int, spelled("n_ctx")]
KvMemory = Annotated[int | None, spelled("kv_memory")]
Colors = Annotated[Color, typer.Option("--color", help="Colour tokens by the stage that proposed them, in terminals.")]
ShowTree = Annotated[bool, typer.Option("--show-tree", help="Draw each draft tree, with its accepted path bright.")]
System = Annotated[
    str,
    typer.Option(
        "--system",
        metavar="TEXT|@FILE",
        callback=read_system,
        help="System message: how the model should answer.",
    ),
]
Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think", help="Whether a model that can think does so first; by default its template decides."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


class OptionGroup:
    """Options of pystaged.options that a command has together; `given` holds the values given, by name."""

    names: ClassVar[Iterable[str]]
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # arguments of `spelled`, and `default`
    _kinds: ClassVar[dict[str, Any]] = {"dry_sequence_breakers": list[str], "logit_bias": list[str], "ngrams": Path}

    def __init__(self, **given: Any) -> None:
        self.given = {name: value for name, value in given.items() if value is not None and value != []}

    @classmethod
    def parameters(cls) -> Iterator[inspect.Parameter]:
        """The group's options as parameters of a command."""
        for name in cls.names:
            settings = {"default": ALL[name].default, **cls.settings.get(name, {})}
            default = settings.pop("default")
            kind = cls._kinds.get(name, ALL[name].kind or str)
            hint = Annotated[kind | None if default is None else kind, spelled(name, **settings)]  # type: ignore[valid-type]
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


class PairOptions(OptionGroup):
    """Options for target and draft: what drafts, and where and how both run."""

    names: ClassVar[Iterable[str]] = ("draft", "device", "draft_device", "num_threads", "kv")

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        from pystaged.backends import devices  # noqa: PLC0415

        with usage():
            devices.check(self.given["device"], self.given["kv"])
            devices.check(self.given["draft_device"])


class LoadOptions(PairOptions):
    """PairOptions, and the further options of loading."""

    names: ClassVar = tuple(LOADING)


def _sampling_settings() -> Iterator[tuple[str, dict[str, Any]]]:
    of_answers = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), "as the model's makers recommend")
    of_answers["seed"] = "-1"
    for name, option in SAMPLING.items():
        shown: dict[str, Any] = {"rich_help_panel": "Penalties and other rules", "show_default": str(option.default)}
        if name in of_answers:
            shown = {"show_default": f"{option.default}; in answers {of_answers[name]}"}
        elif name == "dry_sequence_breakers":
            shown["show_default"] = "a new line, a colon, a quote and an asterisk"
        elif not option.default:
            shown["show_default"] = False
        yield name, {"default": None, **shown}


class SamplingOptions(OptionGroup):
    """Options of sampling."""

    names: ClassVar = tuple(SAMPLING)
    settings: ClassVar = dict(_sampling_settings())

    def changed(self, **values: Any) -> SamplingOptions:
        """A copy with other values."""
        return SamplingOptions(**self.given | values)

    def fields(self) -> dict[str, Any]:
        """The values given, as SamplingConfig takes them. Raises ValueError for an invalid bias."""
        found = dict(self.given)
        if "logit_bias" in found:
            found["logit_bias"] = _biases(found["logit_bias"])
        if "dry_sequence_breakers" in found:
            found["dry_sequence_breakers"] = [text for text in found["dry_sequence_breakers"] if text != "none"]
        return found | ({"seed": None} if found.get("seed") == -1 else {})

    def config(self, recommended: Mapping[str, Any] | None = None) -> SamplingConfig:
        """The options as a SamplingConfig.

        Args:
            recommended: values for options of an answer that are not given; its seed is then drawn.

        Raises:
            ValueError: an option is out of range; the message names it.
        """
        from pystaged import SamplingConfig  # noqa: PLC0415

        defaults = {} if recommended is None else {**recommended, "seed": None}
        return SamplingConfig(**defaults | self.fields())


def _biases(words: list[str]) -> dict[int | str, float]:
    """Parse biases, written 15043+1 or 15043-1 as in llama.cpp, or TEXT=BIAS.

    Raises:
        ValueError: one is neither; the message names it.
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


class GrammarOptions(OptionGroup):
    """Options that constrain the output; at most one may be given."""

    names: ClassVar = ("json_schema", "regex", "grammar")

    def options(self) -> dict[str, Any]:
        """The options for the engine. Raises OSError and ValueError for a file that cannot be read."""
        found = dict(self.given)
        if "json_schema" in found and found["json_schema"].lstrip()[:1] != "{":
            found["json_schema"] = _read_grammar(found["json_schema"])
        if "grammar" in found and not re.search(r"::=|\bstart\s*(\[[^\]]*\]\s*)?:", found["grammar"]):
            found["grammar"] = _read_grammar(found["grammar"])
        if len(found) > 1:
            raise typer.BadParameter("give one of --json-schema, --regex and --grammar")
        return found


def _read_grammar(path: str) -> str:
    """Read a schema or grammar from a file or pipe."""
    if not path:
        raise typer.BadParameter("a schema or grammar is empty")
    return read_text(path)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Adapt a command to Typer: the members of parameters that are groups or dataclasses become options."""
    groups: dict[str, tuple[Any, list[inspect.Parameter]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        members = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        if isinstance(parameter.annotation, type) and issubclass(parameter.annotation, OptionGroup):
            members = [*parameter.annotation.parameters()]
            groups[name] = parameter.annotation, members
        elif is_dataclass(parameter.annotation):
            made: Any = parameter.annotation
            signature = inspect.signature(made, eval_str=True)
            members = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
            groups[name] = parameter.annotation, members
        parameters += members

    def run(**values: Any) -> None:
        for name, (group, members) in groups.items():
            values[name] = group(**{member.name: values.pop(member.name) for member in members})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
