"""Policies, costs, calibration and switches: plain arithmetic, checked against brute force."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pystaged.calibration import Calibration
from pystaged.cost import CostStore, PassCost, measure
from pystaged.policy import FixedPolicy, GainPolicy, Growth
from pystaged.switch import Switch

TARGET = PassCost({1: 0.030, 2: 0.031, 4: 0.033, 8: 0.040, 16: 0.055, 32: 0.095})
DRAFT = PassCost({1: 0.0004, 8: 0.0006, 32: 0.002})


@given(st.lists(st.floats(0.001, 0.999), max_size=31), st.floats(0, 0.01))
@settings(derandomize=True, deadline=None)
def test_gain_policy_keeps_what_maximizes_tokens_per_second(scores: list[float], seconds: float) -> None:
    scores = sorted(scores, reverse=True)
    kept = GainPolicy(TARGET, DRAFT).keep(Growth(scores, [], 1, seconds))
    rates = [(1 + sum(scores[:n])) / (TARGET(n + 1) + seconds) for n in range(len(scores) + 1)]
    rates[0] = 1 / (TARGET(1) + seconds)
    assert rates[kept] == pytest.approx(max(rates))


def test_gain_policy_does_not_draft_what_cannot_pay() -> None:
    dear = PassCost({1: 1.0, 32: 40.0})
    policy = GainPolicy(TARGET, dear)
    assert policy.expand(Growth([], [1.0], 0, 0.0)) == 0
    assert policy.keep(Growth([0.01], [], 1, 0.0)) == 0
    linear = GainPolicy(PassCost({n: 0.03 * n for n in range(1, 33)}), DRAFT)
    assert linear.keep(Growth([0.9, 0.8], [], 1, 0.0)) == 0


def test_gain_policy_expands_likely_leaves_only() -> None:
    policy = GainPolicy(TARGET, DRAFT)
    assert policy.expand(Growth([0.9, 0.9, 0.001], [0.9, 0.9, 0.001], 1, 0.001)) == 2
    assert policy.expand(Growth([0.9], [], 1, 0.001)) == 0
    budget = GainPolicy(TARGET, DRAFT, budget=2)
    assert budget.expand(Growth([0.9, 0.9, 0.9], [0.9], 1, 0.001)) == 0
    assert budget.keep(Growth([0.9, 0.9, 0.9], [], 1, 0.001)) == 2


def test_fixed_policy() -> None:
    policy = FixedPolicy(width=2, depth=3, budget=5)
    assert policy.expand(Growth([], [0.1, 0.1, 0.1], 2, 9.0)) == 2
    assert policy.expand(Growth([], [0.1], 3, 0.0)) == 0
    assert policy.keep(Growth([0.1] * 9, [], 3, 0.0)) == 5


def test_costs_are_interpolated_and_extended() -> None:
    cost = PassCost({1: 1.0, 4: 2.0, 32: 30.0})
    assert cost(1) == 1.0
    assert cost(2) == pytest.approx(1 + 1 / 3)
    assert cost(32) == 30.0
    assert cost(64) == pytest.approx(30 + 32)
    assert all(cost(n) <= cost(n + 1) for n in range(1, 80))


def test_costs_follow_what_is_observed() -> None:
    cost = PassCost({1: 1.0, 32: 32.0})
    for _ in range(200):
        cost.observe(4, 1.5 * 4)
    assert cost(8) == pytest.approx(1.5 * 8, rel=0.01)
    before = cost(1)
    cost.observe(1, 1000.0)
    assert cost(1) < 1.1 * before


def test_measuring_takes_less_than_two_seconds() -> None:
    rows: list[int] = []

    def run(n: int) -> None:
        rows.append(n)
        time.sleep(0.001 * n)

    begin = time.perf_counter()
    cost = measure(run, most_rows=16)
    assert time.perf_counter() - begin < 2
    assert max(rows) == 16
    assert cost(16) > cost(1) >= 0.001


def test_stored_costs_come_back_and_damaged_ones_are_measured_again(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "costs")
    assert store.load("machine|model") is None
    store.save("machine|model", DRAFT)
    again = store.load("machine|model")
    assert again is not None
    assert again.measured == DRAFT.measured
    assert store.load("machine|other") is None
    file = next((tmp_path / "costs").iterdir())
    for damage in (
        "",
        "{",
        "[]",
        '{"key": "machine|model"}',
        json.dumps({"key": "machine|model", "seconds": {"1": -1}}),
        json.dumps({"key": "other", "seconds": {"1": 1}}),
        json.dumps({"key": "machine|model", "seconds": {"2": 1}}),
    ):
        file.write_text(damage)
        assert store.load("machine|model") is None


def test_costs_that_cannot_be_written_are_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CostStore(tmp_path / "file" / "below").save("key", DRAFT)


def test_calibration_learns_rates() -> None:
    calibration = Calibration()
    sure, unsure = calibration.cells(1, [0.0, -8.0])[0], calibration.cells(1, [0.0, -0.1])[0]
    assert calibration.rates[sure] > calibration.rates[unsure]
    for i in range(3000):
        calibration.update(unsure, i % 10 == 0)
    assert calibration.rates[unsure] == pytest.approx(0.1, abs=0.02)
    for _ in range(3000):
        calibration.update(unsure, True)
    assert 0.95 < calibration.rates[unsure] < 1


def test_cells_tell_stage_rank_and_share() -> None:
    calibration = Calibration()
    cells = calibration.cells(2, [0.0, -0.5, -9.0])
    assert [cell[0] for cell in cells] == [2, 2, 2]
    assert [cell[1] for cell in cells] == [0, 1, 2]
    assert cells[0][2] > cells[1][2] > cells[2][2]
    # A candidate of -inf, where filters left fewer, has no share.
    assert calibration.cells(1, [0.0, -float("inf")])[0][2] > cells[0][2]


def test_switch_turns_off_losses_and_probes_them_ever_more_rarely() -> None:
    switch = Switch()
    uses = []
    for step in range(3000):
        if switch.is_on():
            uses.append(step)
            switch.record(-1.0)
    assert uses[:4] == [0, 1, 2, 3]
    assert len(uses) < 60
    for _ in range(1000):
        if switch.is_on():
            switch.record(1.0)
    assert all(switch.is_on() for _ in range(10))


def test_switch_begins_paused_where_asked() -> None:
    switch = Switch(paused=True)
    assert not any(switch.is_on() for _ in range(50))
    assert any(switch.is_on() for _ in range(500))
