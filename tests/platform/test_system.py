"""What Windows lacks is taken from Python; everything must work without it."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import run_python

from pystaged.platform import files, system

# What only POSIX has, taken away before anything of the package is imported. The connection to a child stays POSIX's.
WITHOUT = """
import os, signal, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
import asyncio, multiprocessing.connection, subprocess, tempfile
from pystaged.platform import system
for name in ("fork", "getuid", "O_NONBLOCK", "O_CLOEXEC"):
    delattr(os, name)
for name in ("setitimer", "SIGHUP", "SIGALRM", "SIGUSR1"):
    delattr(signal, name)
"""


def python(code: str, *arguments: object) -> str:
    done = run_python(WITHOUT + code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    code = """
from pystaged.platform import process
with process.limits(1, 1 << 20):
    print(len(bytes(2 << 20)))
"""
    assert python(code) == f"{2 << 20}\n"


def test_files_are_closed_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "POSIX", False)
    path = tmp_path / "file"
    with files.whole_file(path) as part:
        assert str(part) not in [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]  # noqa: PTH208
        part.write_text("text")
    assert path.read_text() == "text"


def test_old_parts_alone_are_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "POSIX", False)
    old, new = (tmp_path / f"file.{digit * 16}.part" for digit in "01")
    for part in old, new:
        part.touch()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    assert files.leftovers(tmp_path) == [old]
    files.keep(tmp_path / "file", b"text")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", new]


def test_locks_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are simulated."""

    def locking(number: int, mode: int, count: int) -> None:
        assert (os.lseek(number, 0, os.SEEK_CUR), mode, count) == (1 << 30, 2, 1)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    monkeypatch.setattr(system, "POSIX", False)
    with (tmp_path / "file").open("ab") as first, (tmp_path / "file").open("ab") as second:
        system.lock(first)
        with pytest.raises(BlockingIOError):
            system.lock(second)
        first.close()
        system.lock(second)
