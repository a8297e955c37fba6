"""Checkpoints of Gemma 4's assistants: their settings and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pystaged.loading.config_reader import MOST, positive
from pystaged.loading.families import ASSISTANT, ASSISTANT_MODEL_TYPES, FEED_FORWARD, Family
from pystaged.loading.recurrent import Metadata
from pystaged.loading.shapes import Shape, Wanted

_GLOBAL, _WINDOWED = "full_attention", "sliding_attention"
_FAMILY = Family(
    ASSISTANT,
    layers={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_output": "self_attn.o_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        **FEED_FORWARD,
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "vocab_size": 262_144,
    },
    only={
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "attention_bias": (False, None),
        "hidden_size_per_layer_input": (0, None),
        "enable_moe_block": (False, None),
        "use_double_wide_mlp": (False, None),
        "use_bidirectional_attention": (None, "vision"),
    },
)
# Of a head that scores the tokens of a few clusters; all are scored here.
UNUSED = re.compile(r"masked_embedding\.(centroids\.weight|token_ordering)|lm_head\.weight")


def read_assistant(config: Mapping[str, Any], path: Path) -> tuple[Shape, list[Wanted]] | None:
    """Read and check a config.json: the shape, whose head width is that of layers without a window, and the tensors of
    the GGUF file; None for that of another model.

    Raises:
        ValueError: a variant that is not supported, or an impossible number.
    """
    if config.get("model_type") not in ASSISTANT_MODEL_TYPES:
        return None
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"{path} is damaged: text_config")
    if config.get("quantization_config") or text.get("quantization_config"):
        raise ValueError(f"{path}: this checkpoint is quantized already; convert the original one")
    text = {**_FAMILY.defaults, **{key: value for key, value in text.items() if value is not None}}
    for key, values in _FAMILY.only.items():
        if text.get(key) not in values:
            raise ValueError(f"{path}: {key} is {text[key]!r}, but only {values[0]!r} is supported")

    def number(found: Mapping[str, Any], key: str, most: int = MOST) -> int:
        value = found.get(key)
        if type(value) is not int or not 0 < value <= most:
            raise ValueError(f"{path}: {key} is {value!r}, but must be a whole number between 1 and {most}")
        return value

    layers, kinds = number(text, "num_hidden_layers", 512), text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_GLOBAL, _WINDOWED) for kind in kinds):
        raise ValueError(f"{path}: layer_types must name {_GLOBAL} or {_WINDOWED} for each of {layers} layers")
    of_global = _of_global(text, kinds, path)
    width, heads, ffn = (number(text, key) for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    dims = {_GLOBAL: number(of_global, "head_dim"), _WINDOWED: number(text, "head_dim")}
    kv_heads = {
        _GLOBAL: number(of_global, "num_key_value_heads"),
        _WINDOWED: number(text, "num_key_value_heads"),
    }
    target_width = number(config, "backbone_hidden_size")
    metadata: Metadata = {
        "nextn_predict_layers": layers,
        "embedding_length_out": target_width,
        "attention.head_count_kv": [kv_heads[kind] for kind in kinds],
        "attention.key_length": dims[_GLOBAL],
        "attention.value_length": dims[_GLOBAL],
        "attention.key_length_swa": dims[_WINDOWED],
        "attention.value_length_swa": dims[_WINDOWED],
        "attention.shared_kv_layers": layers,
        "attention.sliding_window": number(text, "sliding_window"),
        "attention.sliding_window_pattern": [kind == _WINDOWED for kind in kinds],
        "rope.dimension_count": dims[_GLOBAL],
        "rope.dimension_count_swa": dims[_WINDOWED],
    }
    turned = _ropes(text, path, metadata)
    pairs = dims[_GLOBAL] // 2
    factors = np.where(np.arange(pairs) < int(turned * pairs), 1, 1e30).astype(np.float32)  # the others do not turn
    shape = Shape(
        family=_FAMILY,
        architecture=_FAMILY.architecture,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads[_GLOBAL],
        head_width=dims[_GLOBAL],
        context=number(text, "max_position_embeddings"),
        ffn_width=ffn,
        epsilon=positive(path, "rms_norm_eps", text["rms_norm_eps"]),
        tied=True,
        biased=frozenset(),
        metadata=metadata,
        computed={"rope_freqs.weight": factors},
        scale_scores=True,
        scale_by_layer=False,
    )
    return shape, list(_wanted(shape, number(text, "vocab_size"), target_width, [dims[kind] for kind in kinds]))


def _of_global(text: Mapping[str, Any], kinds: list[str], path: Path) -> dict[str, Any]:
    """Numbers of heads in layers without a window, which newer files have by layer."""
    found = {"head_dim": text["global_head_dim"], "num_key_value_heads": text["num_key_value_heads"]}
    if text.get("attention_k_eq_v", True) and text.get("num_global_key_value_heads"):
        found["num_key_value_heads"] = text["num_global_key_value_heads"]
    by_layer = text.get("per_layer_config") or {}
    if not isinstance(by_layer, dict) or not all(isinstance(each, dict) for each in by_layer.values()):
        raise ValueError(f"{path} is damaged: per_layer_config")
    own = [by_layer[str(i)] for i, kind in enumerate(kinds) if kind == _GLOBAL and str(i) in by_layer]
    return found | {key: value for each in own[:1] for key, value in each.items() if key in found}


def _ropes(text: Mapping[str, Any], path: Path, metadata: Metadata) -> float:
    """Add the bases of rotary positions; returns the share of a head that turns in layers without a window."""
    ropes = text.get("rope_parameters") or {}
    parts = [ropes.get(kind) or {} for kind in (_GLOBAL, _WINDOWED)] if isinstance(ropes, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{path} is damaged: rope_parameters")
    usual = (("", "proportional", 1e6), ("_swa", "default", 1e4))
    for (ending, kind, base), part in zip(usual, parts, strict=True):
        if part.get("rope_type", kind) != kind:
            raise ValueError(f"{path}: rope_type is {part['rope_type']!r}, but only {kind!r} is supported here")
        metadata[f"rope.freq_base{ending}"] = positive(path, "rope_theta", part.get("rope_theta", base))
    usual_share = 1.0 if parts[0] else 0.25
    return min(1.0, positive(path, "partial_rotary_factor", parts[0].get("partial_rotary_factor", usual_share)))


def _wanted(shape: Shape, num_tokens: int, target_width: int, dims: list[int]) -> Iterator[Wanted]:
    width = shape.width
    yield Wanted("token_embd.weight", "model.embed_tokens.weight", (num_tokens, width), None)
    yield Wanted("output_norm.weight", "model.norm.weight", (width,), None)
    yield Wanted("nextn.pre_projection.weight", "pre_projection.weight", (width, 2 * target_width), None)
    yield Wanted("nextn.post_projection.weight", "post_projection.weight", (target_width, width), None)
    for layer, dim in enumerate(dims):
        sizes = {
            "attn_q": (shape.heads * dim, width),
            "attn_q_norm": (dim,),
            "attn_output": (width, shape.heads * dim),
            "ffn_gate": (shape.ffn_width, width),
            "ffn_up": (shape.ffn_width, width),
            "ffn_down": (width, shape.ffn_width),
        }
        for name, source in shape.family.layers.items():
            size = sizes.get(name, (width,))
            yield Wanted(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{source}.weight", size, layer)
        source = f"model.layers.{layer}.layer_scalar"
        yield Wanted(f"blk.{layer}.layer_output_scale.weight", source, (1,), layer)
