"""Every type is written by libllama's quantizer, and read by the engine and by llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import config, weights, write_checkpoint, write_weights
from gguf import GGUFReader
from reference import Gpt2Reference
from test_cli import assert_refused, run
from test_reference import engine_logits, llama_logits

from pystaged.loading.convert import convert
from pystaged.loading.quantize import FILE_TYPES, quantize, quantize_checkpoint

TOKENS = np.random.default_rng(0).integers(0, 256, 40).tolist()
MATRIX_TYPES = {"q4_k_m": "Q4_K", "q4_k_s": "Q4_K", "q5_k_m": "Q5_K", "q5_k_s": "Q5_K"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide as the blocks of K-quants are long."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), n_embd=256, n_head=4)


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> Path:
    convert(checkpoint, checkpoint / "model.F32.gguf")
    return checkpoint / "model.F32.gguf"


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_every_type(source: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "model.gguf"
    steps: list[tuple[str, int, int]] = []
    quantize(source, out, kind, progress=lambda *step: steps.append(step))
    reader = GGUFReader(out)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.ffn_up.weight"] == MATRIX_TYPES.get(kind, kind.upper())
    assert types["position_embd.weight"] == types["blk.0.ffn_up.bias"] == "F32"
    assert reader.fields["general.file_type"].contents() == FILE_TYPES[kind]
    assert [done for _, done, _ in steps] == list(range(1, len(reader.tensors) + 1))
    assert list(tmp_path.iterdir()) == [out]

    exact, model = Gpt2Reference(source), Gpt2Reference(out)
    bits = 8 if kind.endswith(("f32", "f16")) else int(kind[1])
    for name, weight in exact.weights.items():
        # A block of 32 normal numbers reaches 2 to 3 deviations, and rounding misses by a quarter of a step.
        assert np.abs(model.weights[name] - weight).mean() <= 2 * weight.std() / 2**bits
    expected = model.logits(TOKENS)
    (llama,) = llama_logits(out, [TOKENS])
    # Both engines round activations too.
    for found in (llama, engine_logits(out, TOKENS)):
        assert np.abs(found - expected).mean() <= 0.03 * expected.std()


def test_a_checkpoint_at_once(checkpoint: Path, source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(checkpoint, tmp_path / "at-once.gguf", "Q4_K_M")
    quantize(source, tmp_path / "in-two-steps.gguf", "q4_k_m")
    tensors = [
        [(tensor.name, tensor.data.tobytes()) for tensor in GGUFReader(tmp_path / name).tensors]
        for name in ("at-once.gguf", "in-two-steps.gguf")
    ]
    assert tensors[0] == tensors[1]
    assert len(list(tmp_path.iterdir())) == 2


def test_rows_that_no_block_divides(tmp_path: Path) -> None:
    """libllama falls back to another type, and the file is good all the same."""
    shape = config(n_embd=40, n_head=2)
    folder = write_checkpoint(tmp_path / "odd", n_embd=40)
    write_weights(folder, weights(shape))
    quantize_checkpoint(folder, tmp_path / "odd.gguf", "q4_k_m")
    expected = Gpt2Reference(tmp_path / "odd.gguf").logits(TOKENS)
    assert np.abs(engine_logits(tmp_path / "odd.gguf", TOKENS) - expected).max() <= 0.05


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be quantized to q8_0: .*"),
        (b"GGUF" + b"\xff" * 100, "cannot be quantized"),
        (b"PK" * 50, "magic|load"),
    ],
    ids=["empty", "damaged", "other"],
)
def test_files_that_are_no_models(tmp_path: Path, data: bytes, message: str) -> None:
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    source.write_bytes(data)
    out.write_text("old")
    with pytest.raises(ValueError, match=message):
        quantize(source, out, "q8_0")
    assert out.read_text() == "old"
    assert set(tmp_path.iterdir()) == {source, out}


def test_a_truncated_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "source.gguf").write_bytes(source.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="cannot be quantized to q4_0"):
        quantize(tmp_path / "source.gguf", tmp_path / "out.gguf", "q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


def test_missing_files(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        quantize(tmp_path / "none.gguf", tmp_path / "out.gguf", "q8_0")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        quantize(source, tmp_path / "nowhere" / "out.gguf", "q8_0")


def test_unknown_type(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown type 'q3_x': choose from f32, f16, bf16, q8_0"):
        quantize(source, tmp_path / "out.gguf", "q3_x")


def test_command(checkpoint: Path, source: Path, tmp_path: Path) -> None:
    for given in (source, checkpoint):
        done = run("quantize", given, tmp_path / "out.gguf", "--type", "q4_0")
        assert (done.returncode, done.stdout) == (0, b""), done.stderr
        assert b"quantizing" in done.stderr
        assert b"MB" in done.stderr
        assert GGUFReader(tmp_path / "out.gguf").fields["general.file_type"].contents() == FILE_TYPES["q4_0"]
    assert_refused(run("quantize", tmp_path / "none.gguf", tmp_path / "out.gguf"), "none.gguf")
    assert_refused(run("quantize", source, tmp_path / "out.gguf", "--type", "q1"), "unknown type 'q1'")
