"""What `python -m tests.soak` does, for a moment, and how it judges."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from soak import Sample, soak, verdict

FLAT = [Sample(500_000_000 + i % 3 * 1_000_000, 5, 20, 0, 100 + i % 5) for i in range(20)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"rss": 550_000_000}, "memory grew by 9"),
        ({"speed": 80}, "speed fell by 2"),
        ({"descriptors": 30}, "30 descriptors, where there were 20"),
    ],
    ids=str,
)
def test_the_verdict(changes: dict[str, int], problem: str | None) -> None:
    """What happens while caches fill does not count."""
    samples = [Sample(100_000_000, 1, 1, 0, 300), *FLAT[1:13], *(each._replace(**changes) for each in FLAT[13:])]
    found = verdict(samples)
    assert found == [] if problem is None else found[0].startswith(problem)


@pytest.mark.slow
def test_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = len(psutil.Process().children(recursive=True))
    samples = soak(tmp_path, 1, 1)
    # One renders templates, one tries grammars; both wait for the next.
    assert samples[-1].children <= before + 2
