"""Read and check a checkpoint's config.json: numbers, tensors and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pystaged.loading.config_reader import MOST, ConfigReader, positive
from pystaged.loading.families import GEMMA3, Family
from pystaged.loading.recurrent import Change, Floats, Metadata, Recurrence

_ORIGINAL = "original_max_position_embeddings"
_LAYER_KINDS = ("full_attention", "sliding_attention")
_MOST_EXPERTS = 4096
_UNLIMITED = 1 << 20  # llama.cpp's context length of a model without positions
AHEAD = "mtp."  # begins the names of tensors for multi-token prediction, beside the model's
_BARE = {
    "A_log": "",
    "D": "",
    "dt_bias": ".bias",
    "sinks": ".weight",
}  # tensors without ".weight" in checkpoints, and GGUF's suffixes


@dataclass(frozen=True)
class Wanted:
    """A tensor of a GGUF file: its name, the checkpoint's without prefix, its shape (outputs first), its layer.

    Args:
        source: with "*" for each expert, if the checkpoint has one tensor for each.
        stored: the checkpoint's shape, if it is another one.
        first: its first row there, if it is a part of the checkpoint's tensor.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    layer: int | None
    stored: tuple[int, ...] = ()
    first: int | None = None

    @property
    def part(self) -> str:
        """The name without layer and suffix."""
        prefix = "" if self.layer is None else f"blk.{self.layer}."
        return self.name.removeprefix(prefix).removesuffix(".weight").removesuffix(".bias")


@dataclass(frozen=True)
class Shape:
    """A model's shape, from its config.json.

    Args:
        architecture: GGUF's name.
        experts, expert_width: of a mixture, else 0.
        ahead: blocks for multi-token prediction, after the layers.
        metadata: entries that only some families have, by GGUF key.
        computed: tensors that no checkpoint stores, by name.
    """

    family: Family
    architecture: str
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
    scale_scores: bool
    scale_by_layer: bool
    experts: int = 0
    expert_width: int = 0
    recurrence: Recurrence | None = None
    ahead: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], path: Path) -> Shape:
        """Read and check a config.json.

        Raises:
            ValueError: another architecture, a variant that GGUF cannot express, or an impossible shape.
        """
        reader = ConfigReader.of(config, path)
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
        recurrence = Recurrence.of(reader, width, layers, kv_heads)
        metadata |= recurrence.metadata if recurrence else {}
        if "sliding_window" in family.defaults:
            metadata["attention.sliding_window"] = number("sliding_window") if reader.get("sliding_window") else 0
        computed: dict[str, Floats] = {}
        if family.ropes:
            metadata |= {"attention.key_length": head_width, "attention.value_length": head_width}
            metadata |= _rope(reader, head_width, context, computed)
        if "position_embedding_type" in family.only:
            turns = reader.get("position_embedding_type") == "rope"
            metadata["rope.scaling.finetuned"] = turns
            context = context if turns else _UNLIMITED
        ahead = int(reader.get("mtp_num_hidden_layers") or 0) if family.ahead else 0
        if ahead:
            metadata["nextn_predict_layers"] = ahead
        ffn_width = number("intermediate_size", 4 * width if family.transposed else None)
        experts = expert_width = 0
        if family.experts:
            experts, expert_width = number(family.experts.count), number(family.experts.width)
            used = number(family.experts.used)
            if experts > _MOST_EXPERTS:
                raise ValueError(f"{path}: {family.experts.count} is {experts}, beyond {_MOST_EXPERTS}")
            if used > experts:
                raise ValueError(f"{path}: {family.experts.used} is {used}, but there are {experts} experts")
            metadata |= {
                "expert_count": experts,
                "expert_used_count": used,
                "expert_feed_forward_length": expert_width,
            }
        shape = cls(
            family=family,
            architecture=family.architecture if recurrence else family.attending or family.architecture,
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            context=context,
            ffn_width=_adjusted(reader, ffn_width) if reader.get("block_auto_adjust_ff_dim") else ffn_width,
            epsilon=epsilon,
            tied=reader.get("tie_word_embeddings") is not False,
            biased=frozenset(name for name, key in family.biased.items() if key is None or reader.get(key) is True),
            metadata=metadata,
            computed=computed,
            scale_scores=reader.get("scale_attn_weights") is not False,
            scale_by_layer=reader.get("scale_attn_by_inverse_layer_idx") is True,
            experts=experts,
            expert_width=expert_width,
            recurrence=recurrence,
            ahead=ahead,
        )
        _check_layers(reader, shape)
        return shape

    def query_scale(self, layer: int) -> float:
        """Factor for the query weights, after which attention needs only the scale 1 / sqrt(head width)."""
        unscaled = 1.0 if self.scale_scores else float(np.sqrt(self.head_width))
        return unscaled / (layer + 1 if self.scale_by_layer else 1)

    def without_ahead(self) -> Shape:
        """The same shape without blocks for multi-token prediction."""
        metadata = {key: value for key, value in self.metadata.items() if key != "nextn_predict_layers"}
        return replace(self, ahead=0, metadata=metadata)

    def change(self, wanted: Wanted) -> Change | None:
        """A function that makes a recurrent layer's tensor of the checkpoint's; None if they are equal."""
        found = self.recurrence
        return found.changes.get(wanted.part) if found and wanted.layer in found.layers else None

    def sources(self, wanted: Wanted) -> list[str]:
        """The names of the checkpoint's tensors that make one of the GGUF file."""
        source = wanted.source
        return [source.replace("*", str(i)) for i in range(self.experts)] if "*" in source else [source]

    def tensors(self, num_rows: int) -> Iterator[Wanted]:
        """The GGUF file's tensors in order, without computed ones.

        One by one, so that an absurd number of layers fails at the first missing one.

        Args:
            num_rows: rows of the token embedding.
        """
        sizes = {
            "token_embd": (num_rows, self.width),
            "output": (num_rows, self.width),
            "position_embd": (self.context, self.width),
            "attn_q": (self.heads * self.head_width * (2 if self.family.gated else 1), self.width),
            "attn_k": (self.kv_heads * self.head_width, self.width),
            "attn_v": (self.kv_heads * self.head_width, self.width),
            "attn_qkv": ((self.heads + 2 * self.kv_heads) * self.head_width, self.width),
            "attn_output": (self.width, self.heads * self.head_width),
            "attn_q_norm": (self.head_width,),
            "attn_k_norm": (self.head_width,),
            "attn_sinks": (self.heads,),
            "ffn_gate": (self.ffn_width, self.width),
            "ffn_up": (self.ffn_width * (2 if self.family.fused_gate else 1), self.width),
            "ffn_down": (self.width, self.ffn_width),
            "ffn_gate_inp": (self.experts, self.width),
            "ffn_gate_exps": (self.experts, self.expert_width, self.width),
            "ffn_up_exps": (self.experts, self.expert_width, self.width),
            "ffn_down_exps": (self.experts, self.width, self.expert_width),
            "nextn.eh_proj": (self.width, 2 * self.width),
        }

        recurrent = self.recurrence.layers if self.recurrence else frozenset()

        def both(name: str, source: str, layer: int | None = None) -> Iterator[Wanted]:
            size, stored, first = sizes.get(name, (self.width,)), tuple[int, ...](), None
            if self.recurrence and layer in recurrent:
                size = self.recurrence.shapes.get(name, size)
                stored = self.recurrence.stored.get(name, ())
            if self.family.split_gate and name in ("ffn_gate", "ffn_up"):
                stored, first = (2 * size[0], size[1]), 0 if name == "ffn_gate" else size[0]
            stem = name if layer is None else f"blk.{layer}.{name}"
            if self.family.fused_experts and name.endswith("_exps"):
                turns = 1 if name == "ffn_down_exps" else 2
                yield Wanted(f"{stem}.weight", source, size, layer, (size[0], size[2], turns * size[1]))
                yield Wanted(f"{stem}.bias", f"{source}_bias", size[:2], layer, (size[0], turns * size[1]))
                return
            bare = _BARE.get(source.rpartition(".")[2])
            if bare is not None:
                yield Wanted(f"{stem}{bare}", source, size, layer, stored)
                return
            yield Wanted(f"{stem}.weight", f"{source}.weight", size, layer, stored, first)
            if name in self.biased:
                yield Wanted(f"{stem}.bias", f"{source}.bias", size[:1], layer)

        for name, source in self.family.others.items():
            yield from both(name, source)
        if not self.tied:
            yield from both("output", "lm_head")
        for layer in range(self.layers):
            for name, source in (self.family.recurrent if layer in recurrent else self.family.layers).items():
                yield from both(name, f"{self.family.blocks}.{layer}.{source}", layer)
        for i in range(self.ahead):
            for name, source in self.family.layers.items():
                yield from both(name, f"{AHEAD}layers.{i}.{source}", self.layers + i)
            for name, source in self.family.ahead.items():
                yield from both(name, f"{AHEAD}{source}", self.layers + i)


def _adjusted(reader: ConfigReader, width: int) -> int:
    """LFM2's feed-forward width: config.json states 3/2 of it, before a factor and rounding up to a multiple."""
    adjusted = 2 * width // 3
    if reader.get("block_ffn_dim_multiplier") is not None:
        multiple = reader.number("block_multiple_of")
        adjusted = -(-int(reader.real("block_ffn_dim_multiplier") * adjusted) // multiple) * multiple
    if not 0 < adjusted <= MOST:
        raise ValueError(
            f"{reader.path}: block_auto_adjust_ff_dim makes {adjusted} of an intermediate_size of {width}, but must "
            f"make 1 to {MOST}"
        )
    return adjusted


def _positions(path: Path, original: object) -> int:
    """The number of positions that a model was trained for before rotary scaling."""
    value = positive(path, _ORIGINAL, original)
    if not 1 <= value <= MOST:
        raise ValueError(f"{path}: {_ORIGINAL} is {original!r}, outside 1 to {MOST}")
    return int(value)


def _check_layers(reader: ConfigReader, shape: Shape) -> None:
    """Check layer patterns and attention scales, which GGUF does not store.

    Raises:
        ValueError: they are not the architecture's.
    """

    def check(name: str, expected: object) -> None:
        if reader.get(name) not in (None, expected):
            raise ValueError(
                f"{reader.path}: {name} is {reader.get(name)!r}, which a GGUF file of {shape.family.architecture} "
                "cannot express"
            )

    layers = range(1, min(shape.layers, 1 << 12) + 1)
    if shape.family.architecture == "smollm3":
        check("no_rope_layers", [int(layer % 4 != 0) for layer in layers])
    elif shape.family.architecture == "gpt-oss":
        check("layer_types", ["full_attention" if layer % 2 == 0 else "sliding_attention" for layer in layers])
    elif shape.family is GEMMA3:
        check("layer_types", ["sliding_attention" if layer % 6 else "full_attention" for layer in layers])
        check("sliding_window_pattern", 6)
        # llama.cpp recognizes the largest Gemma 3 by its 62 layers, and scales its queries differently.
        per_head = shape.width // shape.heads if shape.layers == 62 else shape.head_width
        check("query_pre_attn_scalar", per_head)


def _sections(path: Path, found: object, dims: int) -> list[int]:
    """How many pairs of numbers rotate by time, height and width, which are equal in texts."""
    sections = found if isinstance(found, list) else []
    if len(sections) != 3 or not all(type(each) is int and each >= 0 for each in sections) or 2 * sum(sections) != dims:
        raise ValueError(f"{path}: mrope_section is {str(found)[:60]}, but must be three numbers of {dims // 2} pairs")
    return [*sections, 0]


def _rope(reader: ConfigReader, head_width: int, context: int, computed: dict[str, Floats]) -> Metadata:
    """Metadata of rotary positions; tensors of factors are added to `computed`."""
    path, family = reader.path, reader.family
    found = reader.get("rope_parameters") or reader.get("rope_scaling") or {}
    if not isinstance(found, dict) or not all(isinstance(found.get(key, {}), dict) for key in _LAYER_KINDS):
        raise ValueError(f"{path} is damaged: rope_parameters")
    local = found.get("sliding_attention") or {"rope_theta": reader.get("rope_local_base_freq")}
    found = found.get("full_attention", found)

    def real(name: str, default: object = None) -> float:
        value = found.get(name)
        return positive(path, name, default if value is None else value)

    kind = found.get("rope_type", found.get("type", "default"))
    if family.fused_gate and kind in ("su", "yarn"):
        kind = "longrope"
    if kind not in ("default", *family.ropes):
        raise ValueError(
            f"{path}: rotary positions of type {kind!r} are not supported for {family.architecture}, only "
            f"{', '.join(('default', *family.ropes))}"
        )
    base = real("rope_theta", reader.get("rope_theta") or 1e4)
    turned = real("partial_rotary_factor", reader.get("partial_rotary_factor") or 1.0)
    dims = int(head_width * turned)
    if dims % 2 or not 0 < dims <= head_width or (dims != head_width and not family.partial):
        raise ValueError(f"{path}: partial_rotary_factor is {turned}, which rotates {dims} of {head_width} numbers")
    metadata: Metadata = {"rope.dimension_count": dims, "rope.freq_base": base}
    if family.mixer == "delta net":
        metadata["rope.dimension_sections"] = _sections(path, found.get("mrope_section", [11, 11, 10]), dims)
    if family is GEMMA3:
        metadata["rope.freq_base_swa"] = positive(path, "rope_local_base_freq", local.get("rope_theta", 1e4))
    original = found.get("original_max_position_embeddings") or reader.get("original_max_position_embeddings")
    if family.fused_gate:
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
                [positive(path, f"{name}_factor", factor) for factor in factors], np.float32
            )
        start = _positions(path, original)
        stretch = context / start
        sharper = math.sqrt(1 + math.log(stretch) / math.log(start)) if stretch > 1 and start > 1 else 1.0
        metadata["rope.scaling.attn_factor"] = real("attention_factor", sharper)
    return metadata
