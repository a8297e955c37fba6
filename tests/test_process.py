"""A Python process of our own finds the same modules as this one, from wherever it is started."""

from __future__ import annotations

import subprocess
import sys
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


def test_a_child_of_a_parent_that_has_ended_does_nothing(tmp_path: Path) -> None:
    """It asks before it begins, and not only by a thread that may come too late."""
    code = "import threading; threading.Thread.start = print; from pystaged import process; process.end_with_parent()"
    command = [sys.executable, "-c", f"{code}; open('late', 'w')"]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, check=False, timeout=60)
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
