"""Writers that are killed at any moment, and disks that are full at any byte. PYSTAGED_KILLS is how many moments."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import works
from faults.works import PULLED, WORKS
from huggingface_hub import constants
from support import hub_server
from support.families import CASES
from support.hub_server import Repository
from support.random_models import write

KILLS = int(os.environ.get("PYSTAGED_KILLS", "4"))
SLOW = ("quantize", "pull")  # start programs, or ask a server
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in WORKS]
# What is there; of the others it stays till a whole one takes its place.
BEGIN_BY_REMOVING = ("packed", "prompts", "pull")
Ask = Callable[[str], tuple[int, float]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where works are done; with a hub that has a model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))  # read when it is imported
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with hub_server.running() as server:
        model = write(tmp_path / "source.gguf", CASES["llama"])
        server.repositories = {PULLED: Repository({"tiny.Q8_0.gguf": model.read_bytes()})}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield tmp_path


@pytest.fixture
def ask(request: pytest.FixtureRequest, folder: Path) -> Iterator[Ask]:
    """Has a work done by a process of its own: how that ended, and after how many seconds."""
    name = request.node.callspec.params["name"]
    WORKS[name].prepare(folder)
    command = [sys.executable, works.__file__, name, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:

        def done(order: str) -> tuple[int, float]:
            assert process.stdin
            assert process.stdout
            process.stdin.write(f"{order}\n")
            process.stdin.flush()
            status, seconds = process.stdout.readline().split()
            return int(status), float(seconds)

        yield done


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_killed_at_any_moment(name: str, folder: Path, ask: Ask) -> None:
    """What is there is whole; the next start works, and sweeps what was left."""
    work = WORKS[name]
    assert work.state(folder) is None
    assert ask("run 0")[0] == 0
    status, seconds = ask("run 0")
    whole = work.state(folder)
    assert status == 0
    assert whole is not None
    r = random.Random(0)
    ended = set()
    for moment in itertools.count():
        if moment >= KILLS and -9 in ended:  # where the machine is busy a moment may come too late
            break
        ended.add(ask(f"kill {r.uniform(0, seconds)}")[0])
        assert work.state(folder) in ((None, whole) if name in BEGIN_BY_REMOVING else (whole,))
        if moment % 2:
            assert ask("run 0")[0] == 0
            assert work.state(folder) == whole
            assert works.parts(folder) == []
    assert ended <= {0, -9}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_full(name: str, folder: Path, ask: Ask) -> None:
    """What does not fit is refused, or not kept; what was there before stays."""
    work = WORKS[name]
    for limit in (1, 100, 3000, 20_000):
        assert ask(f"limit {limit}")[0] in ((0, 1) if work.failures else (0,))
        assert limit > 100 or work.state(folder) is None
        assert works.parts(folder) == []
    assert ask("run 0")[0] == 0
    whole = work.state(folder)
    assert whole is not None
    assert ask("limit 100")[0] == (1 if work.failures else 0)
    assert work.state(folder) == whole or name in BEGIN_BY_REMOVING
    assert works.parts(folder) == []
