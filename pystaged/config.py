"""Checked options of a generation."""

from __future__ import annotations

import json
import math
import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, SupportsFloat

import numpy as np

from pystaged._core import LogitRules, Sampling
from pystaged.aliases import KEYWORDS, meant
from pystaged.options import LOADING, SAMPLING, TEXT, Option, SamplingOptions, TextFields

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LARGEST_FLOAT = 3.4e38  # a float in C++
_LARGEST_BIAS = 1e30  # the same as in C++
NO_LIMIT = 2**31 - 1  # max_tokens that no context can hold
_POSITIONAL = ("temperature", "top_k", "top_p", "min_p", "seed")


def _described(options: Mapping[str, Option]) -> str:
    """Docstring lines for options."""
    lines = (f"    {name}: {option.help} Default: {option.default!r}." for name, option in options.items())
    return "\n".join(lines)


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
        fields: dict[str, Any] = dict(given)
        for name, value in zip(_POSITIONAL, first, strict=False):
            if name in fields:
                raise TypeError(f"{name} is given twice")
            fields[name] = value
        check_options(fields, SamplingOptions)
        values = {name: option.default for name, option in SAMPLING.items()} | fields
        if values["seed"] is None:
            values["seed"] = secrets.randbits(32)
        values = {name: checked(name, SAMPLING[name], value) for name, value in values.items()}
        values["dry_sequence_breakers"] = _texts("dry_sequence_breakers", values["dry_sequence_breakers"])
        values["logit_bias"] = _Biases(_biases(values["logit_bias"]))
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, values.get(name))
        # Also made if it needs binding, so that C++ checks all ranges; 0 stands for the unknown ids of strings.
        biases = [(token if isinstance(token, int) else 0, bias) for token, bias in self.logit_bias.items()]
        rules = self.native_rules(logit_bias=biases)
        native = self.native_sampling(rules if self.has_rules else None)
        object.__setattr__(self, "_native", None if self.needs_binding else native)

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any], Sampling | None]]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "_native"}
        return _restore, (values, self._native)

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
                "bind the sampling to them with pystaged.sampling.bind"
            )
        return self._native

    def native_rules(self, **of_text: Any) -> LogitRules:
        """The C++ object for the changes of logits before filtering.

        Args:
            **of_text: arguments of LogitRules that depend on the sequence.
        """
        names = ["repeat_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n"]
        names += ["dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"]
        return LogitRules(**{name: getattr(self, name) for name in names}, **of_text)

    def native_sampling(self, rules: LogitRules | None, logprobs: int | None = None) -> Sampling:
        """The C++ object for sampling with these rules."""
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            typical_p=self.typical_p,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            temperature_last=self.temperature_last,
            rules=rules,
            logprobs=-1 if logprobs is None else logprobs,
        )

    def with_native(self, native: Sampling) -> SamplingConfig:
        """A copy with the C++ object for one sequence."""
        return _restore({name: getattr(self, name) for name in self.__dataclass_fields__}, native)

    @property
    def _has_dry(self) -> bool:
        return bool(self.dry_multiplier and self.dry_penalty_last_n)


# Most characters of each string, and of all of them together.
_LONGEST_TEXTS = {"stop": (1 << 16, 1 << 16), "dry_sequence_breakers": (40, 640)}

SamplingConfig.__doc__ = f"{SamplingConfig.__doc__}Args:\n{_described(SAMPLING)}\n"


class _Biases(dict[Any, Any]):
    """An immutable dictionary."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the logit_bias of a SamplingConfig is immutable; make a new config by dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, tuple[dict[Any, Any]]]:
        return _Biases, (dict(self),)


def _restore(values: dict[str, Any], native: Sampling | None) -> SamplingConfig:
    """A config of fields that were checked before."""
    config = object.__new__(SamplingConfig)
    for name, value in (values | {"_native": native}).items():
        object.__setattr__(config, name, value)
    return config


def _biases(given: object) -> dict[int | str, float]:
    """Check a logit bias, except whether its tokens exist."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"logit_bias must be a mapping of tokens to numbers, not {type(given).__name__}")
    biases: dict[int | str, float] = {}
    for key, value in given.items():
        token = key if isinstance(key, str) else integer("a token of logit_bias", key)
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
        biases[token] = _number(f"logit_bias of token {token!r}", value)
    return biases


class TextOptions(TextFields, total=False):
    """Options of a generation. `sampling` may stand for all fields of SamplingConfig. Only one of json_schema, regex
    and grammar may be given; the text ends when it is complete, regardless of min_tokens and ignore_eos, and is cut
    off at max_tokens.

    sampling: how tokens are chosen.
    progress: called during prefill with the tokens that are done and the tokens in all, before the first piece of a
        few hundred and after each; in the thread that reads the stream.
    """

    sampling: SamplingConfig
    progress: Callable[[int, int], object] | None


TextOptions.__doc__ = f"{TextOptions.__doc__}\n{_described(TEXT)}\n"


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
        sampling, progress = given.pop("sampling", None), given.pop("progress", None)
        text = {name: given.pop(name, option.default) for name, option in TEXT.items()}
        if sampling is not None and not isinstance(sampling, SamplingConfig):
            raise TypeError(f"sampling must be a SamplingConfig, not {type(sampling).__name__}")
        if sampling is not None and given:
            raise TypeError(f"give either sampling or {min(given)}, not both")
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be a function of two numbers, not {type(progress).__name__}")
        text = {name: checked(name, TEXT[name], value) for name, value in text.items()}
        text["stop"], text["prediction"] = _texts("stop", text["stop"]), _prediction(text["prediction"])
        text["grammar"] = _grammar(text.pop("json_schema"), text.pop("regex"), text["grammar"])
        sampling = sampling or SamplingConfig(**given)
        if sampling.min_tokens > text["max_tokens"]:
            raise ValueError(f"min_tokens, {sampling.min_tokens}, must be at most max_tokens, {text['max_tokens']}")
        for name, value in (text | {"sampling": sampling, "progress": progress}).items():
            object.__setattr__(self, name, value)


def checked(name: str, option: Option, value: Any) -> Any:
    """Check the type and range of a value whose option is a number or a bool."""
    if option.kind is None or (value is None and option.default is None):
        return value
    value = {bool: truth, int: integer, float: _number}[option.kind](name, value)
    option.check_range(name, value)
    return value


def _prediction(given: object) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"prediction must be text or token ids, not {type(given).__name__}")
    return tuple(integer("a token of the prediction", token) for token in given)


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


def _grammar(json_schema: object, regex: object, grammar: object) -> Grammar | None:
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    given = {option: value for option, value in given.items() if value is not None}
    if len(given) > 1:
        raise TypeError(f"give one of {', '.join(given)}, not {len(given)}")
    if isinstance(grammar, Grammar):
        return grammar  # from dataclasses.replace of a config
    for option, value in given.items():
        if isinstance(value, str):
            text = value
        elif option == "json_schema" and isinstance(value, Mapping):
            try:
                text = json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"json_schema cannot be written as JSON: {error}") from None
        else:
            kind = "a dictionary or JSON text" if option == "json_schema" else "a string"
            raise TypeError(f"{option} must be {kind}, not {type(value).__name__}")
        try:
            text.encode()
        except UnicodeError:
            raise ValueError(f"{option} is not valid Unicode text") from None
        return Grammar(option, text)
    return None


def integer(name: str, value: object) -> int:
    """Convert to int, also from numpy's integers. Raises TypeError."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, not {type(value).__name__}")


def truth(name: str, value: object) -> bool:
    """Convert to bool, also from numpy's. Raises TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _number(name: str, value: object) -> float:
    """Convert to float, also from numpy's numbers. Raises TypeError, ValueError."""
    if (
        type(value) is not float
        and type(value) is not int
        and (isinstance(value, bool) or not isinstance(value, SupportsFloat))
    ):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if abs(value) > _LARGEST_FLOAT:  # type: ignore[arg-type]
        raise ValueError(f"{name} must be at most {_LARGEST_FLOAT:g}")
    return float(value)
