"""Every type is written by libllama's quantizer, and read by the engine and by llama.cpp."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, LlamaFileType
from support.checkpoints import write_checkpoint
from support.commands import assert_refused, here
from support.convert import convert
from support.family_reference import FamilyReference
from support.logits import engine_logits, llama_logits

from pystaged.loading.metadata import FILE_TYPES
from pystaged.loading.quantize import quantize, quantize_checkpoint
from pystaged.platform import process

TOKENS = np.random.default_rng(0).integers(0, 256, 40).tolist()
MATRIX_TYPES = {f"q{bits}_k_{size}": f"Q{bits}_K" for bits in (3, 4, 5) for size in "lms"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide as the blocks of K-quants are long."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), n_embd=256, n_head=4)


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> Path:
    convert(checkpoint, checkpoint / "model.F32.gguf")
    return checkpoint / "model.F32.gguf"


@pytest.mark.slow
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

    exact, model = FamilyReference(source, half=False), FamilyReference(out, half=False)
    bits = 8 if kind.endswith(("f32", "f16")) else int(kind.lstrip("iq")[0])
    for name, weight in exact.weights.items():
        # A block of 32 normal numbers reaches 2 to 3 deviations, and rounding misses by a quarter of a step.
        assert np.abs(model.weights[name] - weight).mean() <= 2 * weight.std() / 2**bits
    expected = model.logits(TOKENS)
    (llama,) = llama_logits(out, [TOKENS])
    # Both engines round activations too.
    for found in (llama, engine_logits(out, TOKENS)):
        assert np.abs(found - expected).mean() <= 0.03 * expected.std()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "source.gguf: the file is empty"),
        (b"GGUF" + b"\xff" * 100, "source.gguf: truncated or damaged, get it again"),
        (b"PK" * 50, "source.gguf: no GGUF file: it does not begin with the letters GGUF"),
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
    with pytest.raises(ValueError, match=r"source\.gguf: tensor .* lies beyond the end of the file"):
        quantize(tmp_path / "source.gguf", tmp_path / "out.gguf", "q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


@pytest.mark.parametrize(
    ("free", "words"),
    [
        ([1_000_000], r"no room in .*: 0\.00 GB are needed, 0\.00 GB are free"),
        ([1 << 40, 0], r"No space left on device; \d\.\d MB are needed: '.*out\.gguf'"),
    ],
    ids=["at the start", "in the middle"],
)
def test_a_full_disk(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: list[int], words: str
) -> None:
    left = iter(free)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=next(left)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=words):
            quantize(source, tmp_path / "out.gguf", "q4_0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_ends_too_early(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = process.start

    @contextlib.contextmanager
    def cut(*words: Any, **options: Any) -> Iterator[Any]:
        with start(*words, **options) as child:
            yield child
        os.truncate(words[2], words[2].stat().st_size - 1000)

    monkeypatch.setattr(process, "start", cut)
    with pytest.raises(ValueError, match="cannot be quantized to q4_0: the written file is incomplete"):
        quantize(source, tmp_path / "out.gguf", "q4_0")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "source.gguf")
    with pytest.raises(ValueError, match=r"source\.gguf is no regular file"):
        quantize(tmp_path / "source.gguf", tmp_path / "out.gguf", "q8_0")


def test_missing_files(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        quantize(tmp_path / "none.gguf", tmp_path / "out.gguf", "q8_0")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        quantize(source, tmp_path / "nowhere" / "out.gguf", "q8_0")


@pytest.mark.slow
def test_command(checkpoint: Path, source: Path, tmp_path: Path) -> None:
    for given, how in ((source, ["--type", "q4_0"]), (checkpoint, ["Q4_0"])):
        done = here("quantize", given, tmp_path / "out.gguf", *how, "--force")
        assert (done.returncode, done.stdout) == (0, b""), done.stderr
        assert b"quantizing" in done.stderr
        assert b"MB" in done.stderr
        assert GGUFReader(tmp_path / "out.gguf").fields["general.file_type"].contents() == FILE_TYPES["q4_0"]
    assert_refused(here("quantize", tmp_path / "none.gguf", tmp_path / "new.gguf"), "none.gguf")


def test_a_file_is_replaced_with_force_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("old")
    assert_refused(here("quantize", source, out), "out.gguf is there already; --force replaces it")
    assert out.read_text() == "old"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_quantized_source(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    """Is refused by what the file says of itself, and by what its tensors are."""
    quantized, out = tmp_path / "quantized.gguf", tmp_path / "out.gguf"
    quantize(source, quantized, "q4_1")
    if not is_told:
        monkeypatch.setattr("pystaged.loading.quantize.read_metadata", lambda _: {})
    with pytest.raises(ValueError, match=r"quantized already \(q4_1\).*--allow-requantize"):
        quantize(quantized, out, "q4_0")
    assert list(tmp_path.iterdir()) == [quantized]
    quantize(quantized, out, "q4_0", allow_requantize=True)
    assert GGUFReader(out).fields["general.file_type"].contents() == FILE_TYPES["q4_0"]


@pytest.mark.slow
def test_the_default_type_never_makes_a_larger_file(source: Path, tmp_path: Path) -> None:
    quantized, out = tmp_path / "quantized.gguf", tmp_path / "out.gguf"
    quantize(source, quantized, "q4_1")
    assert_refused(here("quantize", quantized, out), "quantized already", "--allow-requantize")
    done = here("quantize", quantized, out, "--allow-requantize")
    assert (done.returncode, b"needs a --type" in done.stderr, out.exists()) == (2, True, False)
    done = here("quantize", quantized, out, "--allow-requantize", "--type", "q4_0")
    assert (done.returncode, b"less accurate than from the original" in done.stderr) == (0, True)
    assert here("quantize", source, out, "--force").returncode == 0
    assert GGUFReader(out).fields["general.file_type"].contents() == FILE_TYPES["q8_0"]
    assert out.stat().st_size < source.stat().st_size


def test_a_folder_or_a_device_is_not_replaced(source: Path) -> None:
    for out in ("/dev/null", "."):
        for write, given in ((quantize, source), (quantize_checkpoint, source.parent)):
            with pytest.raises(OSError, match=r"is not replaced; name a file|\. is a folder; name a file in it"):
                write(given, Path(out), "q4_0")


def test_types_are_numbered_as_gguf_has_them() -> None:
    names = {member.name.removeprefix("MOSTLY_").removeprefix("ALL_"): int(member) for member in LlamaFileType}
    assert {kind: names[kind.upper()] for kind in FILE_TYPES} == FILE_TYPES
