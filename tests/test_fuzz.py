"""A short, fixed part of `python -m tests.fuzz`, and what it does with cases that fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz import driver

CASES = 25  # of each target
FAILING = """
import os, time
from fuzz.target import Case, Target

def refuse(words):
    raise ValueError(words)

WAYS = [
    lambda: None,
    lambda: refuse("no"),
    lambda: refuse(""),
    os.abort,
    lambda: time.sleep(600),
    lambda: b"x" * (120 << 20),
    lambda: bytes(1 << 40),
    lambda: {}["a"],
]

class Failing(Target):
    def sound(self):
        yield Case("sound", 1, lambda: None)

    def case(self, r):
        way = r.randrange(len(WAYS))
        return Case(f"the way {way}", 1, WAYS[way])
"""
OUTCOMES = ["", "", "ValueError without a message", "died or hung", "died or hung", "took ", "MemoryError", "KeyError"]


@pytest.mark.slow
@pytest.mark.parametrize("name", driver.TARGETS)
def test_cases(name: str) -> None:
    (tally,) = driver.fuzz([name], 0, 0, CASES, seconds=600).values()
    assert tally.failures == []
    assert tally.cases == CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table", "receipt"])
def test_cases_are_the_same_in_each_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sizes = []
    for folder in (tmp_path / "a", tmp_path / ("b" * 40)):
        folder.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        target = driver.make(name, folder)
        sizes.append([target.case(random.Random(k)).size for k in range(40)])
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_cases_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name, first, count = "failing:Failing", 675, 9  # which has them all
    ways = {k: random.Random(f"0 {name} {k}").randrange(8) for k in range(first, first + count)}
    assert set(ways.values()) == set(range(8))
    (tally,) = driver.fuzz([name], 0, first, count, seconds=10).values()
    expected = [(k, OUTCOMES[way], way) for k, way in ways.items() if OUTCOMES[way]]
    assert len(tally.failures) == len(expected)
    for failure, (k, outcome, way) in zip(tally.failures, expected, strict=True):
        assert failure.startswith(f"{name} {k}: {outcome}")
        again = f"python -m tests.fuzz --target {name} --seed 0 --from {k} --cases 1"
        assert failure.splitlines()[-2:] == [f"  the way {way}", f"  {again}"]
    assert [tally.accepted, tally.refused] == [list(ways.values()).count(way) for way in (0, 1)]
    assert driver.report({name: tally}) == 1
    # A case is the same wherever one begins.
    (alone,) = driver.fuzz([name], 0, expected[-1][0], 1, seconds=10).values()
    assert alone.failures == tally.failures[-1:]
