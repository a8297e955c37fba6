"""What Windows lacks is taken from Python; everything must work without it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pystaged import files, system

# What only POSIX has, taken away before anything of the package is imported. The connection to a child stays POSIX's.
WITHOUT = """
import os, signal, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
import asyncio, multiprocessing.connection, subprocess, tempfile
from pystaged import system
for name in ("fork", "getuid", "O_NONBLOCK", "O_CLOEXEC"):
    delattr(os, name)
for name in ("setitimer", "SIGHUP", "SIGALRM", "SIGUSR1"):
    delattr(signal, name)
"""


def python(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", WITHOUT + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_text_is_generated_and_kept(tmp_path: Path) -> None:
    code = """
import pystaged
with pystaged.load("bundled", prompt_cache=sys.argv[1], report=lambda line: print(line)) as engine:
    result = engine.generate("def fibonacci(n):" + " # of Leonardo" * 100, max_tokens=8)
    print(len(result.tokens), bool(system.POSIX))
"""
    assert python(code, tmp_path / "prompts").splitlines()[-1] == "8 False"
    assert len(list((tmp_path / "prompts").glob("*.prompt"))) == 1


def test_limits_do_nothing() -> None:
    assert (
        python("""
from pystaged import process
with process.limits(1, 1 << 20):
    print(len(bytes(2 << 20)))
""")
        == f"{2 << 20}\n"
    )


@pytest.fixture
def files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "POSIX", False)


@pytest.mark.usefixtures("files_stay")
def test_files_are_closed_before_they_are_renamed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with files.whole_file(path) as part:
        assert str(part) not in [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]  # noqa: PTH208
        part.write_text("text")
    assert path.read_text() == "text"


@pytest.mark.usefixtures("files_stay")
def test_old_parts_alone_are_leftovers(tmp_path: Path) -> None:
    old, new = (tmp_path / f"file.{digit * 16}.part" for digit in "01")
    for part in old, new:
        part.touch()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    assert files.leftovers(tmp_path) == [old]
    files.keep(tmp_path / "file", b"text")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", new]


@pytest.fixture
def windows_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of Windows, by those of POSIX."""
    flags = {0: fcntl.LOCK_SH, 1: fcntl.LOCK_SH | fcntl.LOCK_NB, 2: fcntl.LOCK_EX, 3: fcntl.LOCK_EX | fcntl.LOCK_NB}

    def lock_file_ex(handle: ctypes.c_void_p, flag: int, *place: object) -> bool:
        assert place[:3] == (0, 1, 0)
        try:
            fcntl.flock(handle.value or 0, flags[flag])
        except BlockingIOError:
            return False
        return True

    def win_dll(name: str, *, use_last_error: bool) -> SimpleNamespace:
        assert name == "kernel32"
        assert use_last_error
        return SimpleNamespace(LockFileEx=lock_file_ex)

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda number: number))
    monkeypatch.setattr(system, "POSIX", False)
    monkeypatch.setattr(ctypes, "WinDLL", win_dll, raising=False)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 33, raising=False)


@pytest.mark.usefixtures("windows_locks")
def test_locks(tmp_path: Path) -> None:
    with (tmp_path / "file").open("ab") as first, (tmp_path / "file").open("ab") as second:
        system.lock(first, shared=True)
        system.lock(second, shared=True, wait=True)
        with pytest.raises(BlockingIOError, match="33"):
            system.lock(second)
        first.close()
        second.close()
        with (tmp_path / "file").open("ab") as third:
            system.lock(third)


@pytest.mark.usefixtures("windows_locks")
def test_the_shared_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    from pystaged.server.shared import Loading, SharedServer, SharedServerError, _port  # noqa: PLC0415

    monkeypatch.delattr(os, "fork")
    with pytest.raises(SharedServerError, match="nowhere"):
        SharedServer(tmp_path, "first", Loading("nowhere.gguf"))
    first, second = (SharedServer(tmp_path, name, Loading("bundled")) for name in ("first", "second"))
    assert first.url.split("/")[2] == second.url.split("/")[2]
    first.close()
    assert second.ask("generate", prompt="def f(x):", options={"max_tokens": 2})["finish_reason"] == "length"
    second.close()
    # It ends by itself.
    with (tmp_path / "users.lock").open("ab") as users:
        deadline = time.monotonic() + 600
        while _port(tmp_path) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        system.lock(users, wait=True)
