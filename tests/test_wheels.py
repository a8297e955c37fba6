from __future__ import annotations

import hashlib
import re
import runpy
import subprocess
import sys
from base64 import urlsafe_b64decode
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest

from pystaged import _llama
from pystaged.bench import methods, passes
from pystaged.loading import names

ROOT = Path(__file__).parents[1]
MODELS_2 = "1a02fa8f75ffbab2cb1ca196275626c719e423ba1a9ea6a509622bca3e202c3b"


@pytest.fixture
def build_wheel() -> Any:
    spec = util.spec_from_file_location("build_wheel", ROOT / "packaging" / "build_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_models_of_a_version_stay_the_same(build_wheel: Any) -> None:
    installed = re.findall(r"models/(\S+\.(?:gguf|npz))", (ROOT / "CMakeLists.txt").read_text("utf-8"))
    assert sorted(installed) == sorted(build_wheel.MODELS)
    found = hashlib.sha256(b"".join((ROOT / "models" / name).read_bytes() for name in build_wheel.MODELS))
    assert (build_wheel.MODELS_VERSION, found.hexdigest()) == ("2", MODELS_2), "raise MODELS_VERSION"


@pytest.mark.skipif(sys.platform != "linux", reason="targets are built on Linux")
@pytest.mark.parametrize("target", [None, "aarch64-linux-gnu.2.28"])
def test_what_a_target_changes(
    build_wheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str | None
) -> None:
    commands: list[str] = []
    monkeypatch.setattr(build_wheel, "_run", lambda *words: commands.append(" ".join(map(str, words))))
    monkeypatch.setattr(build_wheel.sys, "executable", str(tmp_path / "python"))
    zig = SimpleNamespace(locate_file=lambda name: f"/there/{name}")
    monkeypatch.setattr(build_wheel.metadata, "distribution", lambda _: zig)
    monkeypatch.setattr(build_wheel.os, "environ", environment := {})
    build_wheel.prepare(tmp_path / "libraries", target)
    install, llama, _ = commands
    assert ("ziglang" in install, "--no-build-isolation" in llama) == ((True, True) if target else (False, False))
    assert "-DLLAVA_BUILD=OFF" in environment["CMAKE_ARGS"]
    if target is None:
        assert environment.keys() == {"CMAKE_ARGS"}
        assert not list(tmp_path.iterdir())
    else:
        script = (tmp_path / "c++").read_text("utf-8")
        words = ["-O3", "-march=armv8.2-a+dotprod", "two words"]
        said = subprocess.check_output(["/bin/sh", "-c", script.replace("exec /there/", "echo "), "c++", *words])
        assert said.decode() == f"ziglang/zig c++ -target {target} -O3 -mcpu=generic+v8_2a+dotprod two words\n"
        assert "-DCMAKE_SYSTEM_PROCESSOR=aarch64" in environment["CMAKE_ARGS"]
        assert "aarch64-linux-gnu.so" in environment["CMAKE_ARGS"]
        assert environment["_PYTHON_HOST_PLATFORM"] == "linux-aarch64"


def test_a_wheel_of_models(build_wheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    for name in (*build_wheel.MODELS, "LICENSE"):
        (tmp_path / "models" / name).write_text(f"this is {name}")
    monkeypatch.setattr(build_wheel, "ROOT", tmp_path)
    wheel = build_wheel.build_models(tmp_path)
    first = wheel.read_bytes()
    assert build_wheel.build_models(tmp_path).read_bytes() == first
    with ZipFile(wheel) as zipped:
        files = {name: zipped.read(name) for name in zipped.namelist()}
    info = f"pystaged_models-{build_wheel.MODELS_VERSION}.dist-info"
    assert files["pystaged_models/draft.Q8_0.gguf"] == b"this is draft.Q8_0.gguf"
    *record, last = files[f"{info}/RECORD"].decode().splitlines()
    assert last == f"{info}/RECORD,,"
    assert len(record) == len(files) - 1
    for line in record:
        name, digest, size = line.split(",")
        assert urlsafe_b64decode(digest.removeprefix("sha256=") + "=") == hashlib.sha256(files[name]).digest()
        assert int(size) == len(files[name])


def test_conda_package_requires_what_the_wheel_requires() -> None:
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text("utf-8")
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (run,) = re.findall(r"^  run:\n    - python\n((?:    - .*\n)+)", recipe, re.MULTILINE)
    (needed,) = re.findall(r"^dependencies = \[\n((?:  .*\n)+)\]", project, re.MULTILINE)
    named = re.findall(r"- (\S+) (\S+)", run)
    assert named == [
        (name.replace("-", "_"), version)
        for name, version in re.findall(r'"([a-z0-9-]+)([^"]+)"', needed)
        if name != "llama-cpp-python"
    ]
    (version,) = re.findall(r'^version = "(.*)"', project, re.MULTILINE)
    assert f'version: "{version}"' in recipe


def test_models_of_a_package_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "data" / "pystaged_models"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / names.BUNDLED_DRAFT).touch()
    monkeypatch.setattr(names, "__file__", str(tmp_path / "site-packages" / "pystaged" / "loading" / "names.py"))
    monkeypatch.syspath_prepend(str(tmp_path / "data"))
    assert names.resolve("bundled-draft") == package / names.BUNDLED_DRAFT


@pytest.mark.parametrize("inside", [True, False])
def test_a_wheel_with_its_own_libraries_asks_for_no_other(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp_version.txt").write_text(f"{_llama.VERSION}\n{'inside' if inside else ''}\n")
    found = {"pystaged._core": SimpleNamespace(origin=str(tmp_path / "_core.so"))}
    monkeypatch.setattr(util, "find_spec", found.get)  # there is no llama_cpp
    if inside:
        assert runpy.run_path(str(_llama.__file__))["VERSION"] == _llama.VERSION
    else:
        with pytest.raises(ImportError, match="it is not installed; run: pip install llama-cpp-python=="):
            runpy.run_path(str(_llama.__file__))


def test_benches_without_llama_cpp_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", {}.get)
    assert passes._measure_llama_cpp({}, {}, 1, lambda *_: None) == ({}, "llama-cpp-python is not installed")
    assert methods.baselines({"draft": None}, []) == []
