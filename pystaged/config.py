"""Options of a generation, checked once where they enter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pystaged._core import Sampling

_LARGEST_FLOAT = 3.4e38  # of the engine's


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How tokens are chosen. Filters apply in the order temperature, top-k, top-p, min-p.

    temperature: 0 is greedy.
    top_k: keep this many of the likeliest tokens, 0 keeps all.
    top_p: keep the fewest tokens that together have at least this probability, 1 keeps all.
    min_p: keep tokens at least this likely relative to the likeliest, 0 keeps all.
    seed: together with the prompt it fixes the text, however it is drafted.

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

    def __post_init__(self) -> None:
        _require_integers(top_k=self.top_k, seed=self.seed)
        _require_numbers(temperature=self.temperature, top_p=self.top_p, min_p=self.min_p)
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, not {self.seed}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (off) or a positive number of tokens, not {self.top_k}")
        # The engine's form of the same, which checks the ranges.
        native = Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        object.__setattr__(self, "native", native)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How to decode and when to stop.

    max_tokens: new tokens at most, at least 1.
    stop: strings that end the text before they appear in it.
    speculate: whether to draft.

    Raises:
        ValueError: max_tokens below 1, or an empty stop string.
        TypeError: a field of the wrong type.
    """

    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    speculate: bool = True

    def __post_init__(self) -> None:
        _require_integers(max_tokens=self.max_tokens)
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not all(isinstance(text, str) for text in self.stop):
            raise TypeError("stop must be a string or a sequence of strings")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several, as a tuple.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(stop, (str, Sequence)):
        raise TypeError(f"stop must be a string or a sequence of strings, not {type(stop).__name__}")
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _require_integers(**fields: object) -> None:
    for name, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, not {type(value).__name__}")


def _require_numbers(**fields: object) -> None:
    for name, value in fields.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, not {type(value).__name__}")
        if abs(value) > _LARGEST_FLOAT:
            raise ValueError(f"{name} must be at most {_LARGEST_FLOAT:g}")
