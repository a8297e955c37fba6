"""In the folder of the source, which is not built, Python uses the package that is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pystaged


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the source in it."""
    ignored = shutil.ignore_patterns("_core*.so", "models", "__pycache__")
    shutil.copytree(Path(pystaged.__file__).parent, tmp_path / "pystaged", ignore=ignored)
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import pystaged; print(pystaged.generate('import os', max_tokens=4).text)"],
        ["-c", "from pystaged.decoding.cost import PassCost; print(PassCost({1: 1.0})(1))"],
        ["-m", "pystaged", "info"],
        ["-m", "pystaged.bench", "passes", "--help"],
    ],
    ids=["generate", "submodule", "command", "benchmark"],
)
def test_the_installed_package_is_used(folder: Path, arguments: list[str]) -> None:
    done = python(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_without_one_it_says_what_to_do(folder: Path) -> None:
    done = python(folder, "-S", "-c", "import pystaged")
    assert done.returncode == 1
    assert f"{folder / 'pystaged'} is the source of pystaged, to be installed first" in done.stderr
