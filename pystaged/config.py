"""Options of a generation, checked once where they enter."""

from __future__ import annotations

import json
import math
import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsFloat, TypedDict

import numpy as np

from pystaged._core import LogitRules, Sampling
from pystaged.elsewhere import KEYWORDS, meant

_LARGEST_FLOAT = 3.4e38  # a float in C++
_LARGEST_BIAS = 1e30  # as C++ has it
NO_LIMIT = 2**31 - 1  # as max_tokens: no fewer than a context has
MOST_LOGPROBS = 100  # likeliest tokens of each place, which are Python objects; others allow 20

DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's


@dataclass(frozen=True, slots=True, init=False)
class SamplingConfig:
    """How tokens are chosen. Logits are changed first: logit bias, min_tokens and ignore_eos, penalties, DRY; then
    filters apply in the order temperature, top-k, typical, top-p, min-p, XTC. The rules are llama.cpp's, also where
    transformers has others; by default all are off.

    temperature: 0 is greedy.
    top_k: keep this many of the likeliest tokens, 0 keeps all.
    top_p: keep the fewest tokens that together have at least this probability, 1 keeps all.
    min_p: keep tokens at least this likely relative to the likeliest, 0 keeps all.
    seed: together with the prompt it fixes the text, however it is drafted; None draws one.
    typical_p: keep the fewest tokens that together have more than this probability, those first whose surprise, -log p,
        is nearest to the mean; 1 keeps all.
    xtc_probability, xtc_threshold: with this probability, of the tokens at least as likely as the threshold only the
        least likely stays; 0, or a threshold above 0.5, is off.
    temperature_last: apply the temperature after all filters, as llama.cpp does.
    repeat_penalty: positive logits of tokens that the text has already are divided by it, others multiplied; 1 is off.
    presence_penalty, frequency_penalty: what logits of such tokens lose, once and for each time; 0 is off.
    repeat_last_n: tokens that these three look back, those of the prompt too; -1 for all, 0 for none.
    dry_multiplier, dry_base, dry_allowed_length: a token that would make a repetition of n tokens longer loses
        multiplier * base ** (n - allowed_length), from n = allowed_length on; a multiplier of 0 is off.
    dry_penalty_last_n: tokens that DRY looks back, those of the prompt too; -1 for all, 0 for none.
    dry_sequence_breakers: texts that no repetition goes beyond; 40 characters each, as in llama.cpp, 640 in all.
    logit_bias: what is added to logits, by token: an id, or a text that is one token; from -1e30 to 1e30, or -inf,
        which excludes it.
    min_tokens: new tokens before which the end of text is excluded; stop strings end it all the same.
    ignore_eos: exclude the end of text altogether.

    Raises:
        ValueError: naming the field that is out of range.
        TypeError: a field of the wrong type.
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

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = 0,
        *,
        typical_p: float = 1.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        temperature_last: bool = False,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_last_n: int = 64,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int = -1,
        dry_sequence_breakers: str | Sequence[str] = DRY_SEQUENCE_BREAKERS,
        logit_bias: Mapping[int | str, float] | None = None,
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        given = locals()
        fields = self.__dataclass_fields__
        values: dict[str, Any] = {
            name: _number(name, given[name]) for name, each in fields.items() if each.type == "float"
        }
        values |= {name: integer(name, given[name]) for name in _COUNTS}
        for name, least in _COUNTS.items():
            if not least <= values[name] < 2**31:
                off = {0: "0 (off) or a positive number of tokens", -1: "a number of tokens, or -1 for the whole text"}
                raise ValueError(f"{name} must be {off[least]}, not {values[name]}")
        values["seed"] = secrets.randbits(32) if seed is None else integer("seed", seed)
        if not 0 <= values["seed"] < 2**64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, not {seed}")
        values |= {name: truth(name, given[name]) for name in ("temperature_last", "ignore_eos")}
        values["dry_sequence_breakers"] = _texts("dry_sequence_breakers", dry_sequence_breakers)
        values["logit_bias"] = _Biases(_biases(logit_bias))
        for name in fields:
            object.__setattr__(self, name, values.get(name))
        # Made here, too, so that C++ checks all ranges. A text in logit_bias has no id yet: 0 stands for it.
        biases = [(token if isinstance(token, int) else 0, bias) for token, bias in self.logit_bias.items()]
        rules = self.native_rules(logit_bias=biases)
        native = self.native_sampling(rules if self.has_rules else None)
        object.__setattr__(self, "_native", None if self.needs_binding else native)

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any], Sampling | None]]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "_native"}
        return _restore, (values, self._native)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
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
        """Whether it has something that only a vocabulary or a prompt's length gives a meaning: see sampling.bind."""
        breaks = self._has_dry and self.dry_sequence_breakers
        spelled = any(isinstance(token, str) for token in self.logit_bias)
        return bool(breaks or spelled or self.min_tokens or self.ignore_eos)

    @property
    def native(self) -> Sampling:
        """For C++. Raises ValueError where the config is not bound to a text yet: see sampling.bind."""
        if self._native is None:
            raise ValueError(
                "min_tokens, ignore_eos, dry_multiplier and texts in logit_bias need a vocabulary and a prompt: "
                "bind the sampling to them with pystaged.sampling.bind"
            )
        return self._native

    def native_rules(self, **of_text: Any) -> LogitRules:
        """C++'s form of what is done to logits before they are filtered.

        Args:
            **of_text: what only a text knows, as LogitRules takes it.
        """
        names = ["repeat_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n"]
        names += ["dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"]
        return LogitRules(**{name: getattr(self, name) for name in names}, **of_text)

    def native_sampling(self, rules: LogitRules | None, logprobs: int | None = None) -> Sampling:
        """C++'s form of the rest, with these rules."""
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
        """The same with C++'s form for a certain text."""
        return _restore({name: getattr(self, name) for name in self.__dataclass_fields__}, native)

    @property
    def _has_dry(self) -> bool:
        return bool(self.dry_multiplier and self.dry_penalty_last_n)


# Characters that each string may have, and all of them together.
_LONGEST_TEXTS = {"stop": (1 << 16, 1 << 16), "dry_sequence_breakers": (40, 640)}
# Whole numbers, and the least of each.
_COUNTS = {"top_k": 0, "repeat_last_n": -1, "dry_allowed_length": 0, "dry_penalty_last_n": -1, "min_tokens": 0}


class _Biases(dict[Any, Any]):
    """A dictionary that does not change."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the logit_bias of a SamplingConfig does not change; make another one by dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, tuple[dict[Any, Any]]]:
        return _Biases, (dict(self),)


def _restore(values: dict[str, Any], native: Sampling | None) -> SamplingConfig:
    """The config of fields that were checked when they were given first."""
    config = object.__new__(SamplingConfig)
    for name, value in (values | {"_native": native}).items():
        object.__setattr__(config, name, value)
    return config


def _biases(given: object) -> dict[int | str, float]:
    """A logit bias, checked but for whether there are such tokens."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"logit_bias must be a mapping of tokens to numbers, not {type(given).__name__}")
    biases: dict[int | str, float] = {}
    for key, value in given.items():
        token = key if isinstance(key, str) else integer("a token of logit_bias", key)
        if isinstance(token, int) and not 0 <= token < 2**31:
            raise ValueError(f"logit_bias names token {token}, which no vocabulary has")
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


class TextOptions(TypedDict, total=False):
    """What a generation may be told. Those of SamplingConfig may come as one `sampling` instead.

    max_tokens: new tokens at most, 128 unless given.
    stop: one string or several that end the text before they appear in it; 65,536 characters in all.
    stop_loops: end the text, with finish_reason "loop", when its last tokens are one span of 1 to 512 over and over:
        three times or more, 128 tokens or more in all.
    json_schema: a schema, as a dictionary or as JSON text, that the text meets; regex: an expression that it matches;
        grammar: a grammar, in Lark's or llama.cpp's notation, that it follows. One of them; needs the extra "grammar".
        The text ends where nothing more may follow, whatever min_tokens and ignore_eos say, and is cut where max_tokens
        end.
    speculate: False decodes plainly; the text is the same.
    progress: called while the prompt is read, with how many of its tokens are and how many are to be: before the first
        few hundred and after each, so the last time with all of them; by who reads the text, as soon as it looks.
    logprobs: say how likely the model itself found each token, unfiltered at temperature 1 and before any penalty or
        bias, and which so many tokens, 100 at most, were the likeliest; None says nothing, and costs nothing.
    prompt_logprobs: the same of the prompt's tokens, which are then read anew.
    reuse: begin with what other texts have left of the prompt; without, the text is the same, only later.
    prediction: text or token ids that the text will largely repeat, such as code that is to be changed a little, to
        guess from. The text is the same.
    """

    max_tokens: int
    stop: str | Sequence[str]
    stop_loops: bool
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None
    speculate: bool
    progress: Callable[[int, int], object] | None
    logprobs: int | None
    prompt_logprobs: int | None
    reuse: bool
    prediction: str | Sequence[int]
    sampling: SamplingConfig
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
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
    dry_sequence_breakers: str | Sequence[str]
    logit_bias: Mapping[int | str, float] | None
    min_tokens: int
    ignore_eos: bool


def check_options(given: Iterable[str], options: type[Any]) -> None:
    """Refuse names that are none of a TypedDict's.

    Raises:
        TypeError: naming the first, and the options there are.
    """
    unknown = set(given) - options.__annotations__.keys()
    if not unknown:
        return
    name = min(unknown)
    likely = KEYWORDS.get(name) or meant(name, options.__annotations__)
    hint = "; the"
    if likely:
        hint = f"; did you mean {likely}? The" if likely in options.__annotations__ else f": {likely}; the"
    raise TypeError(f"there is no option {name!r}{hint} options are {', '.join(options.__annotations__)}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must be. option: which of json_schema, regex and grammar says so; text: what it says."""

    option: str
    text: str


@dataclass(frozen=True, slots=True, init=False)
class GenerationConfig:
    """What TextOptions says, checked.

    Raises:
        ValueError: an option out of range, or an empty stop string.
        TypeError: an option of the wrong type, an unknown one, or `sampling` beside one of its own.
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
    reuse: bool
    prediction: str | tuple[int, ...]

    def __init__(
        self,
        *,
        max_tokens: int = 128,
        stop: str | Sequence[str] = (),
        stop_loops: bool = False,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | Grammar | None = None,
        speculate: bool = True,
        progress: Callable[[int, int], object] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        reuse: bool = True,
        prediction: str | Sequence[int] = (),
        sampling: SamplingConfig | None = None,
        **fields: Any,
    ) -> None:
        check_options(fields, TextOptions)
        if sampling is not None and not isinstance(sampling, SamplingConfig):
            raise TypeError(f"sampling must be a SamplingConfig, not {type(sampling).__name__}")
        if sampling is not None and fields:
            raise TypeError(f"give either sampling or {min(fields)}, not both")
        max_tokens = integer("max_tokens", max_tokens)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        sampling = sampling or SamplingConfig(**fields)
        if sampling.min_tokens > max_tokens:
            raise ValueError(f"min_tokens, {sampling.min_tokens}, must be at most max_tokens, {max_tokens}")
        object.__setattr__(self, "sampling", sampling)
        object.__setattr__(self, "logprobs", _number_of_top("logprobs", logprobs))
        object.__setattr__(self, "prompt_logprobs", _number_of_top("prompt_logprobs", prompt_logprobs))
        object.__setattr__(self, "reuse", truth("reuse", reuse))
        object.__setattr__(self, "prediction", _prediction(prediction))
        object.__setattr__(self, "max_tokens", max_tokens)
        object.__setattr__(self, "stop", _texts("stop", stop))
        object.__setattr__(self, "stop_loops", truth("stop_loops", stop_loops))
        object.__setattr__(self, "grammar", _grammar(json_schema, regex, grammar))
        object.__setattr__(self, "speculate", truth("speculate", speculate))
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be called with two numbers, which {type(progress).__name__} cannot be")
        object.__setattr__(self, "progress", progress)


def _number_of_top(name: str, given: object) -> int | None:
    """How many likeliest tokens are to be named, None for none of it."""
    if given is None:
        return None
    number = integer(name, given)
    if not 0 <= number <= MOST_LOGPROBS:
        raise ValueError(f"{name} must be None (off) or a number of tokens from 0 to {MOST_LOGPROBS}, not {number}")
    return number


def _prediction(given: object) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"prediction must be text or token ids, not {type(given).__name__}")
    return tuple(integer("a token of the prediction", token) for token in given)


def _texts(name: str, given: object) -> tuple[str, ...]:
    """One string or several, none of them empty."""
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise TypeError(f"{name} must be a string or a sequence of strings, not {type(given).__name__}")
    strings = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(text, str) for text in strings):
        raise TypeError(f"{name} must be a string or a sequence of strings")
    if "" in strings:
        raise ValueError("a stop string must not be empty" if name == "stop" else f"{name} must not be empty")
    each, most = _LONGEST_TEXTS[name]
    if longer := next((text for text in strings if len(text) > each), None):
        raise ValueError(f"{name} has a string of {len(longer)} characters; it may have {each}")
    if (total := sum(map(len, strings))) > most:
        raise ValueError(f"{name} has {total} characters in all; it may have {most}")
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
        return grammar  # of a config that is replaced
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
    """As an int, of numpy's too."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, not {type(value).__name__}")


def truth(name: str, value: object) -> bool:
    """As a bool, of numpy's too."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _number(name: str, value: object) -> float:
    """As a float, of numpy's too."""
    if (
        type(value) is not float
        and type(value) is not int
        and (isinstance(value, bool) or not isinstance(value, SupportsFloat))
    ):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if abs(value) > _LARGEST_FLOAT:  # type: ignore[arg-type]
        raise ValueError(f"{name} must be at most {_LARGEST_FLOAT:g}")
    return float(value)
