"""Policies, costs, calibration and choice: plain arithmetic, checked against brute force."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pystaged.decoding.budget import Choice
from pystaged.decoding.calibration import Calibration
from pystaged.decoding.cost import PassCost, measure
from pystaged.decoding.policy import FixedPolicy, GainPolicy, Growth
from pystaged.loading.costs import CostStore
from pystaged.loading.pair import expected_use

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
    assert cost(4) == pytest.approx(1.5 * 4, rel=0.01)
    # Larger passes are believed to have become dearer too, as far as nothing else is known.
    assert 1.2 * 8 < cost(8) < 1.5 * 8
    before = cost(1)
    cost.observe(1, 1000.0)
    assert cost(1) < 1.1 * before


def test_costs_that_were_wrong_are_put_right() -> None:
    true = {1: 1.0, 2: 1.0, 4: 1.1, 8: 1.3, 16: 2.0}
    cost = PassCost({1: 1.0, 2: 1.0, 4: 20.0, 8: 1.3, 16: 30.0})
    for _ in range(600):
        for n, seconds in true.items():
            cost.observe(n, seconds)
    assert cost.seconds == pytest.approx(true, rel=0.02)
    assert all(cost(n) <= cost(n + 1) for n in range(16, 80))


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
    assert again.seconds == DRAFT.seconds
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


def believing(*gains: float) -> Choice:
    """A choice among drafters of which a use, as long as a plain step, is believed to gain so much."""
    return Choice([(1.0 + gain, 1.0) for gain in gains])


def lost(choice: Choice, gain_at: Callable[[int], Sequence[float]], prices: Sequence[float], tokens: int) -> float:
    """The share of the time of plain decoding that a text has lost at its end.

    Args:
        gain_at: what each drafter would gain in a step; the step's tokens are as many as make that true.
    """
    choice.open()
    plain = seconds = 0.0
    step = 0
    while plain < tokens:
        chosen = choice.choose(prices)
        gain = 0.0 if chosen is None else gain_at(step)[chosen]
        # A loss beyond the credit is cut off by verifying less, as in Decoder.
        gain = max(gain, -choice.credit)
        without = 1.0 + max(gain, 0.0)
        choice.record(chosen, without, without - gain)
        plain += without
        seconds += without - gain
        step += 1
    return seconds / plain - 1


@pytest.mark.parametrize("believed", [-1.0, 0.0, 0.3, 5.0])
@pytest.mark.parametrize("tokens", [96, 300, 2000])
def test_always_wrong_drafters_lose_less_than_three_percent_of_any_text(believed: float, tokens: int) -> None:
    choice = believing(believed, believed)
    for _ in range(10):
        assert lost(choice, lambda _: (-0.7, -0.4), (0.3, 0.1), tokens) < 0.03


@pytest.mark.parametrize("turn", [1, 3, 10, 40])
def test_drafters_that_turn_wrong_lose_less_than_three_percent_of_any_text(turn: int) -> None:
    choice = believing(1.0)
    assert lost(choice, lambda step: (2.0 if step < turn else -0.5,), (0.2,), 96) < 0.03
    # In the next text it is wrong from the beginning, whatever it has gained before.
    assert lost(believing(1.0), lambda _: (2.0,), (0.2,), 500) < -0.4
    assert lost(choice, lambda _: (-0.5,), (0.2,), 96) < 0.03


@given(st.lists(st.tuples(st.floats(-1.5, 4), st.floats(-1.5, 4)), min_size=1, max_size=50), st.floats(0.01, 1))
@settings(derandomize=True, deadline=None)
def test_whatever_drafters_do_no_text_loses_three_percent(gains: list[tuple[float, float]], price: float) -> None:
    choice = believing(0.5, 0.5)
    for _ in range(4):
        assert lost(choice, lambda step: gains[step % len(gains)], (price, price), 96) < 0.03


def used(choice: Choice, uses: Sequence[tuple[float, float]]) -> list[int | None]:
    """The drafters used in the steps of a long text, in which those of each drafter are all alike."""
    choice.open()
    found = []
    for _ in range(3000):
        found.append(choice.choose((0.1, 0.1)))
        choice.record(found[-1], *((1.0, 1.0) if found[-1] is None else uses[found[-1]]))
    return found


def test_the_drafter_that_gains_most_is_used() -> None:
    found = used(believing(0.1, 0.3), [(3.0, 1.5), (3.0, 2.8)])
    assert found[0] == 1
    assert found[-100:].count(0) > 90
    # The other one goes on being tried, ever so rarely.
    assert 0 < found[1000:].count(1) < 40


def test_the_faster_drafter_is_used_where_a_slower_one_gains_more_in_a_step() -> None:
    found = used(believing(0.5, 0.5), [(5.0, 3.0), (2.5, 1.0)])
    assert found[-100:].count(1) > 90


def test_what_costs_more_than_may_be_lost_is_not_tried() -> None:
    choice = believing(5.0)
    choice.open()
    for _ in range(100):
        assert choice.choose((50.0,)) is None
        choice.record(None, 1.0, 1.0)
    assert choice.choose((0.5,)) == 0


def test_expected_use() -> None:
    def gain(cost: PassCost, pass_seconds: float, rate: float) -> float:
        tokens, steps = expected_use(cost, pass_seconds, rate)
        return tokens - steps

    assert gain(TARGET, DRAFT(1), 0.75) > 0.03
    assert gain(TARGET, TARGET(1), 0.75) < 0
    assert gain(PassCost({1: 1.0}), 0.0, 0.5) < 0
    # Nothing is lost by a longer chain that costs nothing.
    assert expected_use(PassCost({1: 3.0, 32: 3.0}), 0.0, 0.5) == (pytest.approx(2 - 0.5**8), 1.0)
