"""Small random GPT-2 checkpoints as Hugging Face lays them out, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from pystaged.loading.shapes import Shape
from support.paths import table
from support.random_models import END_OF_TEXT, byte_alphabet, synthetic_merges

Arrays = dict[str, npt.NDArray[Any]]

NUM_TOKENS = 300
CONFIGS: dict[str, dict[str, Any]] = dict(table("configs"))  # but for what depends on the number of tokens


def config(**changes: object) -> dict[str, Any]:
    """config.json of a tiny model."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), NUM_TOKENS - 1)
    return CONFIGS["gpt2"] | {"vocab_size": NUM_TOKENS} | ends | changes


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


def _added(token: int, content: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": True} | plain


def write_tokenizer_json(folder: Path, num_tokens: int = NUM_TOKENS, **changes: object) -> None:
    """tokenizer.json of a made-up vocabulary; `changes` are of its outermost keys."""
    merges = synthetic_merges(num_tokens)
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    found = {
        "version": "1.0",
        "added_tokens": [_added(num_tokens - 1, END_OF_TEXT)],
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


def family_config(model_type: str, **changes: object) -> dict[str, Any]:
    """config.json of a tiny model of another family than GPT-2."""
    return CONFIGS["others"] | {"model_type": model_type, "vocab_size": NUM_TOKENS} | changes


def family_weights(config: dict[str, Any], *, prefix: str = "model.") -> Arrays:
    """Tensors of such a model, around 0 but for the norms', which are around 1."""
    generator, shape = np.random.default_rng(0), Shape.of(config, Path("config.json"))
    arrays: Arrays = {}
    for wanted in shape.tensors(NUM_TOKENS):
        name = ("" if wanted.source.startswith("lm_head.") else prefix) + wanted.source
        values = generator.standard_normal(wanted.shape, dtype=np.float32)
        arrays[name] = 0.1 * values + np.float32("norm" in name)
    return arrays


def write_family(folder: Path, model_type: str, *, shards: int = 1, **changes: object) -> Path:
    """A whole checkpoint; `changes` are of config.json."""
    shape = family_config(model_type, **changes)
    return _write(folder, shape, family_weights(shape), shards)


def write_checkpoint(folder: Path, *, shards: int = 1, seed: int = 0, **changes: object) -> Path:
    """One of GPT-2."""
    shape = config(**changes)
    return _write(folder, shape, weights(shape, seed=seed), shards)


def _write(folder: Path, shape: dict[str, Any], arrays: Arrays, shards: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    write_tokenizer_json(folder)
    write_weights(folder, arrays, shards)
    return folder


def write_sentencepiece(folder: Path, pieces: Sequence[str], **changes: object) -> None:
    """tokenizer.json as transformers writes it of a SentencePiece model with these pieces, the likeliest first;
    `changes` are of its outermost keys."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    splits = [(piece[:i], piece[i:]) for piece in pieces for i in range(1, len(piece))]
    found = {
        "version": "1.0",
        "added_tokens": [_added(i, tokens[i]) for i in range(3)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in splits if left in vocab and right in vocab],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(found | changes), "utf-8")
