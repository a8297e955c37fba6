"""Checkpoints of every family: as GGUF files they say what transformers says, to llama.cpp and to us."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFReader, get_tensor_name_map, quants
from support.checkpoints import (
    NUM_TOKENS,
    OF_FAMILY,
    family_config,
    family_weights,
    field,
    sentencepiece_model,
    write_checkpoint,
    write_family,
    write_tokenizer_json,
    write_weights,
)
from support.convert import change_json, convert, llama_tokens, write_bfloat16
from support.logits import engine_logits, llama_context, llama_pass
from support.paths import DATA
from support.random_models import gguf_file

from pystaged import _core
from pystaged.loading.families import ARCHITECTURES, FAMILIES
from pystaged.loading.metadata import About
from pystaged.loading.quantize import quantize, quantize_checkpoint
from pystaged.loading.shapes import Shape
from pystaged.loading.vocabulary import read_vocabulary

Floats = npt.NDArray[np.float32]

TOKENS = np.random.default_rng(0).integers(0, 256, 120).tolist()
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "vocab_size": NUM_TOKENS,
    "bos_token_id": NUM_TOKENS - 1,
    "eos_token_id": NUM_TOKENS - 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": np.linspace(1, 2, 6).tolist(),
    "long_factor": np.linspace(1, 30, 6).tolist(),
    "partial_rotary_factor": 0.75,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}
FIFTH = ["linear_attention"] * 4 + ["full_attention"]
STATE_SPACE = {
    "num_hidden_layers": 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-wide-heads": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-yarn": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 32} | OF_FAMILY["qwen3_moe"]),
    "gpt-oss": ("gpt_oss", {"head_dim": 16} | OF_FAMILY["gpt_oss"]),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "granite": ("granite", GRANITE),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40},
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-long": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64, "tie_word_embeddings": True},
    ),
    "lfm2": ("lfm2", {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": False}),
    "lfm2-adjusted": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "intermediate_size": 200,
            "block_multiple_of": 48,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "granite-hybrid": ("granitemoehybrid", GRANITE | STATE_SPACE),
    "granite-hybrid-plain": (
        "granitemoehybrid",
        STATE_SPACE | {"mamba_n_groups": 1, "position_embedding_type": "rope", "attention_multiplier": 0.25},
    ),
    "granite-hybrid-attending": (
        "granitemoehybrid",
        # Its numbers of states are not used, and need not fit.
        GRANITE
        | STATE_SPACE
        | {
            "layer_types": ["attention"] * 3,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "mamba_n_groups": 3,
        },
    ),
    "qwen3.5": ("qwen3_5_text", DELTA_NET),
    "qwen3.5-yarn": (
        "qwen3_5_text",
        DELTA_NET
        | {
            "rope_parameters": DELTA_NET["rope_parameters"]
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        },
    ),
    "qwen3.5-tied": (
        "qwen3_5_text",
        DELTA_NET
        | {"num_hidden_layers": 5, "linear_num_value_heads": 2, "layer_types": FIFTH, "tie_word_embeddings": True},
    ),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return pytest.importorskip("transformers", reason="transformers is not installed")


def save(transformers: Any, folder: Path, case: str, **options: Any) -> Any:
    """A random checkpoint; returns its model."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    kind, changes = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **SMALL | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases do not show mistakes otherwise
            parameter.add_((0.3 if "norm" in name else 0.1) * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    write_tokenizer_json(folder)
    return model


def expected_logits(model: Any) -> Floats:
    import torch  # noqa: PLC0415

    with torch.no_grad():
        logits: Floats = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    assert logits.std() > 0.1
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(transformers: Any, tmp_path: Path, case: str) -> None:
    expected = expected_logits(save(transformers, tmp_path / "saved", case))
    path = tmp_path / "model.gguf"
    convert(tmp_path / "saved", path)
    with llama_context(path, num_threads=2, exact=True) as context:
        tolerance = 1e-2 if "gemma" in case else 1e-3  # its GELU is a table of F16 numbers
        assert np.abs(llama_pass(context, TOKENS, 0) - expected).max() <= tolerance
    # Our keys and values are F16; recurrent states are not.
    tolerance = 2e-3 if FAMILIES[CASES[case][0]].mixer else 1e-2
    assert np.abs(engine_logits(path, TOKENS) - expected).max() <= tolerance


@pytest.mark.slow
def test_shards_and_half_precision(transformers: Any, tmp_path: Path) -> None:
    for folder, size in {"whole": "1GB", "shards": "50KB"}.items():
        save(transformers, tmp_path / folder, "qwen3", max_shard_size=size)
        convert(tmp_path / folder, tmp_path / f"{folder}.gguf", about=About("tiny"))
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    assert (tmp_path / "shards.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


# ---- Without PyTorch ----


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_are_those_of_gguf(model_type: str) -> None:
    family = FAMILIES[model_type]
    (architecture,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = get_tensor_name_map(architecture, 1)
    top = "transformer" if model_type == "gpt2" else "model"
    for name, source in (family.layers | family.recurrent).items():
        if "shared_mlp" not in source and not source.endswith(
            "experts.gate_up_proj"
        ):  # llama.cpp's converter takes them apart
            usual = source.replace("dt_bias", "dt_proj").replace(".*", "")
            assert names.get_name(f"{top}.{family.blocks}.0.{usual}") == f"blk.0.{name}"
    for name, source in family.others.items():
        assert names.get_name(f"{top}.{source}") == name


def test_architectures_are_those_of_the_engine(tmp_path: Path) -> None:
    with gguf_file(tmp_path / "odd.gguf", "odd"):
        pass
    with pytest.raises(_core.ModelError, match="there are: " + ", ".join(ARCHITECTURES)):
        _core.Model(str(tmp_path / "odd.gguf"))
    assert {family.architecture for family in FAMILIES.values()} <= set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("model_type", "seen"), [("gemma3", "vision_tower.embedding.weight"), ("qwen3_5", "visual.patch_embed.proj.bias")]
)
def test_the_text_of_a_model_of_pictures(tmp_path: Path, model_type: str, seen: str) -> None:
    folder = write_family(tmp_path / "text", f"{model_type}_text", tie_word_embeddings=True)
    convert(folder, tmp_path / "text.gguf", about=About("tiny"))
    config = json.loads((folder / "config.json").read_text())
    arrays = family_weights(config, prefix="model.language_model.")
    whole = {"model_type": model_type, "tie_word_embeddings": True}
    text = config | {"tie_word_embeddings": model_type == "gemma3"}  # the whole model's counts
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    write_weights(folder, arrays | {f"model.{seen}": np.zeros((2, 2), np.float32)})
    convert(folder, tmp_path / "pictures.gguf", about=About("tiny"))
    assert (tmp_path / "pictures.gguf").read_bytes() == (tmp_path / "text.gguf").read_bytes()


def test_blocks_for_multi_token_prediction(tmp_path: Path) -> None:
    """They are kept, as llama.cpp's converter does; checkpoints that transformers saved lack them."""
    folder = write_family(tmp_path / "c", "qwen3_5_text")
    arrays = family_weights(json.loads((folder / "config.json").read_text()))
    convert(folder, tmp_path / "ahead.gguf")
    write_weights(folder, {name: array for name, array in arrays.items() if not name.startswith("mtp.")})
    convert(folder, tmp_path / "plain.gguf")
    plain, ahead = (GGUFReader(tmp_path / name) for name in ("plain.gguf", "ahead.gguf"))
    assert [reader.fields["qwen35.block_count"].contents() for reader in (plain, ahead)] == [2, 3]
    assert ahead.fields["qwen35.nextn_predict_layers"].contents() == 1
    assert "qwen35.nextn_predict_layers" not in plain.fields
    more = {tensor.name: tensor.data for tensor in ahead.tensors[len(plain.tensors) :]}
    assert more.keys() == {f"blk.2.{tensor.name[6:]}" for tensor in plain.tensors if "blk.1." in tensor.name} | {
        f"blk.2.nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    }
    np.testing.assert_array_equal(more["blk.2.nextn.eh_proj.weight"], arrays["mtp.fc.weight"])
    np.testing.assert_array_equal(more["blk.2.nextn.hnorm.weight"], arrays["mtp.pre_fc_norm_hidden.weight"] + 1)
    np.testing.assert_array_equal(more["blk.2.attn_q_norm.weight"], arrays["mtp.layers.0.self_attn.q_norm.weight"] + 1)
    expected = engine_logits(tmp_path / "plain.gguf", TOKENS[:20])
    np.testing.assert_array_equal(engine_logits(tmp_path / "ahead.gguf", TOKENS[:20]), expected)
    with llama_context(tmp_path / "ahead.gguf") as context:
        assert np.abs(llama_pass(context, TOKENS[:20], 0) - expected).max() <= 1e-2
    assert _core.Model(tmp_path / "ahead.gguf", lender=_core.Model(tmp_path / "ahead.gguf")).target_layers == [2]


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if FAMILIES[name].mixer or FAMILIES[name].experts])
def test_hybrids_and_mixtures_in_llama_cpp(tmp_path: Path, model_type: str) -> None:
    convert(write_family(tmp_path / "c", model_type), tmp_path / "model.gguf")
    found = engine_logits(tmp_path / "model.gguf", TOKENS)
    assert found.std() > 0.1
    with llama_context(tmp_path / "model.gguf", num_threads=1) as context:
        assert np.abs(llama_pass(context, TOKENS, 0) - found).max() <= 1e-3


def test_experts_in_mxfp4_stay_so(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "c", "gpt_oss")
    plain = family_weights(json.loads((folder / "config.json").read_text()))
    packed, generator = plain.copy(), np.random.default_rng(1)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([numbers, -numbers])
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        blocks = generator.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = generator.integers(120, 125, blocks.shape[:-1], np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = numbers[np.stack([blocks & 15, blocks >> 4], -1)] * 2.0 ** (scales[..., None, None] - 127.0)
        plain[name] = np.ascontiguousarray(values.reshape(experts, outputs, inputs).swapaxes(1, 2), np.float32)
    write_weights(folder, plain)
    convert(folder, tmp_path / "plain.gguf")
    write_weights(folder, packed)
    change_json("config.json", quantization_config={"quant_method": "mxfp4"})(folder)
    quantize_checkpoint(folder, tmp_path / "packed.gguf", "q8_0")
    expected = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "plain.gguf").tensors}
    found = GGUFReader(tmp_path / "packed.gguf")
    for tensor in found.tensors:
        if tensor.name.endswith("_exps.weight"):
            assert tensor.tensor_type is GGMLQuantizationType.MXFP4
            data = quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(data, expected[tensor.name].data)
    assert {tensor.tensor_type for tensor in found.tensors if "attn_q.weight" in tensor.name} == {
        GGMLQuantizationType.Q8_0
    }
    assert found.fields["general.file_type"].contents() == 38
    with llama_context(tmp_path / "packed.gguf", num_threads=1) as context:
        expected_logits = llama_pass(context, TOKENS[:20], 0)
    assert np.abs(engine_logits(tmp_path / "packed.gguf", TOKENS[:20]) - expected_logits).max() <= 0.1
    with pytest.raises(ValueError, match="of this kind cannot be q4_k_m, only"):
        quantize_checkpoint(folder, tmp_path / "other.gguf", "q4_k_m")
    write_weights(folder, packed | {"model.layers.1.mlp.experts.down_proj_scales": np.zeros((8, 64, 2), np.uint8)})
    with pytest.raises(ValueError, match=r"down_proj_scales' is U8\[8, 64, 2\], not U8\[8, 64, 3\]"):
        convert(folder, tmp_path / "other.gguf")


def test_the_mask_token_of_a_parallel_draft_is_kept(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "c", "llama", hidden_size=256, head_dim=64)
    change_json("config.json", pard_token=7)(folder)
    quantize_checkpoint(folder, tmp_path / "model.gguf", "q8_0", about=About("tiny"))
    assert _core.Tokenizer(tmp_path / "model.gguf").mask_token == 7


@pytest.mark.parametrize(
    ("kind", "model_type"), [("q8_0", "llama"), ("q4_k_m", "llama"), ("q8_0", "qwen3_5_text"), ("q8_0", "lfm2")]
)
def test_quantizing_loses_nothing_on_the_way(tmp_path: Path, kind: str, model_type: str) -> None:
    """From a checkpoint in BF16 as from the same numbers in F32."""
    folder = write_family(tmp_path / "c", model_type, hidden_size=256, head_dim=16 if "qwen" in model_type else 64)
    arrays = family_weights(json.loads((folder / "config.json").read_text()))
    write_bfloat16(folder / "model.safetensors", arrays)
    convert(folder, tmp_path / "f32.gguf", about=About("tiny"))
    quantize(tmp_path / "f32.gguf", tmp_path / "expected.gguf", kind)
    quantize_checkpoint(folder, tmp_path / "model.gguf", kind, about=About("tiny"))
    expected = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "expected.gguf").tensors}
    for tensor in GGUFReader(tmp_path / "model.gguf").tensors:
        assert tensor.tensor_type == expected.pop(tensor.name).tensor_type
    assert not expected
    np.testing.assert_array_equal(
        engine_logits(tmp_path / "model.gguf", TOKENS[:20]), engine_logits(tmp_path / "expected.gguf", TOKENS[:20])
    )


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text", "granitemoehybrid", "gpt_oss", "qwen3_5_text"])
def test_large_tensors_are_converted_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    folder = tmp_path / "c"
    write_checkpoint(folder) if model_type == "gpt2" else write_family(folder, model_type)
    steps: dict[str, list[int]] = {"whole": [], "pieces": []}
    for name, seen in steps.items():
        convert(
            folder,
            tmp_path / name,
            quantization="F16",
            about=About("tiny"),
            progress=lambda *step, s=seen: s.append(step),
        )
        monkeypatch.setattr("pystaged.loading.convert._CHUNK", 1000)
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()
    assert len(steps["pieces"]) > 1.5 * len(steps["whole"])


# ---- Vocabularies ----

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
HEAD, TAIL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3_SPLIT = rf"{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
QWEN_SPLIT = rf"{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}"
)
PHI4_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{HEAD}*{TAIL}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{HEAD}+{TAIL}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{HEAD}*{TAIL}+|[^\r\n\p{{L}}\p{{N}}]?{HEAD}+{TAIL}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)
TEXT = (
    "I'm 1234567 years old, WE'VE told 'them'!!\n\n  def f(x):\n\treturn x**2  # caf\u00e9 \u00bd\r\n"
    "\u4e2d\u6587 \u043d\u0435\u0449\u043e \u0939\u093f\u0928\u094d\u0926\u0940 "
    "HelloWorld fooBAR 3.14 \U0001f999\u2764 <|user|>hi<|endoftext|>  end "
)


def split(pattern: str, behavior: str = "Isolated") -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": behavior == "Removed"},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]


@cache
def gpt2_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges."""
    fields = GGUFReader(DATA / "ggml-vocab-gpt-2.gguf").fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    return tokens, merges


def write_gpt2_tokenizer(folder: Path, steps: list[dict[str, Any]], ignore_merges: bool = False, **more: Any) -> None:
    """GPT-2's tokens, with two that are added, for texts split in another way."""
    tokens, merges = gpt2_vocabulary()
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"<|endoftext|>": True, "<|user|>": False}
    found = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(tokens) - 1 + i, "content": content, "special": special} | plain
            for i, (content, special) in enumerate(added.items())
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
            "ignore_merges": ignore_merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(found | more), "utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pre", "steps", "ignore_merges"),
    [
        ("llama-bpe", split(LLAMA3_SPLIT), True),
        ("smaug-bpe", split(LLAMA3_SPLIT), False),
        ("smaug-bpe", split(LLAMA3_SPLIT, "Removed"), False),
        ("qwen2", split(QWEN_SPLIT), False),
        ("qwen35", split(QWEN35_SPLIT), False),
        ("dbrx", split(PHI4_SPLIT), False),
        ("gpt-4o", split(GPT4O_SPLIT), False),
        ("tekken", split(TEKKEN_SPLIT), True),
        (
            "smollm",
            [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
            False,
        ),
    ],
)
def test_texts_are_split_as_the_tokenizer_says(
    tmp_path: Path, pre: str, steps: list[dict[str, Any]], ignore_merges: bool
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    write_family(tmp_path, "llama")
    write_gpt2_tokenizer(tmp_path, steps, ignore_merges)
    config = family_config("llama", vocab_size=50300, hidden_size=8, head_dim=2)
    rows = family_weights(config)
    rows["model.embed_tokens.weight"] = rows["lm_head.weight"] = np.ones((50300, 8), np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_weights(tmp_path, rows)
    out = tmp_path / "model.gguf"
    convert(tmp_path, out)
    expected = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids
    assert llama_tokens(out, TEXT) == expected
    found = _core.Tokenizer(str(out))
    assert found.metadata["tokenizer.ggml.pre"] == pre
    assert found.encode(TEXT).tolist() == expected
    assert [found.is_control(token) for token in range(50255, 50259)] == [False, True, True, False]


def test_bos_and_the_template_of_chats(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "llama", "llama")
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    write_tokenizer_json(folder, post_processor={"type": "Sequence", "processors": [template]})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    convert(folder, tmp_path / "model.gguf")
    fields = GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.ggml.add_eos_token"].contents() is False
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert llama_tokens(tmp_path / "model.gguf", "a")[0] == NUM_TOKENS - 1


@pytest.mark.parametrize(
    ("model_type", "marks"),
    [
        ("qwen3_5_text", ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>"]),
        ("lfm2", ["<|im_end|>", "<|im_start|>", "<|startoftext|>", "<|tool_call_start|>", "<|tool_call_end|>"]),
        ("granitemoehybrid", ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<tool_call>"]),
    ],
)
def test_ends_of_turns(tmp_path: Path, model_type: str, marks: list[str]) -> None:
    """The token that ends texts ends turns, too; marks are control tokens, whether or not the tokenizer says so."""
    folder = write_family(tmp_path / "c", model_type)
    added = [{"id": 280 + i, "content": mark, "special": False} for i, mark in enumerate(marks)]
    write_tokenizer_json(folder, 280, added_tokens=added)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": marks[0]}))
    convert(folder, tmp_path / "model.gguf")
    tokenizer = _core.Tokenizer(str(tmp_path / "model.gguf"))
    assert tokenizer.eos == 280
    assert tokenizer.end_tokens.tolist() == [279, 280]
    assert [tokenizer.is_control(280 + i) for i in range(len(marks))] == [mark.startswith("<|") for mark in marks]


def write_sentencepiece(folder: Path, data: bytes) -> Path:
    write_family(folder, "llama")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(data)
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "added_tokens_decoder": {"290": {"content": "\u2581\u2581", "special": False}, "291": {"content": "<|end|>"}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_sentencepiece(tmp_path: Path) -> None:
    convert(write_sentencepiece(tmp_path / "llama", sentencepiece_model()), tmp_path / "model.gguf")
    fields = GGUFReader(tmp_path / "model.gguf").fields
    contents = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "tokens", "token_type")}
    assert contents["model"] == "llama"
    assert contents["tokens"][288:293] == ["[PAD288]", "[PAD289]", "  ", "<|end|>", "[PAD292]"]
    assert contents["token_type"][288:293] == [5, 5, 4, 3, 5]
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is True
    tokens = llama_tokens(tmp_path / "model.gguf", "hello world!<|end|>")
    spelled = [contents["tokens"][token] for token in tokens]
    assert spelled == ["<s>", "\u2581hello", "\u2581", *"world", "<0x21>", "<|end|>"]
    assert _core.Tokenizer(str(tmp_path / "model.gguf")).encode("hello").tolist()[-1:] == tokens[1:2]


def test_sentencepiece_against_its_own_library(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    (tmp_path / "text").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=NUM_TOKENS + 100,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    folder = write_family(tmp_path / "llama", "llama")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes((tmp_path / "tokenizer.model").read_bytes())
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    rows = family_weights(family_config("llama"))
    rows["model.embed_tokens.weight"] = rows["lm_head.weight"] = np.ones((NUM_TOKENS + 100, 64), np.float32)
    write_weights(folder, rows)
    convert(folder, tmp_path / "model.gguf")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    text = "def test(x):  \n\treturn  'caf\u00e9 \U0001f999'  # the end"
    expected = [processor.bos_id(), *processor.encode(text)]
    assert llama_tokens(tmp_path / "model.gguf", text) == expected


# ---- Malformed ones ----

ROPE = {"rope_type": "llama3", "factor": 8.0}
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
MALFORMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("llama", {"num_local_experts": 8}, "'llama' is a mixture of experts"),
    "experts-used": ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
    "experts-kept-unscaled": ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    "experts-in-some-layers": ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is"),
    "mask-token": (
        "llama",
        {"pard_token": NUM_TOKENS},
        f"pard_token is {NUM_TOKENS}, which is no",
    ),
    "mask-word": ("llama", {"pard_token": "<mask>"}, "pard_token is <mask>, which is no token"),
    "unknown": ("falcon", {}, "checkpoints of 'falcon' cannot be converted, only those of gpt2, llama, mistral"),
    "quantized": ("llama", {"quantization_config": {"bits": 4}}, "is quantized already"),
    "activation": ("qwen2", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu'"),
    "window": ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
    "biases": ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    "heads": ("llama", {"head_dim": None, "num_attention_heads": 5}, "does not split into 5 heads"),
    "kv-heads": ("llama", {"num_key_value_heads": 3}, "4 heads do not share 3 key and value heads"),
    "scale": ("granite", {"residual_multiplier": 0.0}, "residual_multiplier is 0.0, but must be a number above 0"),
    "epsilon": ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    "no-width": ("llama", {"hidden_size": None}, "hidden_size is None"),
    "rope-type": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "of type 'dynamic' are not supported"),
    "rope-list": ("llama", {"rope_parameters": [1]}, "is damaged: rope_parameters"),
    "rope-factor": ("llama", {"rope_scaling": ROPE | {"factor": -8.0}}, "factor is -8.0, but must be"),
    "rope-base": ("llama", {"rope_theta": math.inf}, "rope_theta is inf"),
    "yarn": ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 16}}, "beta_fast is 16, which"),
    "rope-positions": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2**40}},
        "original_max_position_embeddings is 1099511627776, outside 1 to",
    ),
    "long-missing": ("phi3", {"rope_scaling": {"type": "longrope"}}, "long_factor must be a list of 8 numbers"),
    "long-short": (
        "phi3",
        {"rope_scaling": LONG_ROPE | {"short_factor": [1.0] * 7 + [math.nan]}},
        "short_factor is nan",
    ),
    "partial": ("llama", {"partial_rotary_factor": 0.5}, "rotates 8 of 16 numbers"),
    "softcap": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "score-scale": ("gemma3_text", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar is 24, which a GGUF file"),
    "layer-types": ("gemma3_text", {"layer_types": ["full_attention"] * 2}, "layer_types is .*, which a GGUF file of"),
    "no-feed-forward": (
        "lfm2",
        {"block_auto_adjust_ff_dim": True, "block_ff_dim": 1},
        "block_auto_adjust_ff_dim makes 0 of an intermediate_size of 1, but must make 1 to",
    ),
    "kinds-of-layers": (
        "lfm2",
        {"layer_types": ["conv", "mamba"]},
        "layer_types has 'mamba', but only full_att",
    ),
    "number-of-layers": ("lfm2", {"layer_types": ["conv"]}, "layer_types is no list of 2 kinds of layers"),
    "no-ids-of-layers": ("lfm2", {"layer_types": None, "full_attn_idxs": 3}, "is damaged: full_attn_idxs"),
    "irregular-layers": (
        "qwen3_5_text",
        {"layer_types": ["full_attention", "linear_attention"]},
        "layer_types is .*, which a GGUF file of qwen35 cannot express",
    ),
    "many-layers": ("qwen3_5_text", {"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576, above 4096 for a"),
    "value-heads": ("qwen3_5_text", {"linear_num_value_heads": 5}, "5 value heads .* do not share 2 key heads"),
    "value-width": ("qwen3_5_text", {"linear_value_head_dim": 32}, "linear_value_head_dim is 32, but must be .* 16"),
    "sections": (
        "qwen3_5_text",
        {"rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [2, 2, 1]}},
        r"mrope_section is \[2, 2, 1\], but must be three numbers of 4 pairs",
    ),
    "blocks-ahead": ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2, but only 0"),
    "state-heads": ("granitemoehybrid", {"mamba_n_heads": 7}, "128 numbers do not split into 7 heads"),
    "hybrid-experts": ("granitemoehybrid", {"num_local_experts": 64}, "'granitemoehybrid' is a mixture of experts"),
    "rope-layers": ("smollm3", {"no_rope_layers": [0, 1]}, r"no_rope_layers is \[0, 1\], which a GGUF file of smollm3"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_configs(tmp_path: Path, case: str) -> None:
    model_type, changes, message = MALFORMED[case]
    folder = write_family(tmp_path / "c", model_type if model_type in FAMILIES else "llama")
    change_json("config.json", model_type=model_type, **changes)(folder)
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(folder, tmp_path / "model.gguf", "f16")
    assert list(tmp_path.iterdir()) == [folder]


JUNK = [None, True, -1, 0, 1, 3, 1.5, math.nan, math.inf, 2**62, "x", [], [1], {}, {"rope_type": []}, {"x": {}}]
FACTORS = ("freqs", "factors_long", "factors_short")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_any_tokenizer_is_read_or_refused(tmp_path: Path, name: str) -> None:
    write_tokenizer_json(tmp_path)
    single = [{"SpecialToken": {"id": "<|endoftext|>"}}]
    template = {"type": "TemplateProcessing", "single": single, "processors": []}
    settings = {"bos_token": None, "add_bos_token": True, "added_tokens_decoder": {"1": {"content": "a"}}}
    whole = json.loads((tmp_path / "tokenizer.json").read_text("utf-8")) | {"post_processor": template}
    usual = whole if name == "tokenizer.json" else settings | {"chat_template": "x", "additional_special_tokens": []}

    def changed(found: Any) -> Iterator[Any]:
        yield from JUNK
        for key in found if isinstance(found, dict) else ():
            if key != "vocab":
                yield from ({**found, key: value} for value in changed(found[key]))
        if isinstance(found, list):
            yield from ([value] for value in changed(found[0] if found else None))

    for change in changed(usual):
        (tmp_path / name).write_text(json.dumps(change))
        with contextlib.suppress(ValueError):
            read_vocabulary(tmp_path, NUM_TOKENS, {})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_any_config_is_read_or_refused(model_type: str) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    usual = family_config(model_type, rope_parameters=rope, sliding_window=40, layer_types=None, text_config=None)
    usual |= {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": None, "rope_scaling": None}
    usual |= OF_FAMILY.get(model_type, {})
    family = FAMILIES[model_type]
    further = ("mtp_num_hidden_layers", "full_attn_idxs", "full_attention_interval", "attn_layer_indices")
    names = sorted({*usual, *family.defaults, *family.only, *family.older.values(), *further})
    for key, value in itertools.product(names, JUNK):
        for changed in ({key: value}, {"rope_parameters": {key: value}}, {"rope_scaling": rope | {key: value}}):
            with contextlib.suppress(ValueError):
                shape = Shape.of({**usual, **changed}, Path("config.json"))
                assert shape.computed.keys() <= {f"rope_{kind}.weight" for kind in FACTORS}, (key, value)
                for wanted in itertools.islice(shape.tensors(10), 100):
                    assert min(wanted.shape) > 0, (key, value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (sentencepiece_model()[:-1], "tokenizer.model is damaged: it ends within a field"),
        (b"\xff" * 20, "is damaged"),
        (field(1, 5), "is damaged"),
        (field(1, field(1, b"\xff")), "is damaged"),
        (field(1, field(1, b"a")) * 2, "is damaged: two pieces are spelled 'a'"),
        (field(1, field(1, b"a") + field(2, math.nan)), "is damaged: the score of 'a' is nan"),
        (sentencepiece_model(kind=1), "SentencePiece models of kind BPE that keep texts as they are"),
        (sentencepiece_model(normalizer=field(2, b"x") + field(4, 0)), "that keep texts as they are"),
        (sentencepiece_model(normalizer=b""), "that keep texts as they are"),
        (sentencepiece_model(num_bytes=255), "has no tokens for bytes"),
        (b"", "that keep texts"),
    ],
)
def test_malformed_sentencepiece(tmp_path: Path, data: bytes, message: str) -> None:
    folder = write_sentencepiece(tmp_path / "c", data)
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "byte_fallback": True}}, "put its tokenizer.model beside it"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": split("a+")}}, "cannot say how this tokenizer splits"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": 5}}, "cannot say how this tokenizer splits"),
        ({"normalizer": {"type": "Lowercase"}}, "cannot say how this tokenizer splits"),
        ({"added_tokens": [{"content": "[PAD5]", "id": 298}]}, "have the same id 298"),
    ],
)
def test_malformed_tokenizers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_family(tmp_path / "c", "llama")
    write_tokenizer_json(folder, **changes)
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "model.gguf")


def test_a_token_spelled_as_an_unused_one(tmp_path: Path) -> None:
    folder = write_sentencepiece(tmp_path / "c", sentencepiece_model())
    (folder / "added_tokens.json").write_text('{"[PAD299]": 292}')
    with pytest.raises(ValueError, match=r"two tokens would be spelled '\[PAD299\]'"):
        convert(folder, tmp_path / "model.gguf")
