"""The folder of the source, which is not built, is refused in one line that says what to do."""

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
