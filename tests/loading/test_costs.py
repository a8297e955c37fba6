"""Measured costs in the cache folder: what cannot be true is measured again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pystaged.decoding.cost import PassCost
from pystaged.loading.costs import CostStore

SECONDS = {1: 0.0004, 8: 0.0006, 32: 0.002}


@pytest.fixture
def store(tmp_path: Path) -> CostStore:
    store = CostStore(tmp_path / "costs")
    store.save("key", PassCost(SECONDS))
    return store


@pytest.fixture
def file(store: CostStore, tmp_path: Path) -> Path:
    (path,) = (tmp_path / "costs").iterdir()
    assert store.load("key") is not None
    return path


def assert_measured_again(store: CostStore, file: Path) -> None:
    """Nothing is believed, and what is then saved is."""
    assert store.load("key") is None
    store.save("key", PassCost(SECONDS))
    found = store.load("key")
    assert found is not None
    assert found.seconds == SECONDS
    assert [path for path in file.parent.iterdir() if path.name.endswith((".json", ".part"))] == [file]


@pytest.mark.parametrize(
    "seconds",
    [
        "",
        '"1": 1e-300',
        '"1": 0.001, "8": 1e-300',
        '"1": 1e300',
        f'"1": {"9" * 400}',
        '"1": NaN',
        '"1": Infinity',
        '"1": 0.05, "8": 0.02',
        '"1": true, "8": []',
        f'"{"9" * 400}": 1',
        '"1": 0.001, "2": 0.003',
        '"-1": 0.001, "1": 0.001',
        '"one": 0.001',
    ],
)
def test_times_no_pass_takes(store: CostStore, file: Path, seconds: str) -> None:
    file.write_text(f'{{"key": "key", "seconds": {{{seconds}}}}}')
    assert_measured_again(store, file)


def test_a_little_less_for_more_rows_is_what_running_may_teach(store: CostStore, file: Path) -> None:
    file.write_text(json.dumps({"key": "key", "seconds": {"1": 0.001, "2": 0.0008}}))
    assert store.load("key") is not None


def brackets(path: Path) -> None:
    path.write_text("[" * 100_000)


def too_large(path: Path) -> None:
    path.write_text(json.dumps({"key": "key", "seconds": SECONDS}) + " " * 10_000_000)


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
