"""Read and check a checkpoint's config.json: numbers, tensors and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pystaged.loading.families import FAMILIES, GEMMA3, Family, not_converted

Floats = npt.NDArray[np.float32]
Metadata = dict[str, "int | float | str"]

_MOST = 1 << 24  # far beyond any model
_ORIGINAL = "original_max_position_embeddings"
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class _Config:
    """Numbers of a config.json, by the names that most families use."""

    config: Mapping[str, Any]
    path: Path
    family: Family

    @classmethod
    def of(cls, config: dict[str, Any], path: Path) -> _Config:
        config = language_part(config)
        kind = config.get("model_type")
        family = FAMILIES.get(kind) if isinstance(kind, str) else None
        if family is None:
            raise ValueError(f"{path}: {not_converted(kind)}")
        if config.get("quantization_config"):
            raise ValueError(f"{path}: this checkpoint is quantized already; convert the original one")
        config = {**family.defaults, **config}
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
        return whole(self.path, self.key(name), default if value is None else value)

    def real(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        return _positive(self.path, self.key(name), default if value is None else value)


def language_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json for text and images; others unchanged."""
    text = config.get("text_config")
    if config.get("model_type") != "gemma3" or not isinstance(text, dict):
        return config
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}  # the whole model's wins
    return config | text | tied | {"model_type": "gemma3_text"}


def whole(path: Path, name: str, value: object, least: int = 1) -> int:
    """Return a whole number from `least` to 2**24; errors as in _positive."""
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{path}: {name} is {value!r}, but must be a whole number between {least} and {_MOST}")
    return value


def _positive(path: Path, name: str, value: object) -> float:
    """Return a finite number above 0. Raises ValueError that names what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError(f"{path}: {name} is {value!r}, but must be a number above 0")
    return float(value)


@dataclass(frozen=True)
class Wanted:
    """A tensor of a GGUF file: its name, the checkpoint's without prefix, its shape (outputs first), its layer."""

    name: str
    source: str
    shape: tuple[int, ...]
    layer: int | None

    @property
    def part(self) -> str:
        """The name without layer and suffix."""
        prefix = "" if self.layer is None else f"blk.{self.layer}."
        return self.name.removeprefix(prefix).removesuffix(".weight").removesuffix(".bias")


@dataclass(frozen=True)
class Shape:
    """A model's shape, from its config.json. metadata: entries that only some families have, by GGUF key; computed:
    tensors that no checkpoint stores, by name."""

    family: Family
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    context: int
    ffn_width: int
    epsilon: float
    tied: bool
    biased: frozenset[str]
    metadata: Metadata
    computed: Mapping[str, Floats]

    @classmethod
    def of(cls, config: dict[str, Any], path: Path) -> Shape:
        """Read and check a config.json. Raises ValueError for another architecture, a variant that GGUF cannot express,
        or an impossible shape."""
        reader = _Config.of(config, path)
        family, number = reader.family, reader.number
        width, heads = number("hidden_size"), number("num_attention_heads")
        if reader.get("head_dim") is None and width % heads:
            raise ValueError(
                f"{path}: a width ({reader.key('hidden_size')}) of {width} does not split into {heads} heads "
                f"({reader.key('num_attention_heads')})"
            )
        kv_heads, head_width = number("num_key_value_heads", heads), number("head_dim", width // heads)
        if heads % kv_heads:
            raise ValueError(f"{path}: {heads} heads do not share {kv_heads} key and value heads evenly")
        epsilon = reader.real("rms_norm_eps", 1e-6)
        if epsilon >= 1:
            raise ValueError(f"{path}: {reader.key('rms_norm_eps')} is {epsilon}, but must be between 0 and 1")
        context, layers = number("max_position_embeddings", reader.get("n_ctx")), number("num_hidden_layers")
        metadata: Metadata = {
            name: reader.real(key) for name, key in family.reals.items() if reader.get(key) is not None
        }
        if "sliding_window" in family.defaults:
            metadata["attention.sliding_window"] = number("sliding_window") if reader.get("sliding_window") else 0
        computed: dict[str, Floats] = {}
        if family.ropes:
            metadata |= {"attention.key_length": head_width, "attention.value_length": head_width}
            metadata |= _rope(reader, head_width, context, computed)
        shape = cls(
            family=family,
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            context=context,
            ffn_width=number("intermediate_size", 4 * width if family.transposed else None),
            epsilon=epsilon,
            tied=reader.get("tie_word_embeddings") is not False,
            biased=frozenset(name for name, key in family.biased.items() if key is None or reader.get(key) is True),
            metadata=metadata,
            computed=computed,
        )
        _check_layers(reader, shape)
        return shape

    def sizes(self, inputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's tensors that are not as wide as the model alone; inputs: of queries, keys and values."""
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        return {
            "attn_q": (q, inputs),
            "attn_k": (kv, inputs),
            "attn_v": (kv, inputs),
            "attn_qkv": (q + 2 * kv, inputs),
            "attn_output": (self.width, q),
            "attn_q_norm": (self.head_width,),
            "attn_k_norm": (self.head_width,),
            "ffn_gate": (self.ffn_width, self.width),
            "ffn_up": (self.ffn_width * (2 if self.family.fused else 1), self.width),
            "ffn_down": (self.width, self.ffn_width),
        }

    def tensors(self, num_rows: int) -> Iterator[Wanted]:
        """The GGUF file's tensors in order, without computed ones; one by one, so that an absurd number of layers fails
        at the first missing one. num_rows: of the token embedding."""
        sizes = self.sizes(self.width) | {
            "token_embd": (num_rows, self.width),
            "output": (num_rows, self.width),
            "position_embd": (self.context, self.width),
        }

        def both(name: str, source: str, layer: int | None = None) -> Iterator[Wanted]:
            size = sizes.get(name, (self.width,))
            stem = name if layer is None else f"blk.{layer}.{name}"
            yield Wanted(f"{stem}.weight", f"{source}.weight", size, layer)
            if name in self.biased:
                yield Wanted(f"{stem}.bias", f"{source}.bias", size[:1], layer)

        for name, source in self.family.others.items():
            yield from both(name, source)
        if not self.tied:
            yield from both("output", "lm_head")
        for layer in range(self.layers):
            for name, source in self.family.layers.items():
                yield from both(name, f"{self.family.blocks}.{layer}.{source}", layer)


def _positions(path: Path, original: object) -> int:
    """The number of positions that a model was trained for before rotary scaling."""
    value = _positive(path, _ORIGINAL, original)
    if not 1 <= value <= _MOST:
        raise ValueError(f"{path}: {_ORIGINAL} is {original!r}, outside 1 to {_MOST}")
    return int(value)


def _check_layers(reader: _Config, shape: Shape) -> None:
    """Raise ValueError for layer patterns and attention scales, which GGUF does not store, of another architecture."""

    def check(name: str, expected: object) -> None:
        if reader.get(name) not in (None, expected):
            raise ValueError(
                f"{reader.path}: {name} is {reader.get(name)!r}, which a GGUF file of {shape.family.architecture} "
                "cannot express"
            )

    layers = range(1, min(shape.layers, 1 << 12) + 1)
    if shape.family.architecture == "smollm3":
        check("no_rope_layers", [int(layer % 4 != 0) for layer in layers])
    elif shape.family is GEMMA3:
        check("layer_types", ["sliding_attention" if layer % 6 else "full_attention" for layer in layers])
        check("sliding_window_pattern", 6)
        # llama.cpp recognizes the largest Gemma 3 by its 62 layers, and scales its queries differently.
        per_head = shape.width // shape.heads if shape.layers == 62 else shape.head_width
        check("query_pre_attn_scalar", per_head)


def _rope(reader: _Config, head_width: int, context: int, computed: dict[str, Floats]) -> Metadata:
    """Metadata of rotary positions; tensors of factors are added to `computed`."""
    path, family = reader.path, reader.family
    found = reader.get("rope_parameters") or reader.get("rope_scaling") or {}
    if not isinstance(found, dict) or not all(isinstance(found.get(key, {}), dict) for key in _LAYER_KINDS):
        raise ValueError(f"{path} is damaged: rope_parameters")
    local = found.get("sliding_attention") or {"rope_theta": reader.get("rope_local_base_freq")}
    found = found.get("full_attention", found)

    def real(name: str, default: object = None) -> float:
        value = found.get(name)
        return _positive(path, name, default if value is None else value)

    kind = found.get("rope_type", found.get("type", "default"))
    if family.fused and kind in ("su", "yarn"):
        kind = "longrope"
    if kind not in ("default", *family.ropes):
        raise ValueError(
            f"{path}: rotary positions of type {kind!r} are not supported for {family.architecture}, only "
            f"{', '.join(('default', *family.ropes))}"
        )
    base = real("rope_theta", reader.get("rope_theta") or 1e4)
    turned = real("partial_rotary_factor", reader.get("partial_rotary_factor") or 1.0)
    dims = int(head_width * turned)
    if dims % 2 or not 0 < dims <= head_width or (dims != head_width and not family.fused):
        raise ValueError(f"{path}: partial_rotary_factor is {turned}, which rotates {dims} of {head_width} numbers")
    metadata: Metadata = {"rope.dimension_count": dims, "rope.freq_base": base}
    if family is GEMMA3:
        metadata["rope.freq_base_swa"] = _positive(path, "rope_local_base_freq", local.get("rope_theta", 1e4))
    original = found.get("original_max_position_embeddings") or reader.get("original_max_position_embeddings")
    if family.fused:
        metadata["rope.scaling.original_context_length"] = _positions(path, original)
    if kind in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": real("factor")}
    if kind == "yarn":
        for name, usual in {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "mscale": None}.items():
            if found.get(name) not in (None, usual):
                raise ValueError(f"{path}: {name} is {found[name]!r}, which llama.cpp ignores for {kind}")
        metadata["rope.scaling.original_context_length"] = _positions(path, original or context)
    elif kind == "llama3":
        low, high = real("low_freq_factor", 1.0), real("high_freq_factor", 4.0)
        waves = 2 * np.pi * base ** (np.arange(0, dims, 2) / dims)
        turns = real(_ORIGINAL, 8192) / waves
        smooth = np.clip((turns - low) / (high - low), 0, 1) if high > low else (turns > high).astype(float)
        computed["rope_freqs.weight"] = (1 / ((1 - smooth) / real("factor", 8.0) + smooth)).astype(np.float32)
    elif kind == "longrope":
        for name in ("long", "short"):
            factors = found.get(f"{name}_factor")
            if not isinstance(factors, list) or len(factors) != dims // 2:
                raise ValueError(f"{path}: {name}_factor must be a list of {dims // 2} numbers")
            computed[f"rope_factors_{name}.weight"] = np.array(
                [_positive(path, f"{name}_factor", factor) for factor in factors], np.float32
            )
        start = _positions(path, original)
        stretch = context / start
        sharper = math.sqrt(1 + math.log(stretch) / math.log(start)) if stretch > 1 and start > 1 else 1.0
        metadata["rope.scaling.attn_factor"] = real("attention_factor", sharper)
    return metadata
