"""Models that Ollama has downloaded, by its names, by their digests, and by their paths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.commands import assert_refused, here
from support.families import CASES
from support.random_models import write

import pystaged
from pystaged.cli.options import models_like
from pystaged.loading import cache, names, ollama
from pystaged.loading.kept import PACKED

MODEL = "application/vnd.ollama.image.model"


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that keeps a file as Ollama does, under a manifest's path; gives the blob."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setattr(names, "pull", lambda name, **_: Path(f"pulled {name}"))

    def keep(file: Path, name: str, *more: str) -> Path:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        blob, manifest = tmp_path / "blobs" / f"sha256-{digest}", tmp_path / "manifests" / name
        for path in (blob, manifest):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        kinds = [("application/vnd.ollama.image.template", "sha256:" + "0" * 64), (MODEL, f"sha256:{digest}")]
        kinds += [(f"application/vnd.ollama.image.{kind}", "sha256:" + "1" * 64) for kind in more]
        layers = [{"mediaType": kind, "digest": each, "size": 1} for kind, each in kinds]
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        return blob

    return keep


def test_names(keep: Callable[..., Path], random_gguf: Callable[..., Path]) -> None:
    small, other, third = (random_gguf(kind) for kind in ("Q8_0", "Q4_0", "F16"))
    llama = keep(small, "registry.ollama.ai/library/llama3.2/latest", "license", "params")
    qwen = keep(other, "registry.ollama.ai/library/someone-s/1.5b-q4")
    hub = keep(third, "hf.co/someone/tiny-GGUF/Q4_K_XL")
    for name in ("llama3.2", "llama3.2:latest", llama, llama.name, llama.name.replace("-", ":")):
        assert names.resolve(name) == llama
    assert names.resolve("someone-s:1.5b-q4") == qwen
    assert names.resolve("hf.co/someone/tiny-GGUF:Q4_K_XL") == hub
    listed = {"hf.co/someone/tiny-GGUF:Q4_K_XL": hub, "llama3.2:latest": llama, "someone-s:1.5b-q4": qwen}
    assert ollama.files() == listed
    assert listed.items() <= names.here().items()
    # The hub's names are the hub's, and a size that is not there is downloaded.
    assert names.resolve("someone/tiny-GGUF:Q4_K_XL") == Path("pulled someone/tiny-GGUF:Q4_K_XL")
    assert "Llama-3.2-1B" in str(names.resolve("llama3.2:1b"))
    with pytest.raises(FileNotFoundError, match=r"did you mean someone-s:1\.5b-q4\?"):
        names.resolve("someone-s:1.5b")


def test_they_are_listed_and_stay(keep: Callable[..., Path], random_gguf: Callable[..., Path]) -> None:
    blob = keep(random_gguf("Q8_0"), "registry.ollama.ai/library/mine/latest")
    keep(random_gguf("Q4_0"), "registry.ollama.ai/library/gone/latest").unlink()
    listed = [line.split() for line in here("models").stdout.decode().splitlines() if "Ollama's" in line]
    assert [(name, size) for name, size, *_ in listed] == [("mine:latest", f"{blob.stat().st_size / 1e6:.1f}")]
    assert models_like("min") == ["mine:latest"]
    # The cache has a model of the name that Ollama has from the hub.
    hubs, ours = "hf.co/someone/tiny-GGUF", cache.folder("someone/tiny-GGUF") / "tiny.Q4_0.gguf"
    keep(random_gguf("F16"), f"{hubs}/Q4_0")
    ours.parent.mkdir(parents=True)
    ours.touch()
    for name in ("mine", "mine:latest", f"{hubs}:Q4_0"):
        assert_refused(here("rm", name), f"{name} is Ollama's; remove it with: ollama rm {name}")
    assert blob.exists()
    assert ours.exists()
    assert here("rm", "someone/tiny-GGUF:Q4_0").returncode == 0
    assert not ours.exists()
    for name in ("mine", "mine:latest"):
        packed = PACKED.path(blob)
        packed.parent.mkdir(exist_ok=True)
        packed.touch()
        assert here("rm", "--packed", name).returncode == 0
        assert not packed.exists()


def test_a_blob_is_a_model(keep: Callable[..., Path], random_gguf: Callable[..., Path]) -> None:
    keep(random_gguf("F32"), "registry.ollama.ai/library/mine/latest")
    with pystaged.load("mine", draft=None, report=lambda _: None) as engine:
        plain = engine.generate("the", max_tokens=12, speculate=False).tokens
        assert engine.generate("the", max_tokens=12).tokens == plain


def test_what_cannot_be_used(keep: Callable[..., Path], random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    keep(random_gguf("Q8_0"), "registry.ollama.ai/library/tuned/latest", "adapter")
    with pytest.raises(ValueError, match=r"Ollama's tuned has an adapter, .*; merge it"):
        names.resolve("tuned")
    keep(random_gguf("Q4_0"), "registry.ollama.ai/library/gone/latest").unlink()
    with pytest.raises(FileNotFoundError, match=r"Ollama's gone lacks its file .*; run: ollama pull gone"):
        names.resolve("gone")
    for damaged in ("", "[]", '{"layers": [1]}', '{"layers": []}', "\ufffd" * 9):
        (tmp_path / "manifests" / "registry.ollama.ai" / "library" / "gone" / "latest").write_text(damaged, "utf-8")
        with pytest.raises(FileNotFoundError, match="there is no model file gone"):
            names.resolve("gone")
    for name in ("../gone", "gone:..", "registry.ollama.ai/gone", "sha256-" + "2" * 64):
        assert ollama.find(name) is None


def test_a_file_that_reads_images_gives_way_to_the_hubs(keep: Callable[..., Path], tmp_path: Path) -> None:
    model = replace(CASES["gemma3"], metadata=CASES["gemma3"].metadata | {"vision.block_count": 2})
    seeing = write(tmp_path / "seeing.gguf", model)
    keep(seeing, "registry.ollama.ai/library/gemma3/latest")
    blob = keep(seeing, "registry.ollama.ai/library/mine/latest")
    assert "gemma-3-4b-it-GGUF" in str(names.resolve("gemma3"))
    assert names.resolve("mine") == blob  # whose loading says what to take instead


def test_without_ollama(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OLLAMA_MODELS")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert ollama.find("llama3.2") is None
    manifest = tmp_path / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "mine" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [{"mediaType": MODEL, "digest": "sha256:" + "3" * 64}]}))
    with pytest.raises(FileNotFoundError, match="lacks its file"):
        ollama.find("mine")


def test_a_folder_that_may_not_be_entered_has_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("glob", "stat"):
        monkeypatch.setattr(Path, name, Mock(side_effect=PermissionError))
    assert ollama.files() == {}
    assert ollama.find("sha256-" + "2" * 64) is None
