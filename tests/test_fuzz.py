"""A short, fixed part of `python -m tests.fuzz`, and what it says of cases that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import driver

CASES = 25  # of each target
FAILING = """
import os
from fuzz.target import Case, Target

class Failing(Target):
    ways = [lambda: None, lambda: int("no"), lambda: b"x" * (120 << 20), os.abort]

    def sound(self):
        yield Case("sound", 1, lambda: None)

    def case(self, r):
        return Case("a way", 1, self.ways.pop(0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", driver.TARGETS)
def test_cases(name: str) -> None:
    (tally,) = driver.fuzz([name], 0, 0, CASES, seconds=600).values()
    assert tally.failures == []
    assert tally.cases == CASES


@pytest.mark.slow
def test_cases_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = "failing:Failing"
    (tally,) = driver.fuzz([name], 0, 0, 4, seconds=10).values()
    assert (tally.accepted, tally.refused) == (1, 1)
    large, dead = tally.failures
    assert large.startswith(f"{name} 2: took ")
    assert dead.startswith(f"{name} 3: died or hung")
    assert dead.endswith(f"python -m tests.fuzz --target {name} --seed 0 --from 3 --cases 1")
    assert driver.report({name: tally}) == 1
