"""Options of commands, most of them made from pystaged.options.table."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pystaged.options.table import ALL, LOADING, SAMPLING, TEXT, Option, flags
from pystaged.options.words import biases, read_form, read_system, size

if TYPE_CHECKING:
    from pystaged.engine import Engine
    from pystaged.options.config import SamplingConfig

GRAMMARS = ("json_schema", "regex", "grammar")
# What commands offer.
OF_LOADING, OF_TEXTS = ({name: table[name] for name in table if flags(name, table[name])} for table in (LOADING, TEXT))


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
    from pystaged.options.config import NO_LIMIT  # noqa: PLC0415

    return NO_LIMIT if check(tokens) in (0, -1) else tokens


def check_seed(seed: int | None) -> int | None:
    """Refuse what is neither a seed nor -1, which draws one."""
    if seed is not None and not -1 <= seed < 2**64:
        raise typer.BadParameter(f"must be at least -1 and at most {2**64 - 1}")
    return seed


@contextmanager
def usage() -> Iterator[None]:
    """Turn errors about options into usage errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None


def check_device(name: str) -> str:
    """A device's checked name."""
    from pystaged.backends import devices  # noqa: PLC0415

    with usage():
        return devices.check(check(name))


def check_type(name: str | None) -> str | None:
    """Refuse an invalid type of a file; "" and None stand for none."""
    from pystaged.loading import quantize  # noqa: PLC0415

    with usage():
        return quantize.check_type(name) if name else name


def one_of(*values: str) -> dict[str, Any]:
    """Settings of an option that refuses and completes no other values, in any case; "" among them stands for none."""

    def check(value: str) -> str:
        if value.lower() not in values:
            raise typer.BadParameter(f"must be {' or '.join(filter(None, values))}, not {value!r}")
        return value.lower()

    def like(incomplete: str) -> list[str]:
        return [value for value in values if value and value.startswith(incomplete)]

    return {"callback": check, "autocompletion": like}


def size_of(value: str | int) -> int:
    """Parse a number of bytes: 2G, 2GB and 2 GiB are 2 * 2**30."""
    with usage():
        return size(str(value))


def either(model: str | None, named: str | None, needed: str = "") -> str | None:
    """The model that a command's argument or --model names, None for neither; needed: what for, if it must be named."""
    if model is not None and named is not None:
        raise typer.BadParameter("name the model once, by MODEL or --model")
    if needed and not (model or named):
        raise typer.BadParameter(f"name the model {needed}")
    return named if model is None else model


def models_like(incomplete: str) -> list[str]:
    """For completion: the models here and usual names of others, GGUF files and folders that begin like a word."""
    from pystaged.loading import names  # noqa: PLC0415
    from pystaged.options.aliases import MODELS  # noqa: PLC0415

    here = glob(f"{escape(incomplete)}*")  # noqa: PTH207  Path would drop ./
    paths = [f"{path}/" if Path(path).is_dir() else path for path in here]
    found = [*names.here(), *MODELS, *(path for path in paths if path.endswith((".gguf", "/")))]
    return [name for name in found if name.startswith(incomplete)]


# Typer's settings for options, besides their table.
_TYPER: dict[str, dict[str, Any]] = {
    "json_schema": {"metavar": "FILE|JSON"},
    "grammar": {"metavar": "FILE|GRAMMAR"},
    "draft": {"metavar": "MODEL", "autocompletion": models_like},
    "kv": one_of("f16", "q8_0"),
    "kv_memory": {"metavar": "SIZE", "parser": size_of, "callback": None, "min": None},
    "prompt_cache": {"metavar": "FOLDER|auto"},
    "prompt_cache_size": {"metavar": "SIZE", "parser": size_of, "callback": None, "min": None, "show_default": "8G"},
    "seed": {"callback": check_seed},
    "dry_sequence_breakers": {"show_default": "a new line, a colon, a quote and an asterisk"},
    "max_tokens": {"min": -1, "callback": token_limit},
    "stop_loops": {"show_default": "on for answers"},
    "system": {"metavar": "TEXT|@FILE", "callback": read_system},
    "color": {"metavar": "none|stages"} | one_of("none", "stages"),
}
# Options of commands that write texts, besides those of pystaged.options.table.
SHOWN = {
    "system": Option("", "System message: how the model should answer.", type=str),
    "think": Option(
        None,
        "Whether a model that can think does so first; by default its template decides.",
        flags=("--think/--no-think",),
        type=bool | None,
    ),
    "color": Option("none", "Colour tokens by the stage that proposed them, in terminals.", type=str),
    "show_tree": Option(
        False, "Draw each draft tree, with its accepted path bright.", flags=("--show-tree",), type=bool
    ),
}
_MORE = {
    "dry_sequence_breakers": " May be repeated; 'none' for no strings.",
    "logit_bias": " Written 15043+1, 15043-inf or ' Hello=-2.5'; may be repeated.",
    "stop": " May be repeated.",
}
_OF_ANSWERS = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), "as the model's makers recommend") | {
    "seed": "-1"
}


def spelled(name: str, given: Option | None = None, **settings: Any) -> Any:
    """An option for Typer, by default of pystaged.options.table; settings replace usual arguments of typer.Option."""
    option = given or ALL[name]
    usual: dict[str, Any] = {"help": option.help + _MORE.get(name, ""), "callback": check}
    usual["metavar"] = {int: "N", float: "X", Path: "FILE"}.get(option.kind, "TEXT")
    if name in _OF_ANSWERS:
        usual["show_default"] = f"{option.default}; in answers {_OF_ANSWERS[name]}"
    elif name in SAMPLING:
        usual["rich_help_panel"] = "Penalties and other rules"
        usual["show_default"] = str(option.default) if option.default else False
    elif name not in TEXT:  # that of others is checked by their config
        usual["min"] = option.ge
    if name in LOADING:
        usual["rich_help_panel"] = "Model and drafts"
    return typer.Option(*flags(name, option), **usual | _TYPER.get(name, {}) | settings)


def option(default: Any, help: str, *names: str, **settings: Any) -> Any:
    """An option as the default of a command's parameter; settings as in `spelled`."""
    return typer.Option(default, *names, help=help, **{"callback": check} | settings)


LIMIT_HELP = "Maximum number of new tokens; 0 or -1 for as many as the context has room for"
MODEL_HELP = "Path of a GGUF file, name in the cache, hub id, 'smollm2' or 'bundled'."
DEFAULT_MODEL = "smollm2; bundled if that is not installed"  # names.default_model
_MODEL: dict[str, Any] = {"metavar": "MODEL", "autocompletion": models_like, "callback": None}
MODEL_ARGUMENT: Any = typer.Argument(None, help=MODEL_HELP, show_default=DEFAULT_MODEL, **_MODEL)
MODEL_OPTION = option(None, MODEL_HELP, "--model", "-m", show_default=DEFAULT_MODEL, **_MODEL)
MODEL_TOO = option(None, "The same as MODEL.", "--model", "-m", **_MODEL)
HOST = option("127.0.0.1", "Address to listen on; the default is reachable from this machine only.")
Threads = Annotated[int, spelled("num_threads")]
KeysAndValues = Annotated[str, spelled("kv")]
ContextLength = Annotated[int, spelled("n_ctx")]
KvMemory = Annotated[int | None, spelled("kv_memory")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


class Given(dict[str, Any]):
    """Options of pystaged.options.table and SHOWN that a command was given, by name, as the engine takes them."""

    @property
    def paints(self) -> bool:
        """Whether tokens are coloured by stage."""
        return self.get("color") == "stages"

    def sampling(self, engine: Engine) -> SamplingConfig:
        """The sampling of an answer: as the model's makers recommend where nothing is given. Raises ValueError."""
        from pystaged.options.config import SamplingConfig  # noqa: PLC0415

        return SamplingConfig(**engine.recommended_sampling | {"seed": None} | self.only(SAMPLING))

    def of_template(self) -> dict[str, bool]:
        """Options of the chat template."""
        return {"enable_thinking": self["think"]} if "think" in self else {}

    def only(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of these names."""
        return {name: self[name] for name in names if name in self}


Adapts = Callable[[Callable[..., None]], Callable[..., None]]


def takes(options: Mapping[str, Option], **changed: Mapping[str, Any]) -> Adapts:
    """Replace a command's parameter `given`, a Given, by options, some with changed settings or another `default`."""
    members = [_parameter(name, option, **changed.get(name, {})) for name, option in options.items()]

    def adapted(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            parameters += members if each.name == "given" else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

        def run(**values: Any) -> None:
            command(given=_given({each.name: values.pop(each.name) for each in members}), **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return adapted


def _given(values: dict[str, Any]) -> Given:
    """The values given, as the engine takes them. Raises OSError and ValueError for a file that cannot be read."""
    found = Given((name, value) for name, value in values.items() if value is not None and value != [])
    forms = found.only(("json_schema", "grammar"))
    if "" in forms.values():
        raise typer.BadParameter("a schema or grammar is empty")
    if len(found.only(GRAMMARS)) > 1:
        raise typer.BadParameter("give one of --json-schema, --regex and --grammar")
    found |= {name: read_form(name, words) for name, words in forms.items()}
    if "dry_sequence_breakers" in found:
        found["dry_sequence_breakers"] = [text for text in found["dry_sequence_breakers"] if text != "none"]
    if found.get("seed") == -1:
        found["seed"] = None
    with usage():
        if "logit_bias" in found:
            found["logit_bias"] = biases(found["logit_bias"])
        if "device" in found:
            from pystaged.backends import devices  # noqa: PLC0415

            devices.check(found["device"], found["kv"])
            devices.check(found["draft_device"])
    return found


def _parameter(name: str, option: Option, **settings: Any) -> inspect.Parameter:
    """An option as a parameter of a command; those of a text, and lists, are None if they are not given."""
    is_list = isinstance(option.default, tuple) or name == "logit_bias"
    usual = None if is_list or name in TEXT or name in SAMPLING else option.default
    default = settings.pop("default", usual)
    kind = list[str] if is_list else Path if name in ("ngrams", "prompts") else option.plain
    kind = kind | None if default is None else kind
    hint: Any = Annotated[kind, spelled(name, option, **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
