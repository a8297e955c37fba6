"""Measured costs in the cache folder: what cannot be true is measured again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.random_models import RandomModel, write

from pystaged._core import Model, Session
from pystaged.decoding import cost
from pystaged.decoding.cost import MEASURED_ROWS, PassCost
from pystaged.decoding.experts import ExpertCost
from pystaged.loading import costs
from pystaged.loading.costs import CostStore, measure_passes

SECONDS = {1: 0.0004, 8: 0.0006, 32: 0.002}
SLOPES = {1: 0.0001, 8: 0.0008, 32: 0.003}


@pytest.fixture
def store(tmp_path: Path) -> CostStore:
    store = CostStore(tmp_path / "costs")
    store.save("key", PassCost(SECONDS, SLOPES))
    return store


@pytest.fixture
def file(store: CostStore, tmp_path: Path) -> Path:
    (path,) = (tmp_path / "costs").iterdir()
    assert store.load("key") is not None
    return path


def assert_measured_again(store: CostStore, file: Path) -> None:
    """Nothing is believed, and what is then saved is."""
    assert store.load("key") is None
    store.save("key", PassCost(SECONDS, SLOPES))
    found = store.load("key")
    assert found is not None
    assert (found.seconds, found.slopes) == (SECONDS, SLOPES)
    assert [path for path in file.parent.iterdir() if path.name.endswith((".json", ".part"))] == [file]


def test_costs_of_a_mixture(store: CostStore, file: Path) -> None:
    unions = {1: 8.0, 8: 30.0, 32: 50.0}
    store.save("key", ExpertCost(SECONDS, SLOPES, 2e-5, unions))
    found = store.load("key")
    assert isinstance(found, ExpertCost)
    assert (found.seconds, found.slopes, found.price, found.unions) == (SECONDS, SLOPES, 2e-5, unions)
    text = json.loads(file.read_text())
    damaged = [{"unions": text["unions"] | {"8": wrong}} for wrong in (-30.0, 0, "inf", "nan")]
    for wrong in ({"price": 1e-3}, {"price": -1.0}, {"price": "nan"}, {"unions": {"1": 8.0}}, {"unions": 1}, *damaged):
        file.write_text(json.dumps(text | wrong))
        assert store.load("key") is None


def test_a_mixture_is_measured_by_experts(tmp_path: Path) -> None:
    model = Model(write(tmp_path / "model.gguf", RandomModel("qwen3moe", experts=(16, 2, 32, 0), tie=False)))
    found = measure_passes(model, np.arange(40, dtype=np.int32))
    assert isinstance(found, ExpertCost)
    assert found.unions[1] == model.experts_per_row == 4
    session = Session(model)
    session.evaluate(np.arange(8), np.arange(-1, 7))
    assert found.unions[8] == session.experts[1]
    assert 0 <= found.price * 4 <= found(1)


@pytest.mark.parametrize(
    "seconds",
    [
        "",
        '"1": 1e-300',
        '"1": 1e300',
        '"1": 0.001, "5": 0.002',
        f'"1": {"9" * 400}',
        '"1": NaN',
        '"1": 0.05, "8": 0.02',
        '"1": true, "8": []',
        '"1": 0.001, "2": 0.003',
        '"one": 0.001',
        '"1": -1.0',
        '"2": 0.001',
    ],
)
def test_times_no_pass_takes_and_rows_nobody_measures(store: CostStore, file: Path, seconds: str) -> None:
    rows = re.findall('"([^"]*)":', seconds)
    slopes = ", ".join(f'"{n}": 0.0' for n in rows)
    file.write_text(f'{{"key": "key", "seconds": {{{seconds}}}, "slopes": {{{slopes}}}}}')
    assert_measured_again(store, file)


@pytest.mark.parametrize(
    "slopes",
    [
        "null",
        '{"1": 0.0, "8": 0.0, "16": 0.0}',
        '{"1": 0.0, "8": -1e-9, "32": 0.0}',
        '{"1": 0.0, "8": NaN, "32": 0.0}',
        '{"1": 0.05, "8": 0.05, "32": 0.21}',
        '{"1": 0.0, "8": 0.0036, "32": 0.004}',
        '{"1": 0.004, "8": 0.0001, "32": 0.004}',
        '{"1": 0.0, "8": {}, "32": 0.0}',
    ],
)
def test_what_no_cells_add(store: CostStore, file: Path, slopes: str) -> None:
    file.write_text(f'{{"key": "key", "seconds": {json.dumps(SECONDS)}, "slopes": {slopes}}}')
    assert_measured_again(store, file)


def test_a_little_less_for_more_rows_is_what_running_may_teach(store: CostStore, file: Path) -> None:
    learnt = {"seconds": {"1": 0.001, "2": 0.0008}, "slopes": {"1": 0.0005, "2": 0.0004}}
    file.write_text(json.dumps(json.loads(file.read_text()) | learnt))
    assert store.load("key") is not None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"key": "key"}', '{"key": "other", "seconds": {"1": 1}, "slopes": {"1": 0}}']
)
def test_texts_that_hold_no_costs_of_this(store: CostStore, file: Path, text: str) -> None:
    assert store.load("other") is None
    file.write_text(text)
    assert_measured_again(store, file)


def brackets(path: Path) -> None:
    path.write_text("[" * 100_000)


def too_large(path: Path) -> None:
    path.write_text(path.read_text() + " " * 10_000_000)


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("spoil", [brackets, too_large, not_text, fifo, endless])
def test_files_that_hold_no_costs(store: CostStore, file: Path, spoil: Callable[[Path], None]) -> None:
    spoil(file)
    assert_measured_again(store, file)


def test_a_folder_in_its_place(store: CostStore, file: Path) -> None:
    file.unlink()
    file.mkdir()
    store.save("key", PassCost(SECONDS))
    assert store.load("key") is None


def test_what_was_measured_on_a_busy_machine_is_measured_again(store: CostStore, file: Path) -> None:
    for seconds, kept in (({1: 0.01, 2: 0.02, 8: 0.08}, True), ({1: 0.01, 2: 0.03, 8: 0.04}, False)):
        store.save("key", PassCost(seconds))
        assert file.exists()
        assert (store.load("key") is not None) == kept


@pytest.mark.parametrize("context", [1, 20, 287, 288, 3000])
def test_every_length_of_context_can_be_measured(
    random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    monkeypatch.setattr(cost, "_BUDGET", 0.0)
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
