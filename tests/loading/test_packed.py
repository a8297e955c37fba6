"""Packed weights in the cache: the same bits as from the file, never another model's, never torn, and shared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from support.commands import here, run_python
from support.families import CASES
from support.kernels import EVERY_KERNEL
from support.random_models import RandomModel, quantize, split, write
from support.steps import evaluate

from pystaged import ModelError, _core
from pystaged.loading import cache
from pystaged.loading.kept import PACKED, load_packed

Floats = npt.NDArray[np.float32]

LLAMA = RandomModel("llama")
# One of 256 columns, which types of large blocks need.
WIDE = RandomModel("llama", width=256, layers=1, head_dim=64, ffn_width=256)
# Each packing: by gguf's quantizer, or by a mixture of llama.cpp's.
OWN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
MIXTURES = ("Q4_K_S", "Q5_K_S", "Q6_K", "IQ4_NL", "IQ4_XS", "Q3_K_S", "Q2_K")

LOADER = """
import sys
from pathlib import Path
from pystaged import _core
from pystaged.loading.kept import load_packed
model = load_packed(Path(sys.argv[1]), "", 2, print)
session = _core.Session(model)
_core.run([_core.Work.propose(session, [1, 2, 3], [-1, 0, 1], 3, 0, _core.Sampling())])
sys.stdout.buffer.write(session.logits(2).tobytes())
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path / "llama.gguf", LLAMA)


def logits(model: _core.Model) -> Floats:
    session = _core.Session(model)
    tokens = np.random.default_rng(1).integers(0, 256, 12).tolist()
    evaluate(session, tokens, range(-1, len(tokens) - 1))
    return np.stack([session.logits(row) for row in range(len(tokens))])


def told(path: Path) -> tuple[_core.Model, list[str]]:
    """The model with its weights in the cache, and what is said of those."""
    said: list[str] = []
    return load_packed(path, "", 2, said.append), said


def loaded(path: Path) -> _core.Model:
    """The model with its weights in the cache, of which there is nothing to say."""
    model, said = told(path)
    assert said == []
    return model


def assert_same(path: Path) -> None:
    """Packed now, and packed before, a model is the one of its file."""
    expected = logits(_core.Model(str(path)))
    for _ in range(2):
        model = loaded(path)
        assert model.is_mapped
        assert logits(model).tobytes() == expected.tobytes()


# ---- The same bits ----


@pytest.mark.parametrize("kind", [*OWN, *MIXTURES])
def test_every_type(tmp_path: Path, kind: str) -> None:
    if kind in OWN:
        path = write(tmp_path / "model.gguf", RandomModel("llama", quantization=kind))
    else:
        path = quantize(write(tmp_path / "floats.gguf", WIDE), tmp_path / "model.gguf", f"MOSTLY_{kind}")
    assert next(iter(_core.Model(str(path)).weight_types)).upper() == kind.removesuffix("_S")
    assert_same(path)


@pytest.mark.parametrize(
    "model",
    [
        RandomModel("llama", tie=False),
        RandomModel("llama", types={"attn_k": "Q8_0", "ffn_up": "F16"}),
        RandomModel("gpt2", kv_heads=4, biases=True, fused=True),
        RandomModel("qwen2", biases=True),
        RandomModel("phi3", fused=True),
        RandomModel("qwen2moe", tie=False, biases=True, experts=(8, 2, 32, 64), types={"up_exps": "Q8_0"}),
        RandomModel("llama", width=40, heads=5, kv_heads=5, ffn_width=72),
        CASES["deepseek2"],
    ],
    ids=["head of its own", "mixed types", "fused", "biases", "fused gate", "experts", "padding", "latents"],
)
def test_other_models(tmp_path: Path, model: RandomModel) -> None:
    assert_same(write(tmp_path / "model.gguf", model))


def test_a_model_in_several_files(tmp_path: Path, llama: Path) -> None:
    parts = split(llama, tmp_path, 3)
    assert_same(parts[0])
    # A file behind the first counts as well.
    info = parts[1].stat()
    os.utime(parts[1], ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    model, said = told(parts[0])
    assert model.is_mapped
    assert "another file or version" in said[0]


@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_every_kernel_reads_what_another_wrote(llama: Path, kernel: str) -> None:
    expected = logits(loaded(llama))
    model = load_packed(llama, kernel, 3, pytest.fail)
    assert (model.is_mapped, model.kernel) == (True, kernel)
    assert logits(model).tobytes() == expected.tobytes()


# ---- What is not trusted ----


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def swap(path: Path, first: bytes, second: bytes) -> None:
    data = path.read_bytes()
    assert first in data
    path.write_bytes(data.replace(first, second, 1))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "damaged"),
        (lambda path: os.truncate(path, 100), "no packed weights"),
        (lambda path: path.write_bytes(path.read_bytes() + bytes(64)), "damaged"),
        (lambda path: flip(path, -1), "damaged"),
        (lambda path: flip(path, 16 << 10), "damaged"),
        (lambda path: flip(path, 0), "another file or version"),
        (lambda path: swap(path, b"layout 1\n", b"layout 0\n"), "another file or version"),
        (lambda path: path.chmod(0), "cannot open"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no packed weights"),
    ],
)
def test_damage(llama: Path, spoil: Callable[[Path], object], reason: str) -> None:
    expected = logits(loaded(llama))
    spoil(PACKED.path(llama))
    if reason == "cannot open" and os.access(PACKED.path(llama), os.R_OK):
        pytest.skip("nothing is forbidden to this user")
    model, said = told(llama)
    assert model.is_mapped
    assert logits(model).tobytes() == expected.tobytes()
    assert len(said) == 1
    assert reason in said[0]
    assert loaded(llama).is_mapped


def test_a_folder_in_its_place(llama: Path) -> None:
    PACKED.path(llama).mkdir(parents=True)
    model, said = told(llama)
    assert not model.is_mapped
    assert len(said) == 2
    assert logits(model).tobytes() == logits(_core.Model(str(llama))).tobytes()


def test_another_models_weights(tmp_path: Path, llama: Path) -> None:
    """Of the same name, size, metadata and time of change, and even under the same path."""
    loaded(llama)
    times = llama.stat()
    other = write(tmp_path / "other.gguf", RandomModel("llama", seed=1))
    other.replace(llama)
    os.utime(llama, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert llama.stat().st_size == times.st_size
    model, said = told(llama)
    assert "another file or version" in said[0]
    assert logits(model).tobytes() == logits(_core.Model(str(llama))).tobytes()


# ---- Writers ----


def test_processes_at_once(llama: Path) -> None:
    session = _core.Session(_core.Model(str(llama)))
    evaluate(session, [1, 2, 3], [-1, 0, 1])
    expected = session.logits(2).tobytes()
    processes = [
        subprocess.Popen([sys.executable, "-c", LOADER, llama], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in processes:
        assert process.communicate(timeout=600) == (expected, b"")
    assert list(PACKED.folder().iterdir()) == [PACKED.path(llama)]
    assert loaded(llama).is_mapped


def test_a_full_disk(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        model, said = told(llama)
    assert said[0].startswith("packed weights are not kept: no room in ")
    assert not model.is_mapped
    assert logits(model).tobytes() == logits(_core.Model(str(llama))).tobytes()


def test_saving_what_cannot_be_used(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="loaded to be packed"):
        _core.Model(str(llama)).save_packed(tmp_path / "file")
    with pytest.raises(ModelError, match="file: cannot open: No such file"):
        _core.Model(str(llama), packed=tmp_path / "file").save_packed(tmp_path / "file")


# ---- Memory ----


def test_the_file_itself_is_mapped(llama: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists what is mapped")
    model = loaded(llama)
    assert [line.split()[1] for line in maps.read_text().splitlines() if str(PACKED.path(llama)) in line] == ["r--s"]
    # Who removes it takes it from nobody.
    expected = logits(model)
    assert PACKED.remove(PACKED.path(llama)) > 0
    assert logits(model).tobytes() == expected.tobytes()


PEAK = """
import resource, sys
from pathlib import Path
from pystaged import _core
peak = lambda: int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
before = peak()
model = _core.Model(sys.argv[1], num_threads=2)
print(peak() - before, model.matrix_bytes, model.buffer_bytes)
"""


def test_loading_takes_no_more_than_it_says(tmp_path: Path) -> None:
    """Two thirds of the weights are matrices that are packed as one."""
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux says what a process took at most")
    path = write(tmp_path / "model.gguf", RandomModel("llama", layers=1, ffn_width=1 << 16))
    done = run_python(PEAK, path)
    took, matrices, buffers = map(int, done.stdout.split())
    assert matrices > 50_000_000
    assert buffers < 10_000_000
    assert took < matrices + buffers + 8_000_000


def test_what_info_says(llama: Path) -> None:
    model = _core.Model(str(llama))
    said = here("info", llama).stdout.decode()
    assert f"{model.matrix_bytes / 1e6:.1f} MB of weights, {model.buffer_bytes / 1e6:.1f} MB more while loading" in said


# ---- Listing and removal ----


def test_only_our_files_are_listed_and_removed(tmp_path: Path, llama: Path) -> None:
    loaded(llama)
    kept = [PACKED.folder() / name for name in ("notes.packed", f"a.{'0' * 16}.txt", f"link.{'0' * 16}.packed")]
    for path in kept[:2]:
        path.write_text("somebody's")
    kept[2].symlink_to(llama)
    spoilt = PACKED.folder() / f"\N{ESCAPE}[31m.{'0' * 16}.packed"
    spoilt.write_bytes(b"damaged")
    assert PACKED.all() == [spoilt, PACKED.path(llama)]
    assert b"?[31m " in here("models").stdout
    assert here("models", "remove", "--packed").returncode == 0
    assert sorted(PACKED.folder().iterdir()) == sorted(kept)
    assert PACKED.remove(kept[0]) == PACKED.remove(PACKED.folder() / "none") == 0
    assert llama.exists()
    assert tmp_path.exists()


def test_removing_a_model_removes_its_packed_weights() -> None:
    path = cache.folder() / "someone" / "tiny" / "tiny.F32.gguf"
    path.parent.mkdir(parents=True)
    write(path, LLAMA)
    loaded(path)
    sizes = path.stat().st_size + PACKED.path(path).stat().st_size
    assert cache.remove("tiny") == sizes
    assert PACKED.all() == []
