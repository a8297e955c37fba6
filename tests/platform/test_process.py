"""A Python process of our own finds the same modules as this one, from wherever it is started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.scheduling import wait_until
from typer.testing import CliRunner

from pystaged.cli import app
from pystaged.platform import process


def test_the_child_finds_what_the_parent_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, folder = tmp_path / "élan", tmp_path / "folder"
    for place in (package, folder):
        place.mkdir()
    source = "import sys\ndef main():\n    print(*sys.argv, sep='|')\n    return 7\n"
    (package / "job_of_test.py").write_text(source)
    (folder / "job_of_test.py").write_text("raise ImportError('the current folder came first')\n")
    monkeypatch.syspath_prepend(str(package))
    child = process.start("job_of_test", "one 'word'", Path("two"), cwd=folder, stdout=subprocess.PIPE, text=True)
    out, _ = child.communicate(timeout=600)
    assert (child.returncode, out.strip()) == (7, "job_of_test|one 'word'|two")


def test_a_child_of_a_parent_that_has_ended_does_nothing(tmp_path: Path) -> None:
    """It asks before it begins, and not only by a thread that may come too late."""
    code = "import threading; threading.Thread.start = print; from pystaged.platform.process import end_with_parent"
    command = [sys.executable, "-c", f"{code}; end_with_parent(); open('late', 'w')"]
    options: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "timeout": 600}
    done = subprocess.run(command, cwd=tmp_path, check=False, **options)
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (1, b"", [])


HEAPS = """
import ctypes, sys, threading
from pystaged.platform.process import bound_heaps
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


def test_large_blocks_go_back_at_once_and_threads_share_two_heaps() -> None:
    """glibc would keep a block as large as one that was freed, and give each thread a heap, up to eight a core."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        process.bound_heaps()  # does nothing
        pytest.skip("not glibc")
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    usual, bound = (
        subprocess.run([sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True, env=unset)
        for how in ("usual", "bound")
    )
    assert [usual.stdout.strip(), bound.stdout.strip()] == ["False", "True"]
    assert usual.stderr.count("Arena ") >= 6
    assert bound.stderr.count("Arena ") == 2


def test_a_server_bounds_its_heaps_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")

    class BoundedError(Exception):
        pass

    def bound() -> None:
        raise BoundedError

    monkeypatch.setattr("pystaged.cli.serve.bound_heaps", bound)
    assert isinstance(CliRunner().invoke(app, ["serve", "none.gguf"]).exception, BoundedError)


JOB = """
import os, subprocess, sys, time
from pathlib import Path
from pystaged.platform import process

class Host:
    def __init__(self):
        self.taken = []

    def pid(self):
        return os.getpid()

    def spin(self):
        with process.limits(0.05, 1 << 30):
            while True:
                pass

    def take(self, size):
        with process.limits(60, 64 << 20):
            self.taken.append(b"x" * size)
        return len(self.taken)

    def sleep(self, *begun):
        for path in begun:
            Path(path).touch()
        time.sleep(600)

    def start(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def end(self):
        os._exit(3)

def main():
    process.serve(process.parent(), Host())
    return 0
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[process.Workers]:
    (tmp_path / "bounded_job_of_test.py").write_text(JOB)
    monkeypatch.syspath_prepend(str(tmp_path))
    with contextlib.closing(process.Workers("bounded_job_of_test", 2)) as workers:
        yield workers


def ask(workers: process.Workers, name: str, *args: object) -> Any:
    with workers.turn() as worker:
        return worker.call(name, *args, timeout=600)


def test_a_worker_has_so_much_time_and_memory(workers: process.Workers) -> None:
    first = ask(workers, "pid")
    with pytest.raises(process.ChildKilledError, match="SIGPROF"):
        ask(workers, "spin")
    second = ask(workers, "pid")
    assert second != first
    assert ask(workers, "take", 1 << 20) == 1
    if Path("/proc/self/statm").exists():
        with pytest.raises(MemoryError):
            ask(workers, "take", 65 << 20)
    assert ask(workers, "take", 1 << 20) == 2
    assert ask(workers, "pid") == second
    with pytest.raises(process.ChildError, match="exit status 3") as error:
        ask(workers, "end")
    assert not isinstance(error.value, process.ChildKilledError)


def test_so_many_workers_at_once(workers: process.Workers) -> None:
    with workers.turn() as one, workers.turn() as other:
        pids = {each.call("pid", timeout=600) for each in (one, other)}
        third = threading.Thread(target=lambda: pids.add(ask(workers, "pid")), daemon=True)
        third.start()
        third.join(0.05)
        assert third.is_alive()
    third.join(600)
    assert len(pids) == 2


def test_a_worker_that_owes_an_answer_is_ended(workers: process.Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask(workers, "pid")
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "poll", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ask(workers, "sleep")
    assert ask(workers, "pid") != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


ORPHAN = """
import sys
from pystaged.platform import process
child = process.Child("bounded_job_of_test")
print(child.call("pid", timeout=600), child.call("start", timeout=600), flush=True)
child.call("sleep", sys.argv[1], timeout=600)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows does not tell a child that its parent has ended")
def test_a_child_and_its_own_end_in_a_call_whose_parent_was_killed(workers: process.Workers, tmp_path: Path) -> None:
    del workers  # whose folder is on the path
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{ORPHAN}", tmp_path / "begun"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        children = [psutil.Process(int(number)) for number in parent.stdout.readline().split()]
        wait_until((tmp_path / "begun").exists)
        parent.kill()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            wait_until(lambda child=child: child.status() == psutil.STATUS_ZOMBIE)  # its new parent may not ask for it


def test_after_an_answer_that_was_cut_off_a_child_is_ended(
    workers: process.Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(connection: Connection) -> None:
        os.read(connection.fileno(), 2)
        raise KeyboardInterrupt

    with workers.turn() as worker:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "recv", interrupted)
            with pytest.raises(KeyboardInterrupt):
                worker.call("pid", timeout=600)
        with pytest.raises(process.ChildError, match="crashed: it was ended"):
            worker.call("pid", timeout=600)
