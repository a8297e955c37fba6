"""Runs of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from typer.testing import CliRunner

PROGRAM = (
    [sys.executable, "-m", "pystaged"]
    if find_spec("pystaged.__main__")
    else [str(Path(sys.executable).with_name("pystaged"))]
)


def environment(**changes: str) -> dict[str, str]:
    usual = {key: value for key, value in os.environ.items() if not key.startswith("PYSTAGED_")}
    return usual | {"PYTHONUTF8": "1", "NO_COLOR": "1"} | changes


def run(*arguments: str | bytes | Path, stdin: bytes = b"", **changes: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PROGRAM, *arguments], input=stdin, capture_output=True, check=False, env=environment(**changes), timeout=600
    )


def here(*arguments: str | bytes | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """As run, in this process and so in a tenth of the time: for what needs neither its start nor its streams."""
    from pystaged.cli import app  # noqa: PLC0415  the first import is tested, too

    done = CliRunner().invoke(app, list(map(os.fsdecode, arguments)), input=stdin, env={"NO_COLOR": "1"})
    stderr = done.stderr_bytes or b""
    if done.exception and not isinstance(done.exception, SystemExit):
        stderr += f"error: {done.exception}\n".encode()
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout_bytes, stderr)


def run_python(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def assert_refused(done: subprocess.CompletedProcess[bytes], *words: str) -> None:
    """One line on standard error that says what is wrong; nothing on standard output."""
    said = done.stderr.decode()
    assert done.stdout == b""
    assert "Traceback" not in said
    assert done.returncode == 1, said
    assert said.endswith("\n")
    (line,) = said.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in said
