"""Options of a generation, checked once where they enter."""

from __future__ import annotations

import json
import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat, TypedDict

from pystaged._core import Sampling

_LARGEST_FLOAT = 3.4e38  # a float in C++


@dataclass(frozen=True, slots=True, init=False)
class SamplingConfig:
    """How tokens are chosen. Filters apply in the order temperature, top-k, top-p, min-p.

    temperature: 0 is greedy.
    top_k: keep this many of the likeliest tokens, 0 keeps all.
    top_p: keep the fewest tokens that together have at least this probability, 1 keeps all.
    min_p: keep tokens at least this likely relative to the likeliest, 0 keeps all.
    seed: together with the prompt it fixes the text, however it is drafted; None draws one.

    Raises:
        ValueError: naming the field that is out of range.
        TypeError: a field of the wrong type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    native: Sampling = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = 0,
    ) -> None:
        top_k = integer("top_k", top_k)
        seed = secrets.randbits(32) if seed is None else integer("seed", seed)
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, not {seed}")
        if not 0 <= top_k < 2**31:
            raise ValueError(f"top_k must be 0 (off) or a positive number of tokens, not {top_k}")
        numbers = [
            _number(name, value) for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p))
        ]
        # C++'s form of the same, which checks the ranges.
        values = (numbers[0], top_k, numbers[1], numbers[2], seed)
        for name, value in zip(self.__dataclass_fields__, (*values, Sampling(*values)), strict=True):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type[SamplingConfig], tuple[float, int, float, float, int]]:
        return SamplingConfig, (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


class TextOptions(TypedDict, total=False):
    """What a generation may be told. The five of SamplingConfig may come as one `sampling` instead.

    max_tokens: new tokens at most, 128 unless given.
    stop: one string or several that end the text before they appear in it.
    json_schema: a schema, as a dictionary or as JSON text, that the text meets; regex: an expression that it matches;
        grammar: a grammar, in Lark's or llama.cpp's notation, that it follows. One of them; needs the extra "grammar".
        The text ends where nothing more may follow, and is cut where max_tokens end.
    speculate: False decodes plainly; the text is the same.
    progress: called while the prompt is read, with how many of its tokens are and how many are to be: before the first
        few hundred and after each, so the last time with all of them; perhaps from another thread.
    """

    max_tokens: int
    stop: str | Sequence[str]
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None
    speculate: bool
    progress: Callable[[int, int], None] | None
    sampling: SamplingConfig
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None


def check_options(given: Iterable[str], options: type[Any]) -> None:
    """Refuse names that are none of a TypedDict's.

    Raises:
        TypeError: naming the first, and the options there are.
    """
    unknown = set(given) - options.__annotations__.keys()
    if unknown:
        raise TypeError(f"there is no option {min(unknown)!r}; the options are {', '.join(options.__annotations__)}")


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
    grammar: Grammar | None
    speculate: bool
    progress: Callable[[int, int], None] | None

    def __init__(
        self,
        *,
        max_tokens: int = 128,
        stop: str | Sequence[str] = (),
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | Grammar | None = None,
        speculate: bool = True,
        progress: Callable[[int, int], None] | None = None,
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
        object.__setattr__(self, "sampling", sampling or SamplingConfig(**fields))
        object.__setattr__(self, "max_tokens", max_tokens)
        object.__setattr__(self, "stop", _stop_strings(stop))
        object.__setattr__(self, "grammar", _grammar(json_schema, regex, grammar))
        object.__setattr__(self, "speculate", bool(speculate))
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be called with two numbers, which {type(progress).__name__} cannot be")
        object.__setattr__(self, "progress", progress)


def _stop_strings(stop: object) -> tuple[str, ...]:
    if isinstance(stop, bytes) or not isinstance(stop, Sequence):
        raise TypeError(f"stop must be a string or a sequence of strings, not {type(stop).__name__}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) for text in strings):
        raise TypeError("stop must be a string or a sequence of strings")
    if "" in strings:
        raise ValueError("a stop string must not be empty")
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


def _number(name: str, value: object) -> float:
    """As a float, of numpy's too."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if abs(value) > _LARGEST_FLOAT:  # type: ignore[arg-type]
        raise ValueError(f"{name} must be at most {_LARGEST_FLOAT:g}")
    return float(value)
