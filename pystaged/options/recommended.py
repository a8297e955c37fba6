"""Defaults for answers: the sampling that a model's makers recommend, and the length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pystaged.options.config import SamplingConfig
from pystaged.options.table import SAMPLING

ANSWER_TOKENS = 2048  # default max_tokens of an answer
LOOP_WORDS = "ended where it repeats itself; {} lets it go on"

SamplingFields = dict[str, float | int]
"""Fields of SamplingConfig."""

# llama.cpp's defaults, for fields without a recommendation.
_USUAL: SamplingFields = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# From SmolLM2's model card; its GGUF file has no keys for it.
_SMOLLM2: SamplingFields = {"temperature": 0.2, "top_p": 0.9}
# Models for daily use: the memory that a machine should have, in GB, a name in aliases.MODELS, and its GB.
_REAL = ((30, "gpt-oss", 12.1), (14, "qwen3", 5.0), (7, "qwen3:4b", 2.5), (0, "llama3.2:1b", 0.8))
_SECTION = "general.sampling."  # prefix of GGUF keys
_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
}
# Keys of generation_config.json, and those for them in a GGUF file.
_OF_CHECKPOINTS = {each: each for each in ("top_k", "top_p", "min_p")}
_OF_CHECKPOINTS |= {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def recommended_sampling(metadata: Mapping[str, str]) -> SamplingFields:
    """The sampling that the model's makers recommend, by a GGUF file's metadata, of which invalid values are ignored;
    with llama.cpp's defaults for the rest."""
    found = dict(_USUAL)
    if metadata.get("general.basename", "").lower() == "smollm2":
        found |= _SMOLLM2
    said = {name: _checked(name, metadata.get(_SECTION + key)) for key, name in _FIELDS.items()}
    return found | {name: value for name, value in said.items() if value is not None}


def sampling_keys(generation_config: Mapping[str, Any]) -> SamplingFields:
    """Convert a checkpoint's generation_config.json to keys of a GGUF file, without invalid values."""
    said = {key: _checked(_FIELDS[key], generation_config.get(name)) for name, key in _OF_CHECKPOINTS.items()}
    return {_SECTION + key: value for key, value in said.items() if value is not None}


def toy_words(metadata: Mapping[str, str], memory: int) -> str:
    """A line that says of SmolLM2-135M that it is a toy, and which model to take next; "" for other models. memory:
    bytes of this machine."""
    if metadata.get("general.basename", "").lower() != "smollm2" or metadata.get("general.size_label") != "135M":
        return ""
    name, size = next((name, size) for most, name, size in _REAL if memory >= most * 1e9)
    return (
        f"SmolLM2-135M is a toy to try the speed with; for answers that fit {memory / 1e9:.0f} GB of memory: "
        f"pystaged chat {name} (downloads {size} GB)"
    )


def described(sampling: SamplingConfig) -> str:
    """The options that are on, in words such as "temperature 0.8, top-k 40, top-p 0.95"."""
    if sampling.is_greedy:
        return "temperature 0: always the likeliest token"
    names = [name for name in SAMPLING if name not in ("temperature", "seed")]
    others = [
        f"{name.replace('_', '-')} {_word(getattr(sampling, name))}"
        for name in names
        if getattr(sampling, name) != (SAMPLING[name].default if name != "logit_bias" else {})
    ]
    return ", ".join([f"temperature {_word(sampling.temperature)}", *others])


def _checked(name: str, value: object) -> float | int | None:
    """A field's value as a number, None if it is invalid."""
    try:
        number = round(float(value), 6)  # type: ignore[arg-type]  # GGUF files have 32 bits: 0.2, not 0.200000003
        whole = SAMPLING[name].kind is int
        if isinstance(value, bool) or (whole and number != int(number)):
            return None
        given: dict[str, Any] = {name: int(number) if whole else number}
        SamplingConfig(**given)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else given[name]


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
