"""What `python -m tests.soak` does, for a moment, and how it judges."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from soak import Sample, soak, verdict

FLAT = [Sample(500_000_000 + i % 3 * 1_000_000, 5, 20, 0, 100 + i % 5) for i in range(20)]


def test_what_is_flat() -> None:
    # What happens while caches fill does not count.
    assert verdict([Sample(100_000_000, 1, 1, 0, 300), *FLAT]) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rss": 550_000_000}, "memory grew by 9"),
        ({"speed": 80}, "speed fell by 2"),
        ({"threads": 6}, "6 threads, where there were 5"),
        ({"descriptors": 30}, "30 descriptors, where there were 20"),
        ({"children": 1}, "1 children, where there were 0"),
    ],
    ids=str,
)
def test_what_is_not(changes: dict[str, int], problem: str) -> None:
    (found,) = verdict([*FLAT[:13], *(sample._replace(**changes) for sample in FLAT[13:])])
    assert found.startswith(problem)


def test_a_slow_leak() -> None:
    leaking = [sample._replace(descriptors=20 + i // 7) for i, sample in enumerate(FLAT * 3)]
    assert verdict(leaking) == ["25 descriptors, where there were 22"]


def test_what_is_about_to_end() -> None:
    assert verdict([sample._replace(threads=5 + i % 3) for i, sample in enumerate(FLAT)]) == []


def test_too_little() -> None:
    assert verdict(FLAT[:1]) == ["1 samples are too few"]


@pytest.mark.slow
def test_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = len(psutil.Process().children(recursive=True))
    samples = soak(tmp_path, 1, 1)
    # One renders templates, one tries grammars; both wait for the next.
    assert samples[-1].children <= before + 2
