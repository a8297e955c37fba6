"""pytorch_model.bin: read as torch wrote it, and nothing in it is run."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.convert import convert, write_pickled
from support.draft_checkpoints import FORMS, write_form

from pystaged.loading import pickled
from pystaged.loading.convert import Stored
from pystaged.loading.pickled import tensors_of


def test_tensors_are_those_that_torch_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(1)
    rows = torch.randn(6, 4)
    kinds = ("float32", "float64", "float16", "bfloat16")
    saved = {kind: torch.randn(3, 5).to(getattr(torch, kind)) for kind in kinds}
    saved |= {"rows": rows, "some": rows[2:4], "one": rows[:, :1].T[:, :1], "scalar": torch.tensor(2.5)}
    saved |= {"parameter": torch.nn.Parameter(torch.randn(7)), "empty": torch.empty(0, 3)}
    others = {"ids": torch.arange(5), "kept": torch.ones(3, dtype=torch.bool)}
    module = torch.nn.Linear(3, 2)  # its dictionary has attributes
    for tensors in (saved | others, module.state_dict()):
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        found = tensors_of(tmp_path / "pytorch_model.bin")
        assert {name: place.shape for name, place in found.items()} == {
            name: tuple(tensor.shape) for name, tensor in tensors.items()
        }
        for name in tensors.keys() - others.keys() - {"scalar"}:
            values = Stored(tmp_path / "pytorch_model.bin", *found[name]).read(0, len(tensors[name]))
            assert np.array_equal(values, tensors[name].detach().float().numpy()), name
    torch.save({"t": rows.T}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="not stored row after row"):
        tensors_of(tmp_path / "pytorch_model.bin")
    torch.save(saved, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="not a zip file"):
        tensors_of(tmp_path / "pytorch_model.bin")


def test_a_pickled_draft_becomes_the_same_file(tmp_path: Path) -> None:
    folder = write_form(tmp_path / "draft", FORMS["EAGLE"]())
    convert(folder, tmp_path / "safe.gguf")
    write_pickled(folder / "pytorch_model.bin", load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    convert(folder, tmp_path / "pickled.gguf")
    assert (tmp_path / "pickled.gguf").read_bytes() == (tmp_path / "safe.gguf").read_bytes()


def changed(*changes: tuple[bytes, bytes]) -> Callable[[Path], None]:
    """A change of the pickle; the first occurrence of each."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        for old, new in changes:
            assert old in entries["archive/data.pkl"]
            entries["archive/data.pkl"] = entries["archive/data.pkl"].replace(old, new, 1)
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in entries.items():
                archive.writestr(name, data)

    return change


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def no_tensors(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}X\x01\x00\x00\x00aK\x01s.")


def many_entries(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(300):
            archive.writestr(f"archive/{i}", b"")


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
DEEP = b")" + b"\x85" * 200_000
TWO = b"J\x02\x00\x00\x00"
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a command": (changed((REBUILD, b"cposix\nsystem\n")), "names 'posix system'"),
    "another function of torch": (changed((REBUILD, b"ctorch.hub\nload\n")), "names 'torch.hub load'"),
    "an object": (changed((REBUILD, b")\x81" + REBUILD)), "instruction NEWOBJ"),
    "an extension": (changed((REBUILD, b"\x82\x01")), "instruction EXT1"),
    "bytes of any size": (changed((REBUILD, b"\x96" + b"\xff" * 7 + b"\x7f")), "cannot be read"),
    "a deep key": (changed((b"X\x01\x00\x00\x00w", DEEP)), "not that of a dictionary"),
    "a deep storage": (changed((b"X\x03\x00\x00\x00cpu", DEEP), (b"X\x01\x00\x00\x000", DEEP)), "not that of a dict"),
    "a call of a tuple": (changed((REBUILD, DEEP)), "not that of a dictionary"),
    "sizes beyond the storage": (changed((b"(" + TWO, b"(J\xff\xff\xff\x7f")), "ends beyond its storage"),
    "a negative size": (changed((b"(" + TWO, b"(J\xfe\xff\xff\xff")), "impossible sizes"),
    "many sizes": (changed((b"(" + TWO, b"(" + TWO * 9)), "impossible sizes"),
    "other strides": (changed((b"t(", b"t(" + TWO), (TWO, b"")), "cannot be read"),
    "a longer storage": (changed((b"J\x06\x00\x00\x00", b"J\x07\x00\x00\x00")), "too short"),
    "no end": (changed((b"u.", b"u")), "cannot be read"),
    "no tensors": (no_tensors, "cannot be read"),
    "compressed": (compressed, "is compressed"),
    "many entries": (many_entries, "too large"),
    "half a file": (lambda path: path.write_bytes(path.read_bytes()[:400]) and None, "not a zip file"),
    "nothing": (lambda path: path.write_bytes(b"") and None, "not a zip file"),
}


@pytest.mark.parametrize(("change", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any], words: str
) -> None:
    monkeypatch.setattr(pickled, "_MOST_BYTES", 1 << 14 if change is many_entries else 1 << 20)
    path = tmp_path / "pytorch_model.bin"
    write_pickled(path, {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    assert tensors_of(path)["w"].shape == (2, 3)
    change(path)
    with pytest.raises(ValueError, match=words) as error:
        tensors_of(path)
    assert str(error.value).startswith(f"{path} cannot be read")
