"""What models said of their tokens, from run to run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import assert_refused, here, run_python

import pystaged
from pystaged._core import RecycledCandidates
from pystaged.drafting.calibration import DRAFT
from pystaged.loading import names, recycled
from pystaged.loading.kept import RECYCLED
from pystaged.loading.recycled import KeptCandidates
from pystaged.platform.files import keep

KEPT = RecycledCandidates.num_candidates


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"a model")
    return path


def kept(
    model: Path, vocabulary: str = "v", draft: Path | None = None, clock: Callable[[], float] = lambda: 0.0
) -> Any:
    return KeptCandidates(model, vocabulary, draft, clock)


def teach(candidates: RecycledCandidates, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    before, tokens = (random.integers(0, 100, 13, dtype=np.int32) for _ in range(2))
    ids = np.stack([random.permutation(100)[:KEPT] for _ in range(13)]).astype(np.int32)
    candidates.learn(before, tokens, ids, -np.sort(random.random((13, KEPT), np.float32), axis=1))


def assert_same(one: RecycledCandidates, other: RecycledCandidates) -> None:
    for field in ("key", "tokens", "chances"):
        np.testing.assert_allclose(one.entries()[field], other.entries()[field], rtol=2e-3, atol=1e-6)


def test_what_was_saved_is_there_again(model: Path) -> None:
    memory = kept(model)
    assert len(memory.candidates.entries()) == 0
    memory.save()
    assert not RECYCLED.path(model).exists()  # nothing to keep
    teach(memory.candidates)
    memory.save()
    assert_same(kept(model).candidates, memory.candidates)
    assert RECYCLED.path(model).stat().st_mode & 0o777 == 0o600
    # Of two writers the last wins, and nothing else is left.
    other = kept(model)
    teach(other.candidates, 1)
    teach(memory.candidates, 2)
    other.save()
    memory.save()
    assert_same(kept(model).candidates, memory.candidates)
    assert list(RECYCLED.folder().iterdir()) == [RECYCLED.path(model)]


def test_calibrations_are_kept_for_each_draft(model: Path, tmp_path: Path) -> None:
    drafts = [tmp_path / f"{i}.gguf" for i in range(6)]
    for i, draft in enumerate(drafts):
        draft.write_bytes(b"a draft")
        memory = kept(model, draft=draft)
        assert not memory.calibrations[True]._counts
        teach(memory.candidates, i)
        for greedy, calibration in memory.calibrations.items():
            cell = calibration.cells(DRAFT, [0.0, -1.0])[greedy]
            for hit in (True, True, i % 2 == 0):
                calibration.update(cell, hit)
                calibration.update((*cell[:3], 1), hit)  # of two sources
        memory.save()
    assert [bool(kept(model, draft=draft).calibrations[True]._counts) for draft in drafts] == [False] * 2 + [True] * 4
    found, learnt = kept(model, draft=drafts[-1]).calibrations, memory.calibrations
    assert [vars(found[greedy]) for greedy in found] == [vars(learnt[greedy]) for greedy in found]
    assert not kept(model).calibrations[True]._counts
    drafts[-1].write_bytes(b"another draft")
    assert not kept(model, draft=drafts[-1]).calibrations[True]._counts


def test_a_memory_that_is_full_is_small(model: Path) -> None:
    memory = kept(model)
    pairs = np.random.default_rng(0).integers(1 << 33, 1 << 49, 1 << 19)
    entries = np.empty((1 << 17) + len(pairs), memory.candidates.entries().dtype)
    entries["key"] = np.concatenate([np.arange(1 << 17), pairs])
    entries["tokens"], entries["chances"] = np.arange(KEPT), 1
    memory.candidates.restore(entries)
    teach(memory.candidates)
    memory.save()
    assert 1e7 < RECYCLED.path(model).stat().st_size < 12e6
    assert_same(kept(model).candidates, memory.candidates)


def test_writes_are_rare_while_it_is_used(model: Path) -> None:
    now = 0.0
    memory = kept(model, clock=lambda: now)

    def save_at(moment: float) -> None:
        nonlocal now
        now = moment
        memory.save_now_and_then()
        for thread in threading.enumerate():
            if thread.name == "pystaged recycled":
                thread.join()

    teach(memory.candidates)
    save_at(9.0)
    assert not RECYCLED.path(model).exists()
    save_at(10.0)
    before = RECYCLED.path(model).stat().st_mtime_ns
    save_at(30.0)  # nothing new
    assert RECYCLED.path(model).stat().st_mtime_ns == before
    teach(memory.candidates, 1)
    save_at(30.0)
    assert_same(kept(model).candidates, memory.candidates)


class SlowDisk:
    """Writers of recycled candidates, and what lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writers: list[threading.Thread] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(recycled, "keep", self._keep)

    def _keep(self, path: Path, data: bytes) -> None:
        self.writers.append(threading.current_thread())
        self.begun.set()
        if self.writers[-1] is not threading.main_thread():
            assert self.go_on.wait(600)
        keep(path, data)


def test_who_uses_it_does_not_wait_for_the_disk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, disk = 0.0, SlowDisk(monkeypatch)
    memory = kept(model, clock=lambda: now)
    for now in (10.0, 30.0, 50.0):  # one writer at a time
        teach(memory.candidates, int(now))
        memory.save_now_and_then()
    assert disk.begun.wait(600)
    assert len(disk.writers) == 1
    assert disk.writers[0] is not threading.current_thread()
    disk.go_on.set()
    memory.save()  # the rest, after that
    assert_same(kept(model).candidates, memory.candidates)
    assert list(RECYCLED.folder().iterdir()) == [RECYCLED.path(model)]


def test_a_program_that_ends_at_once_keeps_it(model: Path) -> None:
    code = f"""
import numpy as np
from pathlib import Path
from pystaged.loading.recycled import KeptCandidates
times = iter([0.0, 10.0, 10.0, 10.0])
memory = KeptCandidates(Path({str(model)!r}), "v", clock=lambda: next(times))
one = np.ones(1, np.int32)
memory.candidates.learn(one, one, np.ones((1, 1), np.int32), np.zeros((1, 1), np.float32))
memory.save_now_and_then()
"""
    assert run_python(code).returncode == 0
    assert len(kept(model).candidates.entries()) == 2


def test_that_of_another_model_is_not_used(model: Path) -> None:
    memory = kept(model)
    teach(memory.candidates)
    memory.save()
    assert len(kept(model, "other").candidates.entries()) == 0
    Path(shutil.copy2(model, f"{model}.copy")).replace(model)  # as from a backup
    assert_same(kept(model).candidates, memory.candidates)
    model.write_bytes(b"another model")
    assert len(kept(model).candidates.entries()) == 0


@pytest.mark.usefixtures("model")  # whose cache is a new one
def test_engines_remember_unless_they_are_told_not_to(random_gguf: Callable[..., Path]) -> None:
    path, policy = random_gguf("Q8_0"), pystaged.FixedPolicy(1, 8, 8)
    prompt, texts = [5, 6, 7] * 6, []
    for recycle in (False, True, True):
        with pystaged.load(path, draft=None, policy=policy, recycle=recycle) as engine:
            texts.append(engine.generate(prompt, max_tokens=20))
        assert RECYCLED.all() == ([RECYCLED.path(path)] if recycle else [])
    assert texts[0].tokens == texts[1].tokens == texts[2].tokens
    assert texts[2].stats.steps < texts[0].stats.steps
    with pystaged.load(path, draft=None, policy=policy) as engine:
        before = RECYCLED.path(path).stat().st_mtime_ns
        engine.generate(prompt, max_tokens=20, speculate=False)
    assert RECYCLED.path(path).stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_commands(random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = random_gguf("Q8_0")
    done = here("generate", "abcabcabcabc", "--model", path, "--max-tokens", "4", "--no-recycle")
    assert done.returncode == 0, done.stderr
    assert RECYCLED.all() == []
    for each in (path, names.resolve("bundled")):
        memory = KeptCandidates(each, "v")
        teach(memory.candidates)
        memory.save()
    listed = [line.split() for line in here("models").stdout.decode().splitlines()]
    listed = [cells for cells in listed if cells[2:] == ["recycled", "candidates"]]
    assert sorted(cells[:2] for cells in listed) == sorted([[path.stem, "0.1"], ["bundled", "0.1"]])
    done = here("models", "remove", "--recycled", "bundled")
    assert done.stderr == b"removed recycled candidates: 1 file, 0.0 MB freed\n"
    assert_refused(here("models", "remove", "--recycled", tmp_path / "no"), "no recycled candidates of")
    done = here("models", "remove", "--packed", "--recycled", path)
    assert (done.returncode, done.stderr) == (0, b"removed recycled candidates: 1 file, 0.0 MB freed\n")
    done = here("models", "remove", "--packed", "--recycled", path)
    assert_refused(done, "no packed weights and no recycled candidates of")
    assert RECYCLED.all() == []
