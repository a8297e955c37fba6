"""Measured costs in the cache folder: what is damaged is measured again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pystaged._core import Model, Session
from pystaged.decoding.cost import MEASURED_ROWS, PassCost
from pystaged.loading import costs
from pystaged.loading.costs import keep_cost, kept_cost, measure_passes

SECONDS = {1: 0.0004, 8: 0.0006, 32: 0.002}
SLOPES = {1: 0.0001, 8: 0.0008, 32: 0.003}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_cost("key", PassCost(SECONDS, SLOPES))
    (path,) = tmp_path.rglob("costs/*")
    assert kept_cost("key") is not None
    return path


@pytest.mark.usefixtures("file")
def test_numbers_of_samples_are_kept() -> None:
    keep_cost("key", PassCost(SECONDS, SLOPES, {1: 3.0, 8: 2.0, 32: 0.0}))
    found = kept_cost("key")
    assert found is not None
    assert (found.slopes, found.samples) == (SLOPES, {1: 3.0, 8: 2.0, 32: 0.0})
    assert [found.seconds[n] for n in (1, 8)] == [SECONDS[n] for n in (1, 8)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"4", b"5", 1)),
        lambda path: path.write_text('{"seconds": {"1": 1e300}, "slopes": {"1": 0.0}}'),
    ],
)
def test_damaged_costs_are_removed_and_measured_again(file: Path, damage: Callable[[Path], object]) -> None:
    damage(file)
    assert (kept_cost("key"), file.exists()) == (None, False)
    keep_cost("key", PassCost(SECONDS, SLOPES))
    found = kept_cost("key")
    assert found is not None
    assert (found.seconds, found.slopes) == (SECONDS, SLOPES)
    assert kept_cost("other") is None


def test_a_folder_in_its_place(file: Path) -> None:
    file.unlink()
    file.mkdir()
    keep_cost("key", PassCost(SECONDS))
    assert kept_cost("key") is None


@pytest.mark.parametrize("context", [1, 20, 287, 288, 3000])
def test_every_length_of_context_can_be_measured(
    random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    path = random_gguf("Q8_0", context=context)
    opened: list[Session] = []

    def opening(model: Model, n_ctx: int) -> Session:
        opened.append(Session(model, n_ctx))
        return opened[-1]

    monkeypatch.setattr(costs, "open_session", opening)
    found = measure_passes(Model(str(path)), np.arange(5, dtype=np.int32))
    assert found.seconds.keys() == found.slopes.keys() == {n for n in MEASURED_ROWS if n <= max(context, 2)}
    assert all(slope >= 0 for slope in found.slopes.values())
    assert all(session.closed for session in opened)
    lengths = {session.n_ctx for session in opened}
    assert lengths == {min(context, 32), *([min(context, 2080)] if context >= 288 else [])}
    assert context >= 288 or not any(found.slopes.values())


@pytest.mark.usefixtures("file")
def test_a_guess_that_no_pass_confirmed_is_made_anew(random_gguf: Callable[..., Path]) -> None:
    path = random_gguf()
    for seconds in (1.0, 0.01):  # of other targets
        known, guess = costs.Costs(print), PassCost({1: seconds, 2: seconds}, samples={1: 0.0, 2: 0.0})
        assert known.of(path, "cpu", Model(path), like=guess) is guess
        known.save()
    guess.observe(1, 0, 0.02)
    known.save()
    assert costs.Costs(print).of(path, "cpu", Model(path), like=guess).seconds == guess.seconds
