"""Reads and checks a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pystaged.loading.families import FAMILIES, GGUF_INSTEAD, MODEL_TYPES, WITH_PICTURES, Family, not_converted

MOST = 1 << 24  # far beyond any model
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ConfigReader:
    """Numbers of a config.json, by the names that most families use."""

    config: Mapping[str, Any]
    path: Path
    family: Family

    @classmethod
    def of(cls, config: dict[str, Any], path: Path) -> ConfigReader:
        config = language_part(config)
        kind = config.get("model_type")
        family = FAMILIES.get(kind) if isinstance(kind, str) else None
        if family:
            older = {key: config[old] for key, old in family.older.items() if config.get(old) is not None}
            config = {**family.defaults, **config, **older}
        if any(config.get(key) for key in _EXPERTS) and not (family and family.experts):
            raise ValueError(
                f"{path}: the architecture {kind!r} is a mixture of experts that cannot be converted; {GGUF_INSTEAD}"
            )
        if family is None:
            raise ValueError(f"{path}: {not_converted(kind, MODEL_TYPES)}")
        quantized = config.get("quantization_config")
        in_mxfp4 = isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4" and family.fused_experts
        if quantized and not in_mxfp4:
            raise ValueError(f"{path}: this checkpoint is quantized already; convert the original one")
        for key, values in family.only.items():
            if config.get(key, values[0]) not in values:
                raise ValueError(f"{path}: {key} is {config[key]!r}, but only {values[0]!r} is supported")
        return cls(config, path, family)

    def key(self, name: str) -> str:
        return self.family.renamed.get(name, name)

    def get(self, name: str) -> Any:
        return self.config.get(self.key(name))

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MOST:
            raise ValueError(
                f"{self.path}: {self.key(name)} is {value!r}, but must be a whole number between 1 and {MOST}"
            )
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        return positive(self.path, self.key(name), default if value is None else value)


def language_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json for text and images; others unchanged."""
    kind, text = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str) or kind not in WITH_PICTURES or not isinstance(text, dict):
        return config
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}  # the whole model's wins
    return config | text | tied | {"model_type": WITH_PICTURES[kind]}


def positive(path: Path, name: str, value: object) -> float:
    """Return a finite number above 0.

    Raises:
        ValueError: it is none; the message names it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError(f"{path}: {name} is {value!r}, but must be a number above 0")
    return float(value)
