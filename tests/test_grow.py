"""Growing keeps the function: a grown model's logits are its source's, by an independent numpy forward pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from grow import grow, layer_plan
from random_weights import END_OF_TEXT, FILE_TYPES, byte_alphabet, synthetic_vocabulary, write_random_gpt2
from reference import Gpt2Reference

MODELS = Path(__file__).parent.parent / "models"
TOKENS = [5, 17, 256, 0, 299, 42, 42, 7, 130, 298, 61, 3]


def random_gpt2(out: Path, quantization: str = "F32", *, tie: bool = True, seed: int = 0, width: int = 64) -> Path:
    """A tiny random model: 2 heads, 2 layers, 300 tokens."""
    write_random_gpt2(
        out, width=width, layers=2, heads=2, vocab_size=300, context=32, quantization=quantization, tie=tie, seed=seed
    )
    return out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny random model in F32."""
    return random_gpt2(tmp_path / "source.gguf")


def metadata(path: Path) -> dict[str, Any]:
    """All metadata of a GGUF file."""
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "separate-head"])
@pytest.mark.parametrize(
    ("width", "layers"), [(256, 5), (192, 2), (64, 7), (64, 2)], ids=["both", "wider-by-3", "deeper", "same"]
)
def test_grown_logits_are_the_sources(tmp_path: Path, tie: bool, width: int, layers: int) -> None:
    source = random_gpt2(tmp_path / "source.gguf", tie=tie)
    grow(source, tmp_path / "grown.gguf", width=width, layers=layers, quantization="F32")
    expected = Gpt2Reference(source).logits(TOKENS)
    assert expected.std() > 0.1
    np.testing.assert_allclose(Gpt2Reference(tmp_path / "grown.gguf").logits(TOKENS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_source_of_any_type(tmp_path: Path, quantization: str) -> None:
    source = random_gpt2(tmp_path / "source.gguf", quantization)
    grow(source, tmp_path / "grown.gguf", width=128, layers=3, quantization="F32")
    expected = Gpt2Reference(source).logits(TOKENS)
    np.testing.assert_allclose(Gpt2Reference(tmp_path / "grown.gguf").logits(TOKENS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("quantization", "tolerance"), [("F16", 2e-3), ("Q8_0", 2e-2), ("Q4_0", 0.3)])
def test_result_of_any_type(source: Path, tmp_path: Path, quantization: str, tolerance: float) -> None:
    grow(source, tmp_path / "grown.gguf", width=256, layers=5, quantization=quantization)
    expected = Gpt2Reference(source).logits(TOKENS)
    np.testing.assert_allclose(Gpt2Reference(tmp_path / "grown.gguf").logits(TOKENS), expected, rtol=0, atol=tolerance)
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "grown.gguf").tensors}
    assert types["blk.4.attn_qkv.weight"] == types["token_embd.weight"] == quantization
    assert types["position_embd.weight"] == types["blk.0.ffn_up.bias"] == "F32"


@pytest.mark.parametrize("width", [32, 80], ids=["whole-blocks", "blocks-across-copies"])
def test_packing_before_or_after_repeating_is_the_same(tmp_path: Path, width: int) -> None:
    source = random_gpt2(tmp_path / "source.gguf", width=width)
    grow(source, tmp_path / "grown.gguf", width=2 * width, layers=2, quantization="Q8_0")
    old = {t.name: t.data for t in GGUFReader(source).tensors}["blk.1.attn_output.weight"]
    new = {t.name: t.data for t in GGUFReader(tmp_path / "grown.gguf").tensors}["blk.1.attn_output.weight"]
    expected = quants.quantize(np.tile(old / 2, (2, 2)), GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(new, expected)


@pytest.mark.parametrize(("quantization", "block"), [("Q8_0", 34), ("Q4_0", 18)])
def test_quantized_integers_survive(tmp_path: Path, quantization: str, block: int) -> None:
    source, grown = random_gpt2(tmp_path / "float.gguf"), tmp_path / "grown.gguf"
    quantized = tmp_path / "quantized.gguf"
    grow(source, quantized, width=64, layers=2, quantization=quantization)
    grow(quantized, grown, width=256, layers=2, quantization=quantization)
    old = {t.name: t.data.reshape(64, -1, block) for t in GGUFReader(quantized).tensors if "attn_output.w" in t.name}
    new = {t.name: t.data.reshape(256, -1, block) for t in GGUFReader(grown).tensors if "attn_output.w" in t.name}
    for name in old:
        np.testing.assert_array_equal(new[name][..., 2:], np.tile(old[name][..., 2:], (4, 4, 1)))


def test_added_layers_are_silent_but_not_empty(source: Path, tmp_path: Path) -> None:
    grow(source, tmp_path / "grown.gguf", width=64, layers=5, quantization="F32")
    weights = Gpt2Reference(tmp_path / "grown.gguf").weights
    for layer, (_, added) in enumerate(layer_plan(2, 5)):
        for name in ("attn_output.weight", "attn_output.bias", "ffn_down.weight", "ffn_down.bias"):
            assert weights[f"blk.{layer}.{name}"].any() != added
        for name in ("attn_norm.weight", "attn_qkv.weight", "attn_qkv.bias", "ffn_up.weight", "ffn_up.bias"):
            assert weights[f"blk.{layer}.{name}"].all()


def test_added_layers_are_spread_evenly() -> None:
    assert layer_plan(2, 5) == [(0, False), (0, True), (0, True), (1, False), (1, True)]
    assert [layer for layer, (_, added) in enumerate(layer_plan(8, 36)) if not added] == [0, 5, 9, 14, 18, 23, 27, 32]
    assert layer_plan(3, 3) == [(0, False), (1, False), (2, False)]


def test_metadata(source: Path, tmp_path: Path) -> None:
    grow(source, tmp_path / "grown.gguf", width=256, layers=5, quantization="Q8_0")
    old, new = metadata(source), metadata(tmp_path / "grown.gguf")
    changed = {
        "general.name": "grown from random GPT-2 (64 wide, 2 layers, seed 0) (256 wide, 5 layers)",
        "general.file_type": 7,
        "gpt2.embedding_length": 256,
        "gpt2.feed_forward_length": 1024,
        "gpt2.block_count": 5,
        "gpt2.attention.head_count": 8,
        "GGUF.tensor_count": 4 + 5 * 12,
    }
    assert new == old | changed
    kinds = {name: field.types for name, field in GGUFReader(source).fields.items()}
    assert kinds == {name: field.types for name, field in GGUFReader(tmp_path / "grown.gguf").fields.items()}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"width": 96}, "width 96 is not a multiple of the source's width 64"),
        ({"width": 0}, "width 0 is not a multiple"),
        ({"layers": 1}, "1 layers are fewer than the source's 2"),
        ({"quantization": "Q3_K"}, "unknown type 'Q3_K': choose from F32, F16, Q8_0, Q4_0"),
    ],
    ids=["width", "no-width", "layers", "type"],
)
def test_refusals(source: Path, tmp_path: Path, shape: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"width": 256, "layers": 5, "quantization": "F32"}
    with pytest.raises(ValueError, match=message):
        grow(source, tmp_path / "grown.gguf", **(usual | shape))
    assert list(tmp_path.iterdir()) == [source]


def test_refuses_rows_of_broken_blocks(tmp_path: Path) -> None:
    source = random_gpt2(tmp_path / "source.gguf", width=8)
    with pytest.raises(ValueError, match=r"Q8_0 needs rows of a multiple of 32: token_embd.weight has 16"):
        grow(source, tmp_path / "grown.gguf", width=16, layers=2, quantization="Q8_0")


def test_refuses_other_architectures(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="cannot grow the architecture 'llama': only 'gpt2'"):
        grow(tmp_path / "llama.gguf", tmp_path / "grown.gguf", width=256, layers=5, quantization="F32")


def test_a_failed_run_leaves_the_old_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "grown.gguf"
    out.write_text("old")
    monkeypatch.setattr(GGUFWriter, "write_tensor_data", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        grow(source, out, width=128, layers=2, quantization="F32")
    assert out.read_text() == "old"
    assert set(tmp_path.iterdir()) == {source, out}


def test_command_line(tmp_path: Path) -> None:
    shape = ["--width", "64", "--layers", "2", "--heads", "2", "--vocab-size", "300", "--context", "32"]
    command = [sys.executable, MODELS / "random_weights.py", "gpt2", str(tmp_path / "made.gguf"), *shape, "--untied"]
    subprocess.run([*command, "--type", "F16"], check=True)
    random_gpt2(tmp_path / "expected.gguf", "F16", tie=False)
    assert (tmp_path / "made.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()


@pytest.mark.parametrize("quantization", FILE_TYPES)
def test_random_weights(tmp_path: Path, quantization: str) -> None:
    width = 256 if quantization.endswith("K") else 64
    model = Gpt2Reference(random_gpt2(tmp_path / "model.gguf", quantization, tie=False, width=width))
    assert model.weights["blk.1.ffn_up.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert model.weights["output.weight"].mean() == pytest.approx(0, abs=1e-3)
    assert model.weights["blk.1.ffn_norm.weight"].mean() == pytest.approx(1, abs=0.1)
    assert np.isfinite(model.logits(TOKENS)).all()


@pytest.mark.parametrize("quantization", ["F16", "BF16"])
def test_floats_of_one_seed_agree(tmp_path: Path, quantization: str) -> None:
    full = Gpt2Reference(random_gpt2(tmp_path / "full.gguf", "F32")).logits(TOKENS)
    half = Gpt2Reference(random_gpt2(tmp_path / "half.gguf", quantization)).logits(TOKENS)
    np.testing.assert_allclose(half, full, rtol=0, atol=2e-2)


def test_the_seed_decides(tmp_path: Path) -> None:
    files = [random_gpt2(tmp_path / f"{i}.gguf", "Q8_0", seed=seed).read_bytes() for i, seed in enumerate((1, 1, 2))]
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_synthetic_vocabulary() -> None:
    tokens, merges = synthetic_vocabulary(2000)
    assert len(tokens) == len(set(tokens)) == 2000
    assert tokens[:256] == byte_alphabet()
    assert tokens[-1] == END_OF_TEXT
    assert [merge.replace(" ", "") for merge in merges] == tokens[256:-1]
    for index, merge in enumerate(merges):
        assert all(half in tokens[: 256 + index] for half in merge.split(" "))
    assert synthetic_vocabulary(300)[1] == merges[:43]


def test_vocabulary_is_copied(source: Path, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"width": 32, "layers": 1, "heads": 1, "context": 8, "quantization": "Q4_0"}
    write_random_gpt2(tmp_path / "copy.gguf", vocab_size=300, vocabulary=source, **shape)
    tokenizer = {name: value for name, value in metadata(source).items() if name.startswith("tokenizer.")}
    assert len(tokenizer) == 7
    assert metadata(tmp_path / "copy.gguf").items() >= tokenizer.items()
    with pytest.raises(ValueError, match=r"vocab_size is 301, but .* has 300 tokens"):
        write_random_gpt2(tmp_path / "other.gguf", vocab_size=301, vocabulary=source, **shape)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"heads": 3}, "width 64 is not a multiple of 3 heads"),
        ({"width": 48, "quantization": "Q8_0"}, "Q8_0 needs a width that is a multiple of 32, not 48"),
        ({"vocab_size": 256}, "vocab_size 256: 256 bytes and .* need at least 257"),
        ({"layers": 0}, "must be positive"),
        ({"quantization": "Q2_K"}, "unknown type 'Q2_K'"),
    ],
    ids=["heads", "blocks", "vocabulary", "layers", "type"],
)
def test_impossible_random_models(tmp_path: Path, shape: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {
        "width": 64,
        "layers": 2,
        "heads": 2,
        "vocab_size": 300,
        "context": 32,
        "quantization": "F32",
    }
    with pytest.raises(ValueError, match=message):
        write_random_gpt2(tmp_path / "model.gguf", **(usual | shape))
    assert list(tmp_path.iterdir()) == []
