"""How much memory is free, by simulated files of the system."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pystaged
from pystaged import DeviceError
from pystaged.loading.bundle import Bundle
from pystaged.platform.memory import available_memory, loadable_memory

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  900000 kB\nMemAvailable:  819200 kB\n")
    return tmp_path


def grant(root: Path, group: str, limit: str, used: int = 0, inactive_file: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


def test_what_the_system_says(root: Path) -> None:
    assert available_memory(root) == 800 * MIB


def test_control_groups(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("1:name=systemd:/other\n0::/a/b\n")
    assert available_memory(root) == 800 * MIB
    grant(root, "a/b", "max\n")
    assert available_memory(root) == 800 * MIB
    grant(root, "a", str(500 * MIB), used=100 * MIB, inactive_file=30 * MIB)
    assert available_memory(root) == 430 * MIB
    assert loadable_memory(root) == 500 * MIB
    grant(root, "a/b", str(200 * MIB), used=300 * MIB)
    assert available_memory(root) == 0


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_memory(tmp_path) == memory // 2
    assert loadable_memory(tmp_path) == memory


def test_here() -> None:
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_model_that_does_not_fit(bundled_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = bundled_target.stat().st_size
    monkeypatch.setattr("pystaged.loading.bundle.loadable_memory", lambda: size - 1)
    with pytest.raises(DeviceError, match=r"and there are .* GB; use a file of a smaller type"):
        pystaged.load(bundled_target, draft=None)
    monkeypatch.setattr("pystaged.loading.bundle.loadable_memory", lambda: size)
    pystaged.load(bundled_target, draft=None).close()


def test_a_context_that_does_not_fit(random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told and may be used, because texts may well be shorter."""

    def told(free: int) -> list[str]:
        monkeypatch.setattr(Bundle, "free_memory", lambda _: free)
        lines: list[str] = []
        with pystaged.load(random_gguf(), draft=None, recycle=False, report=lines.append) as engine:
            assert len(engine.generate("a", max_tokens=2, ignore_eos=True).tokens) == 2
        return [line for line in lines if line.startswith("a full context of ")]

    assert told(10**9) == []
    assert len(told(1000)) == 1


def test_what_llama_cpp_takes_at_once(random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cells, lines = list[int](), list[str]()
    monkeypatch.setattr("pystaged.pool.reserve", lambda _, num_cells: cells.append(num_cells))
    options: Any = {"draft": None, "recycle": False, "policy": pystaged.FixedPolicy(1, 1, 1), "report": lines.append}
    pystaged.load(random_gguf(), device="ggml-cpu", **options).close()
    assert lines == []
    pystaged.load(random_gguf(), device="ggml-cpu", kv_memory=1 << 50, **options).close()
    assert (cells[1], len(lines)) == (2**30, 1)
    assert lines[0].startswith("llama.cpp takes 1125899.9 GB at once for keys and values")
