"""Small random GPT-2 checkpoints as Hugging Face lays them out, written without transformers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from random_weights import END_OF_TEXT, synthetic_vocabulary
from safetensors.numpy import save_file

from pystaged.loading.shapes import Shape

Arrays = dict[str, npt.NDArray[Any]]

NUM_TOKENS = 300


def config(**changes: object) -> dict[str, Any]:
    """config.json of a tiny model."""
    usual = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": 64,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 96,
        "n_ctx": 96,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": NUM_TOKENS,
        "bos_token_id": NUM_TOKENS - 1,
        "eos_token_id": NUM_TOKENS - 1,
    }
    return usual | changes


def weights(
    shape: dict[str, Any], *, prefix: str = "transformer.", num_rows: int = NUM_TOKENS, seed: int = 0
) -> Arrays:
    """Tensors of a model, around 0 but for the norms', which are around 1."""
    generator = np.random.default_rng(seed)
    width = shape["n_embd"]
    ffn = shape["n_inner"] or 4 * width
    sizes: dict[str, tuple[int, ...]] = {"wte.weight": (num_rows, width), "wpe.weight": (shape["n_positions"], width)}
    linears = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, ffn),
        "mlp.c_proj": (ffn, width),
    }
    for layer in range(shape["n_layer"]):
        for name, size in linears.items():
            sizes |= {f"h.{layer}.{name}.weight": size, f"h.{layer}.{name}.bias": size[1:]}
        for name in ("ln_1", "ln_2"):
            sizes |= {f"h.{layer}.{name}.weight": (width,), f"h.{layer}.{name}.bias": (width,)}
    sizes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    arrays = {
        prefix + name: 0.07 * generator.standard_normal(size, dtype=np.float32) + np.float32(".ln_" in f".{name}")
        for name, size in sizes.items()
    }
    for name in arrays:
        if name.endswith("bias") and "ln_" in name:
            arrays[name] -= 1
    if shape.get("tie_word_embeddings") is False:
        arrays["lm_head.weight"] = 0.07 * generator.standard_normal((num_rows, width), dtype=np.float32)
    return arrays


def write_tokenizer(folder: Path, num_tokens: int = NUM_TOKENS) -> None:
    """vocab.json and merges.txt of a made-up vocabulary."""
    tokens, merges = synthetic_vocabulary(num_tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")


def write_tokenizer_json(folder: Path, num_tokens: int = NUM_TOKENS, **changes: object) -> None:
    """The same as tokenizer.json."""
    tokens, merges = synthetic_vocabulary(num_tokens)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    found = {
        "version": "1.0",
        "added_tokens": [{"id": num_tokens - 1, "content": END_OF_TEXT, "special": True} | plain],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(found | changes), "utf-8")


def write_weights(folder: Path, arrays: Arrays, shards: int = 1) -> None:
    """model.safetensors, or its parts and their index."""
    if shards == 1:
        save_file(arrays, folder / "model.safetensors")
        return
    names = sorted(arrays)
    parts = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
    for part, members in parts.items():
        save_file({name: arrays[name] for name in members}, folder / part)
    index = {"metadata": {}, "weight_map": {name: part for part, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


OF_FAMILY: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-6},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 40,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        "mtp_num_hidden_layers": 1,
    },
}


def family_config(model_type: str, **changes: object) -> dict[str, Any]:
    """config.json of a tiny model of another family than GPT-2."""
    usual = {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "vocab_size": NUM_TOKENS,
        "query_pre_attn_scalar": 16,
    }
    return usual | OF_FAMILY.get(model_type, {}) | changes


def family_weights(config: dict[str, Any], *, prefix: str = "model.", seed: int = 0) -> Arrays:
    """Tensors of such a model, around 0 but for the norms', which are around 1."""
    generator, shape = np.random.default_rng(seed), Shape.of(config, Path("config.json"))
    arrays: Arrays = {}
    for wanted in shape.tensors(NUM_TOKENS):
        sources, size = shape.sources(wanted), wanted.stored or wanted.shape
        for source in sources:
            values = generator.standard_normal(size[1:] if len(sources) > 1 else size, dtype=np.float32)
            name = ("" if source.startswith(("lm_head.", "mtp.")) else prefix) + source
            arrays[name] = 0.1 * values + np.float32("norm" in source)
    return arrays


def write_family(folder: Path, model_type: str, *, shards: int = 1, **changes: object) -> Path:
    """A whole checkpoint; `changes` are of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = family_config(model_type, **changes)
    (folder / "config.json").write_text(json.dumps(shape))
    write_tokenizer_json(folder)
    write_weights(folder, family_weights(shape), shards)
    return folder


def write_checkpoint(folder: Path, *, shards: int = 1, seed: int = 0, **changes: object) -> Path:
    """A whole checkpoint; `changes` are of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = config(**changes)
    (folder / "config.json").write_text(json.dumps(shape))
    write_tokenizer(folder)
    write_weights(folder, weights(shape, seed=seed), shards)
    return folder


def field(number: int, value: int | bytes | float) -> bytes:
    """A field of a protobuf message, its number and value below 128."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3 | 2, len(value)]) + value


def sentencepiece_model(*, kind: int = 2, normalizer: bytes = field(4, 0), num_bytes: int = 256) -> bytes:
    """A tokenizer.model of letters, two words and bytes."""
    pieces = [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>".encode(), 0.0, 6) for byte in range(num_bytes)]
    words = ["he", "\u2581he", "ll", "llo", "\u2581hello"]
    letters = ["\u2581", *"helowrd"]
    pieces += [(word.encode(), -float(i), 1) for i, word in enumerate(words + letters)]
    data = b"".join(field(1, field(1, text) + field(2, score) + field(3, kind)) for text, score, kind in pieces)
    return data + field(2, field(3, kind)) + field(3, normalizer)
