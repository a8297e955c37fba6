"""Checked options."""

from __future__ import annotations

import json
import math
import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, SupportsFloat

import numpy as np

from pystaged._core import LogitRules, Sampling
from pystaged.options.aliases import KEYWORDS, meant
from pystaged.options.table import (
    INSTEAD,
    LOADING,
    SAMPLING,
    TEXT,
    FilterOptions,
    Option,
    PenaltyOptions,
    SamplingOptions,
    TextFields,
    described,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LARGEST_FLOAT = 3.4e38  # a float in C++
_LARGEST_BIAS = 1e30  # the same as in C++
NO_LIMIT = 2**31 - 1  # max_tokens that no context can hold
_POSITIONAL = ("temperature", "top_k", "top_p", "min_p", "seed")
_FILTERS = FilterOptions.__annotations__.keys()
_PENALTIES = PenaltyOptions.__annotations__.keys() - _FILTERS


@dataclass(frozen=True, slots=True, init=False)
class SamplingConfig:
    """Checked options of sampling. Logits are changed first, by logit bias, min_tokens and ignore_eos, penalties, DRY;
    then filters apply in the order temperature, top-k, typical, top-p, min-p, XTC. Each works as in
    llama.cpp, their order is that of transformers; by default all are off.

    Raises:
        ValueError: a field is out of range.
        TypeError: a field of the wrong type, or an unknown one.

    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    temperature_last: bool
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: tuple[str, ...]
    logit_bias: Mapping[int | str, float] = field(hash=False)
    min_tokens: int
    ignore_eos: bool
    _native: Sampling | None = field(init=False, repr=False, compare=False)

    def __init__(self, *first: Any, **given: Unpack[SamplingOptions]) -> None:
        if len(first) > len(_POSITIONAL):
            raise TypeError(f"only {', '.join(_POSITIONAL)} may be positional arguments")
        fields: dict[str, Any] = dict(zip(_POSITIONAL, first, strict=False))
        if fields.keys() & given:
            raise TypeError(f"{min(fields.keys() & given)} is given twice")
        fields |= given
        check_options(fields, SamplingOptions)
        if fields.get("seed", 0) is None:
            fields["seed"] = secrets.randbits(32)
        values = checked(SAMPLING, fields)
        values["dry_sequence_breakers"] = _texts("dry_sequence_breakers", values["dry_sequence_breakers"])
        values["logit_bias"] = _Biases(_biases(values["logit_bias"]))
        _set(self, values)
        # Also made if it needs binding, so that C++ checks all ranges; 0 stands for the unknown ids of strings.
        biases = [(token if isinstance(token, int) else 0, bias) for token, bias in self.logit_bias.items()]
        rules = self.native_rules(logit_bias=biases)
        native = self.native_sampling(rules if self.has_rules else None)
        _set(self, {"_native": None if self.needs_binding else native})

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy: the likeliest token is always chosen."""
        return self.temperature == 0

    @property
    def has_rules(self) -> bool:
        """Whether logits are changed before they are filtered."""
        penalizes = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        return bool(
            (penalizes and self.repeat_last_n) or self._has_dry or self.logit_bias or self.min_tokens or self.ignore_eos
        )

    @property
    def needs_binding(self) -> bool:
        """Whether it has options that depend on a vocabulary or a prompt's length: see sampling.bind."""
        breaks = self._has_dry and self.dry_sequence_breakers
        spelled = any(isinstance(token, str) for token in self.logit_bias)
        return bool(breaks or spelled or self.min_tokens or self.ignore_eos)

    @property
    def native(self) -> Sampling:
        """The C++ object. Raises ValueError if the config is not bound to a sequence: see sampling.bind."""
        if self._native is None:
            raise ValueError(
                "min_tokens, ignore_eos, dry_multiplier and strings in logit_bias need a vocabulary and a prompt: "
                "bind the sampling to them with pystaged.sampling.binding.bind"
            )
        return self._native

    def native_rules(self, **of_text: Any) -> LogitRules:
        """The C++ object for the changes of logits before filtering.

        Args:
            **of_text: arguments of LogitRules that depend on the sequence.
        """
        return LogitRules(**{name: getattr(self, name) for name in _PENALTIES}, **of_text)

    def native_sampling(self, rules: LogitRules | None, logprobs: int | None = None) -> Sampling:
        """The C++ object for sampling with these rules."""
        filters = {name: getattr(self, name) for name in _FILTERS}
        return Sampling(**filters, rules=rules, logprobs=-1 if logprobs is None else logprobs)

    def with_native(self, native: Sampling) -> SamplingConfig:
        """A copy with the C++ object for one sequence."""
        config = copy(self)
        _set(config, {"_native": native})
        return config

    @property
    def _has_dry(self) -> bool:
        return bool(self.dry_multiplier and self.dry_penalty_last_n)


# Most characters of each string, and of all of them together.
_LONGEST_TEXTS = {"stop": (1 << 16, 1 << 16), "dry_sequence_breakers": (40, 640)}

SamplingConfig.__doc__ = f"{SamplingConfig.__doc__}Args:\n{described(SAMPLING)}\n"


class _Biases(dict[Any, Any]):
    """An immutable dictionary."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the logit_bias of a SamplingConfig is immutable; make a new config by dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, tuple[dict[Any, Any]]]:
        return _Biases, (dict(self),)


def _set(config: object, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(config, name, value)


def _biases(given: object) -> dict[int | str, float]:
    """Check a logit bias, except whether its tokens exist."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"logit_bias must be a mapping of tokens to numbers, not {type(given).__name__}")
    biases: dict[int | str, float] = {}
    for key, value in given.items():
        token = key if isinstance(key, str) else convert("a token of logit_bias", int, key)
        if isinstance(token, int) and not 0 <= token < 2**31:
            raise ValueError(f"logit_bias names token {token}, which is out of range")
        if value == -math.inf:
            biases[token] = -math.inf
            continue
        if isinstance(value, SupportsFloat) and not abs(value) <= _LARGEST_BIAS:  # type: ignore[arg-type]
            raise ValueError(
                f"logit_bias of token {token!r} must be a number from {-_LARGEST_BIAS:g} to {_LARGEST_BIAS:g}, or -inf "
                f"to exclude it, not {value}"
            )
        biases[token] = convert(f"logit_bias of token {token!r}", float, value)
    return biases


class TextOptions(TextFields, total=False):
    """Options of a generation. `sampling` may stand for all fields of SamplingConfig. Only one of json_schema, regex
    and grammar may be given; the text ends when it is complete, regardless of min_tokens and ignore_eos, and is cut
    off at max_tokens.

    sampling: how tokens are chosen.
    """

    sampling: SamplingConfig


TextOptions.__doc__ = f"{TextOptions.__doc__}\n{described(TEXT)}\n"


def check_options(given: Iterable[str], options: type[Any]) -> None:
    """Check that names are keys of a TypedDict.

    Raises:
        TypeError: naming the first unknown one, and all options.
    """
    unknown = set(given) - options.__annotations__.keys()
    if not unknown:
        return
    name = min(unknown)
    names = options.__annotations__
    theirs = [word for word, ours in KEYWORDS.items() if ours in names]
    likely = KEYWORDS.get(name) or meant(name, [*names, *theirs, *LOADING])
    likely = KEYWORDS.get(likely or "", likely)
    hint = "; the"
    if likely in names or likely == "n":
        hint = f"; did you mean {likely}? The"
    elif likely in LOADING:
        hint = f"; {likely} is an option of load. The"
    elif likely:
        hint = f": {likely}; the"
    raise TypeError(f"there is no option {name!r}{hint} options are {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text. option: json_schema, regex or grammar; text: the value of that option."""

    option: str
    text: str


@dataclass(frozen=True, slots=True, init=False)
class GenerationConfig:
    """Checked TextOptions.

    Raises:
        ValueError: an option out of range, or an empty stop string.
        TypeError: an option of the wrong type, an unknown one, or both `sampling` and one of its fields.
    """

    sampling: SamplingConfig
    max_tokens: int
    stop: tuple[str, ...]
    stop_loops: bool
    grammar: Grammar | None
    speculate: bool
    progress: Callable[[int, int], object] | None
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    reuse: bool
    prediction: str | tuple[int, ...]

    def __init__(self, **given: Any) -> None:
        check_options(given, TextOptions)
        sampling = given.pop("sampling", None)
        values = checked(TEXT, {name: given.pop(name) for name in TEXT if name in given})
        if sampling is not None and not isinstance(sampling, SamplingConfig):
            raise TypeError(f"sampling must be a SamplingConfig, not {type(sampling).__name__}")
        if sampling is not None and given:
            raise TypeError(f"give either sampling or {min(given)}, not both")
        values["stop"], values["prediction"] = _texts("stop", values["stop"]), _prediction(values["prediction"])
        values["grammar"] = _grammar({name: values.pop(name) for name in ("json_schema", "regex", "grammar")})
        values["sampling"] = sampling = sampling or SamplingConfig(**given)
        if sampling.min_tokens > values["max_tokens"]:
            raise ValueError(f"min_tokens, {sampling.min_tokens}, must be at most max_tokens, {values['max_tokens']}")
        _set(self, values)


def checked(options: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all options of a table, of those not given the defaults.

    Raises:
        ValueError, TypeError: a value is out of range, or of the wrong type; the message begins with its name.
    """
    values = {}
    for name, option in options.items():
        value = given.get(name, option.default)
        if value is not None or not option.allows_none:
            value = convert(name, option.kind, value) if option.kind else value
            option.check_range(name, value)
        values[name] = value
    return values


def _prediction(given: object) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"prediction must be text or token ids, not {type(given).__name__}")
    return tuple(convert("a token of the prediction", int, token) for token in given)


def _texts(name: str, given: object) -> tuple[str, ...]:
    """Check one string or several: none may be empty or too long."""
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise TypeError(f"{name} must be a string or a sequence of strings, not {type(given).__name__}")
    strings = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(text, str) for text in strings):
        raise TypeError(f"{name} must be a string or a sequence of strings")
    if "" in strings:
        raise ValueError("a stop string must not be empty" if name == "stop" else f"{name} must not be empty")
    each, most = _LONGEST_TEXTS[name]
    if longer := next((text for text in strings if len(text) > each), None):
        raise ValueError(f"{name} has a string of {len(longer)} characters; at most {each} are allowed")
    if (total := sum(map(len, strings))) > most:
        raise ValueError(f"{name} has {total} characters in all; at most {most} are allowed")
    try:
        "".join(strings).encode()
    except UnicodeError:
        raise ValueError(f"{name} is not valid Unicode text") from None
    return strings


def _grammar(given: Mapping[str, Any]) -> Grammar | None:
    given = {option: value for option, value in given.items() if value is not None}
    if len(given) > 1:
        raise TypeError(f"give one of {', '.join(given)}, not {len(given)}")
    for option, text in given.items():
        if isinstance(text, Grammar):
            return text  # from dataclasses.replace of a config
        if isinstance(text, Mapping):
            try:
                text = json.dumps(text)  # noqa: PLW2901
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"json_schema cannot be written as JSON: {error}") from None
        if not isinstance(text, str):
            kind = f"{type(text).__name__}; pydantic's are Model.model_json_schema()"
            raise TypeError(f"json_schema must be a dictionary or JSON text, not {kind}")
        try:
            text.encode()
        except UnicodeError:
            raise ValueError(f"{option} is not valid Unicode text") from None
        return Grammar(option, text)
    return None


def convert(name: str, kind: Any, value: Any) -> Any:
    """Check that a value is of a kind of Option.kind, and convert numpy's numbers. Raises TypeError, ValueError."""
    if kind is bool and isinstance(value, (bool, np.bool_)):
        return bool(value)
    if kind is int and not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    if kind is float and (type(value) in (float, int) or isinstance(value, SupportsFloat)) and type(value) is not bool:
        if abs(value) > _LARGEST_FLOAT:
            raise ValueError(f"{name} must be at most {_LARGEST_FLOAT:g}")
        return float(value)
    if isinstance(value, _OTHERS.get(kind, ())):
        return value
    what = repr(value) if kind is bool else type(value).__name__
    raise TypeError(f"{name} must be {_WORDS[kind]}, not {what}{INSTEAD.get(name, '') * (value is None)}")


_OTHERS: dict[Any, Any] = {str: (str, Grammar), Path: (str, Path), Callable: Callable}
_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a name or a path",
    Callable: "a function",
}
