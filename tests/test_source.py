"""The folder of the source, which is not built, is refused in one line that says what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pystaged

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the source in it."""
    ignored = shutil.ignore_patterns("_core*.so", "models", "__pycache__")
    shutil.copytree(Path(pystaged.__file__).parent, tmp_path / "pystaged", ignore=ignored)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [["-c", "import pystaged"], ["-c", "import pystaged.decoding.cost"], ["-m", "pystaged", "info"]],
    ids=["package", "submodule", "command"],
)
def test_the_source_alone_says_what_to_do(folder: Path, arguments: list[str]) -> None:
    # Without -S, an editable install would be found before the folder.
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"ImportError: {folder} holds pystaged's source without its compiled module")
    assert f"pip install -e {folder}, or start Python in another folder" in line


def test_what_a_build_takes_is_pinned() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^requires = \[(.*)\]$", text, re.MULTILINE)
    assert found is not None
    for requirement in found[1].split(", "):
        assert re.fullmatch(r'"[a-z0-9-]+==[0-9.]+"', requirement), requirement
    assert "FetchContent" not in "".join(path.read_text() for path in [ROOT / "CMakeLists.txt", *ROOT.glob("cmake/*")])
    for workflow in ROOT.glob(".github/workflows/*.yml"):
        for action in re.findall(r"uses: (\S+)", workflow.read_text()):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action


def test_nothing_calls_the_c_librarys_functions_whose_bits_differ() -> None:
    inexact = re.compile(r"\b(?:std::|__builtin_)(?:exp|log|pow|sin|cos|tan|cbrt|hypot)[a-z0-9]*\(")
    for path in (ROOT / "cpp").rglob("*.[ch]*"):
        assert not inexact.findall(path.read_text()), path


@pytest.mark.parametrize("place", ["pystaged", "models"])
def test_nothing_is_unpickled(place: str) -> None:
    unsafe = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|dill|joblib)\b|weights_only=False|allow_pickle=True"
        r"|torch\.load\((?!.*weights_only=True)|\byaml\.load\(|[^.\w](eval|exec)\(",
        re.MULTILINE,
    )
    for path in (ROOT / place).rglob("*.py"):
        assert not unsafe.search(path.read_text()), path
