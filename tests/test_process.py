"""A Python process of our own finds the same modules as this one, from wherever it is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pystaged import process


def test_the_child_finds_what_the_parent_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, folder = tmp_path / "élan", tmp_path / "folder"
    for place in (package, folder):
        place.mkdir()
    source = "import sys\ndef main():\n    print(*sys.argv, sep='|')\n    return 7\n"
    (package / "job_of_test.py").write_text(source)
    (folder / "job_of_test.py").write_text("raise ImportError('the current folder came first')\n")
    monkeypatch.syspath_prepend(str(package))
    child = process.start("job_of_test", "one 'word'", Path("two"), cwd=folder, stdout=subprocess.PIPE, text=True)
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out.strip()) == (7, "job_of_test|one 'word'|two")
