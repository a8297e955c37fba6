"""A Python process of our own finds the same modules as this one, from wherever it is started."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pystaged import process
from pystaged.cli import app


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


def test_large_blocks_go_back_at_once() -> None:
    """glibc would keep a block as large as one that was freed before."""
    code = """
import ctypes, sys
from pystaged.process import bound_heaps
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc.mallinfo2.restype = Info
if sys.argv[1] == "bound":
    bound_heaps()
libc.free(libc.malloc(1 << 24))
before = libc.mallinfo2().hblkhd
libc.malloc(1 << 20)
print(libc.mallinfo2().hblkhd - before >= 1 << 20)
"""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        process.bound_heaps()  # does nothing
        pytest.skip("not glibc")
    for how, mapped in (("usual", "False"), ("bound", "True")):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == mapped


def test_threads_share_two_heaps() -> None:
    """glibc would give each thread one of its own, up to eight for each core."""
    code = """
import ctypes, sys, threading
from pystaged.process import bound_heaps
if sys.argv[1] == "bound":
    bound_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
all_there = threading.Barrier(7)
def allocate():
    all_there.wait()
    libc.malloc(1 << 10)
    all_there.wait()
threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
all_there.wait()
all_there.wait()
libc.malloc_stats()
"""
    if not hasattr(ctypes.CDLL(None), "malloc_stats"):
        pytest.skip("not glibc")
    heaps = []
    for how in ("usual", "bound"):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True, timeout=60)
        heaps.append(done.stderr.count("Arena "))
    assert heaps[0] >= 6
    assert heaps[1] == 2


def test_a_server_bounds_its_heaps_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")

    class BoundedError(Exception):
        pass

    def bound() -> None:
        raise BoundedError

    monkeypatch.setattr("pystaged.cli.serve.bound_heaps", bound)
    assert isinstance(CliRunner().invoke(app, ["serve", "none.gguf"]).exception, BoundedError)
