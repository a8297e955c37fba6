"""Growing keeps the function: a grown model's logits are its source's, by an independent numpy forward pass."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, quants
from grow import _noise, add_noise, grow_llama, layer_plan
from random_weights import copy_tokenizer, write_random
from support.decoding import generate
from support.family_reference import FamilyReference
from support.logits import engine_logits
from support.random_models import RandomModel, add_english, write

from pystaged._core import Model, Session, Tokenizer
from pystaged.decoding.context import Context
from pystaged.options.config import SamplingConfig

TOKENS = [5, 17, 256, 0, 299, 42, 42, 7, 130, 298, 61, 3]


def random_gpt2(out: Path, **changes: Any) -> Path:
    """A tiny random model: 2 heads, 2 layers, 300 tokens."""
    shape: dict[str, Any] = {"width": 64, "layers": 2, "heads": 2, "vocab_size": 300, "context": 32}
    shape |= {"quantization": "F32", "add_vocabulary": add_english}
    write_random(out, "gpt2", **shape | changes)
    return out


def metadata(path: Path) -> dict[str, Any]:
    """All metadata of a GGUF file."""
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def test_the_seed_decides(tmp_path: Path) -> None:
    files = [random_gpt2(tmp_path / "model.gguf", quantization="Q8_0", seed=seed).read_bytes() for seed in (1, 1, 2)]
    assert files[0] == files[1] != files[2]


def test_vocabulary_is_copied(tmp_path: Path) -> None:
    source = random_gpt2(tmp_path / "source.gguf")
    copied: dict[str, Any] = {"add_vocabulary": partial(copy_tokenizer, source), "quantization": "Q4_0"}
    copy = random_gpt2(tmp_path / "copy.gguf", width=32, layers=1, heads=1, **copied)
    tokenizer = {name: value for name, value in metadata(source).items() if name.startswith("tokenizer.")}
    assert len(tokenizer) == 7
    assert metadata(copy).items() >= tokenizer.items()


# ---- Llama ----

GROWN: dict[str, Any] = {"width": 160, "layers": 5, "heads": 8, "kv_heads": 2, "ffn_width": 128}


def random_llama(out: Path, quantization: str = "F32", **shape: Any) -> Path:
    """A tiny random model: 3 heads, which share one of keys and values, 2 layers, 300 tokens."""
    usual: dict[str, Any] = {"width": 96, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 32, "ffn_width": 64}
    usual |= {"vocab_size": 300, "context": 64, "add_vocabulary": add_english}
    write_random(out, "llama", **(usual | shape), quantization=quantization)
    return out


def greedy(path: Path) -> list[int]:
    """The twenty tokens that the model writes after TOKENS."""
    decoder = Context(Session(Model(str(path))))
    steps = generate(decoder, np.array(TOKENS, np.int32), SamplingConfig(), 20)
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "separate-head"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        ({"heads": 6, "kv_heads": 2}, {"heads": 12, "kv_heads": 3}),
        ({"heads": 6, "kv_heads": 2, "head_dim": 8}, {"heads": 6, "kv_heads": 2, "width": 96, "ffn_width": 64}),
        ({"rope_base": 5e5}, {"heads": 3, "kv_heads": 1, "layers": 2}),
    ],
    ids=["larger-group", "more-groups", "deeper", "wider"],
)
def test_grown_llama_says_what_its_source_says(tmp_path: Path, tie: bool, old: Any, new: Any) -> None:
    source, grown = random_llama(tmp_path / "source.gguf", tie=tie, **old), tmp_path / "grown.gguf"
    grow_llama(source, grown, **(GROWN | new), quantization="F32")
    exact = FamilyReference(source).logits(TOKENS)
    assert exact.std() > 0.1
    # Keys and values are kept as float16, and what is on the edge may be rounded the other way.
    np.testing.assert_allclose(FamilyReference(grown).logits(TOKENS), exact, rtol=0, atol=1e-4)
    np.testing.assert_allclose(engine_logits(grown, TOKENS), engine_logits(source, TOKENS), rtol=0, atol=1e-4)
    assert greedy(grown) == greedy(source)


def test_added_layers_are_silent_but_not_empty(tmp_path: Path) -> None:
    source, grown = random_llama(tmp_path / "source.gguf"), tmp_path / "grown.gguf"
    grow_llama(source, grown, **GROWN, quantization="Q8_0")
    weights = FamilyReference(grown).weights
    for layer, (_, added) in enumerate(layer_plan(2, 5)):
        for name in ("attn_output.weight", "ffn_down.weight"):
            assert weights[f"blk.{layer}.{name}"].any() != added
        for name in ("attn_norm.weight", "attn_q.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight"):
            assert weights[f"blk.{layer}.{name}"].any()
    old, new = metadata(source), metadata(grown)
    numbers = {"embedding_length": 160, "feed_forward_length": 128, "block_count": 5, "attention.head_count": 8}
    numbers |= {"attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32}
    changed: dict[str, Any] = {f"llama.{name}": number for name, number in numbers.items()}
    changed |= {"general.file_type": 7, "GGUF.kv_count": new["GGUF.kv_count"], "GGUF.tensor_count": 2 + 5 * 9}
    changed["general.name"] = f"grown from {old['general.name']} (160 wide, 5 layers)"
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    changed[epsilon] = pytest.approx(0.6 * old[epsilon])
    assert new == old | changed


def test_norms_of_small_values(tmp_path: Path) -> None:
    """Where epsilon counts for as much as the mean square."""
    source, grown = tmp_path / "source.gguf", tmp_path / "grown.gguf"
    tiny = RandomModel("llama", metadata={"attention.layer_norm_rms_epsilon": 1.0})
    write(source, tiny)
    grow_llama(source, grown, **GROWN | {"heads": 8, "kv_heads": 4}, quantization="F32")
    exact = FamilyReference(source).logits(TOKENS)
    np.testing.assert_allclose(FamilyReference(grown).logits(TOKENS), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantization", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_grown_llama_keeps_quantized_weights(tmp_path: Path, quantization: str) -> None:
    floats, source, grown = (tmp_path / f"{name}.gguf" for name in ("floats", "source", "grown"))
    same = {"width": 96, "layers": 2, "heads": 3, "kv_heads": 1, "ffn_width": 64}
    grow_llama(random_llama(floats, tie=False), source, **same, quantization=quantization)
    grow_llama(source, grown, **GROWN, quantization=quantization)
    expected = {t.name: quants.dequantize(t.data, t.tensor_type) for t in GGUFReader(source).tensors}
    found = {t.name: t for t in GGUFReader(grown).tensors}
    queries = found["blk.3.attn_q.weight"]
    assert queries.tensor_type.name == quantization
    assert queries.shape.tolist() == [160, 256]
    values = quants.dequantize(queries.data, queries.tensor_type)
    old = expected["blk.1.attn_q.weight"]
    # Packing twice may round the scale of a block once more.
    np.testing.assert_allclose(values[: len(old), :96], old, rtol=0, atol=abs(old).max() / 100)
    assert not values[len(old) :].any()
    assert not values[:, 96:].any()


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q4_K_M"])
def test_random_llama_of_any_type(tmp_path: Path, quantization: str) -> None:
    path = random_llama(tmp_path / "model.gguf", quantization, width=256, head_dim=256, ffn_width=256, tie=False)
    exact = FamilyReference(path).logits(TOKENS)
    # Kernels round what they multiply with to 8 bits.
    assert np.abs(engine_logits(path, TOKENS) - exact).mean() <= 0.02 * exact.std()


def test_a_vocabulary_is_filled_up(tmp_path: Path) -> None:
    source = random_llama(tmp_path / "source.gguf")
    padded = random_llama(tmp_path / "padded.gguf", vocab_size=310, add_vocabulary=partial(copy_tokenizer, source))
    small, large = Tokenizer(str(source)), Tokenizer(str(padded))
    assert large.num_tokens == Model(str(padded)).vocab_size == 310
    assert large.shared_with(small).tolist() == [True] * 300 + [False] * 10
    assert large.encode("the tree then").tolist() == small.encode("the tree then").tolist()
    with pytest.raises(ValueError, match=r"vocab_size is 299, but .* has 300 tokens"):
        random_llama(tmp_path / "cut.gguf", vocab_size=299, add_vocabulary=partial(copy_tokenizer, source))


# ---- Noise ----


def test_noise_on_the_matrices_of_layers(tmp_path: Path) -> None:
    source, noisy = random_llama(tmp_path / "source.gguf"), tmp_path / "noisy.gguf"
    add_noise(source, noisy, noise=0.25, quantization="F32")
    old, new = (FamilyReference(path).weights for path in (source, noisy))
    for name, weights in old.items():
        noise = new[name] - weights
        if name.startswith("blk.") and weights.ndim == 2:
            assert noise.std() == pytest.approx(0.25 * weights.std(), rel=0.05)
            assert abs(np.corrcoef(noise.ravel(), weights.ravel())[0, 1]) < 0.1
        else:
            assert not noise.any()
    changed = {"general.name": f"{metadata(source)['general.name']} with noise of 0.25"}
    assert metadata(noisy) == metadata(source) | changed


def test_noise_has_the_same_bits_everywhere() -> None:
    values = (np.arange(96 * 64, dtype=np.float32).reshape(96, 64) - 3000) / 1024
    noise = _noise("blk.0.attn_q.weight", values, 0.08)
    digest = hashlib.sha256(noise.astype("<f4").tobytes()).hexdigest()
    assert digest == "958446d968bdfacdf3c648968a79139466345d9d89a03d22d4e5cf09a48aa008"
    assert not np.array_equal(noise, _noise("blk.1.attn_q.weight", values, 0.08))
