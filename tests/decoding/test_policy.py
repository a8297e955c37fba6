"""Policies, costs, calibration and choice: plain arithmetic, checked against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoding import drafted

from pystaged.decoding.cost import PassCost, measure
from pystaged.decoding.policy import MAX_EXPANDED, MAX_NODES, BatchLoad, FixedPolicy, GainPolicy, Growth, TreePolicy
from pystaged.drafting.calibration import DRAFT as OF_DRAFT
from pystaged.drafting.calibration import TABLE, Calibration
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import lookups
from pystaged.drafting.proposer import Candidates
from pystaged.options.config import SamplingConfig

TARGET = PassCost({1: 0.030, 2: 0.031, 4: 0.033, 8: 0.040, 16: 0.055, 32: 0.095})
DRAFT = PassCost({1: 0.0004, 8: 0.0006, 32: 0.002})


@given(st.lists(st.floats(0.001, 0.999), max_size=31), st.floats(0, 0.01))
def test_gain_policy_keeps_what_maximizes_tokens_per_second(scores: list[float], seconds: float) -> None:
    scores = sorted(scores, reverse=True)
    kept = GainPolicy(TARGET).keep(Growth(scores, [], 1, seconds))
    rates = [(1 + sum(scores[:n])) / (TARGET(n + 1) + seconds) for n in range(len(scores) + 1)]
    rates[0] = 1 / (TARGET(1) + seconds)
    assert rates[kept] == pytest.approx(max(rates))


def growth(scores: list[float], gains: list[float], price: PassCost = DRAFT, cells: int = 0) -> Growth:
    return Growth(scores, gains, 1, 0.001, cells, gains=gains, price=lambda n: price(n, cells))


@given(st.lists(st.floats(0, 2), min_size=1, max_size=20), st.floats(0.0001, 0.03), st.floats(0, 0.005))
def test_a_pass_is_bought_for_the_leaves_that_pay(gains: list[float], first: float, more: float) -> None:
    gains, price = sorted(gains, reverse=True), PassCost({1: first, 2: first + more})
    width = GainPolicy(TARGET).expand(growth([0.9], gains, price))
    rate = max((1 + 0.9 * n) / (TARGET(n + 1) + 0.001) for n in (0, 1))
    row = rate * (TARGET(3) - TARGET(2))

    def net(n: int) -> float:
        return sum(max(0.0, gain - row) for gain in gains[:n]) - rate * price(n) if n else 0.0

    assert net(width) == pytest.approx(max(map(net, range(len(gains) + 1))), abs=1e-9)


def test_texts_share_a_pass_but_not_what_each_must_read_before() -> None:
    eight, price = GainPolicy(TARGET, batch=BatchLoad(8)), PassCost({1: 0.004, 2: 0.0042})
    for lag, bought in ((0.0, 1), (0.002, 1), (0.2, 0)):
        asked = growth([], [1.0])
        asked.lag, asked.price = lag, lambda n: price(eight.texts * n) / 8
        assert eight.expand(asked) == bought


def test_a_guess_is_worth_a_row_from_what_the_row_costs() -> None:
    policy = GainPolicy(PassCost({1: 1.0, 16: 1.5}))
    for scores in ([], [0.9, 0.8, 0.7]):
        least, _ = policy.margin(Growth(scores, [], 0, 0.0))
        kept = policy.keep(Growth([*scores, least * 1.001], [], 0, 0.0))
        assert kept == len(scores) + 1
        assert policy.keep(Growth([*scores, least * 0.999], [], 0, 0.0)) == len(scores)


def test_a_long_text_drafts_as_much_as_pays_there() -> None:
    scores, lengths = [0.9**i for i in range(1, 20)], (0, 1000, 4000, 16_000)

    def nodes_and_passes(target: PassCost, draft: PassCost) -> tuple[list[int], list[int]]:
        policy = GainPolicy(target)
        growths = [growth(scores, [0.3], draft, cells) for cells in lengths]
        return [policy.keep(each) for each in growths], [policy.expand(each) for each in growths]

    seconds = {n: 0.030 + 0.0001 * n for n in (1, 32)}
    # Each row reads the keys for itself.
    kept, expanded = nodes_and_passes(PassCost(seconds, {n: 0.010 * n for n in (1, 32)}), DRAFT)
    assert kept == sorted(set(kept), reverse=True)
    assert expanded == [1, 0, 0, 0]
    # All rows share them: a guess costs as little as in a short text, but not where the draft reads as many.
    shared = PassCost(seconds, dict.fromkeys(seconds, 0.010))
    assert nodes_and_passes(shared, DRAFT) == ([19] * 4, [1] * 4)
    dear = PassCost(DRAFT.seconds, dict.fromkeys(DRAFT.seconds, 0.010))
    assert nodes_and_passes(shared, dear) == ([19] * 4, [1, 0, 0, 0])
    # Beside them dear rows are cheap.
    slow = PassCost({n: 0.020 + 0.010 * n for n in (1, 32)}, dict.fromkeys((1, 32), 0.010))
    kept, _ = nodes_and_passes(slow, DRAFT)
    assert kept == sorted(set(kept))


def test_fixed_policy() -> None:
    policy = FixedPolicy(width=2, depth=3, budget=5)
    assert policy.expand(Growth([], [0.1, 0.1, 0.1], 2, 9.0)) == 2
    assert policy.expand(Growth([], [0.1], 3, 0.0)) == 0
    assert policy.keep(Growth([0.1] * 9, [], 3, 0.0)) == 5


def test_gain_policy_keeps_its_budget() -> None:
    assert GainPolicy(TARGET, budget=2).keep(Growth([0.9, 0.9, 0.9], [], 1, 0.001)) == 2
    assert GainPolicy(PassCost({1: 1.0, 32: 1.0}), budget=999).keep(Growth([0.9] * 99, [], 1, 0.001)) == MAX_NODES


def test_costs_are_interpolated_and_extended() -> None:
    cost = PassCost({1: 1.0, 4: 2.0, 32: 30.0})
    assert cost(1) == 1.0
    assert cost(2) == pytest.approx(1 + 1 / 3)
    assert cost(32) == 30.0
    assert cost(64) == pytest.approx(30 + 32)
    assert all(cost(n) <= cost(n + 1) for n in range(1, 80))


def test_cells_add_to_costs() -> None:
    cost = PassCost({1: 1.0, 4: 2.0}, {1: 0.5, 4: 3.5})
    assert [cost(1, cells) for cells in (0, 1000, 4000)] == [1.0, 1.5, 3.0]
    assert cost(2, 2000) == pytest.approx(1 + 1 / 3 + 2 * 1.5)
    assert cost(7, 1000) == pytest.approx(3 + 6.5)
    assert PassCost({1: 1.0}, {1: 0.5})(6, 2000) == pytest.approx(6 * 2.0)


@pytest.mark.parametrize("believed", [0.0, 0.1, 0.4])
def test_what_cells_add_is_learnt_where_they_are(believed: float) -> None:
    rows, lengths = (1, 4, 16), (50, 4000)

    def true(n: int, cells: int) -> float:
        return 1 + 0.05 * n + (0.1 + 0.03 * n) * cells / 1000

    cost = PassCost({n: 1 + 0.05 * n for n in rows}, dict.fromkeys(rows, believed))
    for _ in range(3000):
        for n, cells in itertools.product(rows, lengths):
            cost.observe(n, cells, true(n, cells))
    for n, cells in itertools.product(rows, (*lengths, 2000)):
        assert cost(n, cells) == pytest.approx(true(n, cells), rel=0.02)
    # However short the passes are in truth, no cell is believed to save time.
    for _ in range(3000):
        cost.observe(1, 4000, 1e-9)
    assert min(*cost.slopes.values(), *cost.seconds.values()) >= 0
    assert cost(1, 4000) >= cost(1, 0) > 0


def test_sampling_tells_rows_from_cells() -> None:
    now = [0.0]
    passes: list[tuple[int, int]] = []

    def true(n: int, cells: int) -> float:
        return 0.001 + 0.0001 * n + (0.0004 + 0.0002 * n) * cells / 1000

    def run(n: int, cells: int) -> float:
        passes.append((n, cells))
        # At first things are slow, and now and then something interrupts.
        took = true(n, cells) * (5 if len(passes) < 3 or len(passes) % 10 == 0 else 1)
        now[0] += took
        return took

    cost = measure(run, cells=2048, clock=lambda: now[0])
    assert {cells for _, cells in passes} == {0, 2048}
    for n, cells in itertools.product((1, 2, 5, 8, 32, 40), (0, 300, 2048, 9000)):
        assert cost(n, cells) == pytest.approx(true(n, cells))
    assert now[0] < 0.31


@pytest.mark.parametrize(("alone", "slopes"), [(0.04, [1, 4, 8, 16, 32]), (0.13, [1] * 5)])
def test_a_past_that_is_sampled_once_costs_each_row_as_much(alone: float, slopes: list[float]) -> None:
    now = [0.0]

    def run(n: int, cells: int) -> float:
        now[0] += (took := alone + 0.001 * n * (1 + cells / 1000))
        return took

    cost = measure(run, cells=2000, clock=lambda: now[0])
    assert now[0] < 0.31
    assert [1000 * cost.slopes[n] for n in (1, 4, 8, 16, 32)] == pytest.approx(slopes)


@pytest.mark.parametrize(("alone", "sampled"), [(0.001, 10), (0.03, 5), (0.07, 3), (0.2, 1), (2.0, 1)])
def test_a_large_model_is_sampled_less_and_the_rest_is_assumed(alone: float, sampled: int) -> None:
    now = [0.0]

    def run(n: int, _: int) -> float:
        now[0] += alone * (1 + 0.1 * (n - 1))
        return alone * (1 + 0.1 * (n - 1))

    cost = measure(run, clock=lambda: now[0])
    assert now[0] < max(0.31, 1.01 * alone)
    assert sum(map(bool, cost.samples.values())) == sampled
    assert all(cost(n) == pytest.approx(alone * (1 + 0.1 * (n - 1))) for n in range(1, 40))


def test_the_fastest_of_the_first_samples_counts() -> None:
    cost = PassCost({1: 1.0, 8: 0.0, 32: 0.0}, samples={1: 3, 8: 0, 32: 0})
    assert (cost(8), cost(32)) == (pytest.approx(1.7), pytest.approx(4.1))
    for seconds in (3.0, 2.0, 2.5):
        cost.observe(8, 0, seconds)
    assert (cost(1), cost(8)) == (1.0, pytest.approx(2.0))
    assert cost(32) == pytest.approx(2.0 * 4.1 / 1.7)  # as steep as was assumed, from the sample on
    cost = PassCost({1: 1.0, 8: 0.0, 32: 0.0}, samples={1: 3, 8: 0, 32: 0})
    cost.observe(16, 0, 5.0)
    assert (cost.samples[8] > 0, cost.samples[32]) == (True, 0)  # a pass is a sample of the nearest number alone
    cost = PassCost({1: 1.0, 2: 0.0, 8: 1.7}, samples={1: 3, 2: 0, 8: 3})
    cost.observe(2, 0, 9.0)  # it stalled
    assert cost(2) == pytest.approx(1.25 * 1.1)
    cost.observe(2, 0, 1.2)
    assert cost(2) == pytest.approx(1.2)


def test_the_first_sample_in_a_long_context_is_believed() -> None:
    cost = PassCost({1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0}, {1: 0, 2: 0})
    cost.observe(1, 1000, 1.5)
    assert cost(1, 1000) == pytest.approx(1.5)


def test_a_pass_of_no_time_by_a_coarse_clock_is_not_free() -> None:
    cost = PassCost({1: 1.0, 8: 0.0}, samples={1: 1, 8: 0})
    for _ in range(3):
        cost.observe(1, 0, 0.0)
    assert 0 < cost(1) < cost(8)


def test_one_stalled_pass_moves_nothing_and_a_lasting_change_is_followed() -> None:
    cost = PassCost({1: 1.0, 8: 1.5, 32: 3.0})
    cost.observe(8, 0, 100.0)
    assert all(cost(n) == pytest.approx(one, rel=0.02) for n, one in ((1, 1.0), (8, 1.5), (32, 3.0)))
    for _ in range(80):
        for n, one in ((1, 1.0), (8, 1.5)):
            cost.observe(n, 0, 2 * one)
    assert (cost(1), cost(8), cost(32)) == (pytest.approx(2.0, 0.02), pytest.approx(3.0, 0.02), pytest.approx(6.0, 0.2))


def test_calibration_learns_rates() -> None:
    calibration = Calibration()
    sure, unsure = calibration.cells(1, [0.0, -8.0])[0], calibration.cells(1, [0.0, -0.1])[0]
    assert calibration.rate(sure) > calibration.rate(unsure)
    for i in range(3000):
        calibration.update(unsure, i % 10 == 0)
    assert calibration.rate(unsure) == pytest.approx(0.1, abs=0.02)
    for _ in range(3000):
        calibration.update(unsure, True)
    assert 0.95 < calibration.rate(unsure) < 1


def test_a_second_voice_raises_or_lowers_a_guess() -> None:
    """Where lookups and a draft name the same token, it is right more often than where they differ, as learnt."""
    calibration = Calibration()
    guess, found = calibration.cells(TABLE, [0.0])[0], Candidates({7: 0.0, 8: -1.0}, OF_DRAFT)
    for step in range(400):
        token = 7 if step % 4 else 8
        for rate, named, cells in calibration.judged(found, {token: guess}):
            for cell in cells:
                calibration.update(cell, named == token)
            assert 0 < rate < 1
    alone = {token: rate for rate, token, _ in calibration.judged(found, {})}
    both = {token: rate for rate, token, _ in calibration.judged(found, {8: guess})}
    assert both[8] > 0.8 > alone[8]
    assert both[7] < 0.3 < alone[7]
    absent = {token: rate for rate, token, _ in calibration.judged(found, {9: guess})}
    assert absent[9] < both[8]


class Nonsense:
    """A policy that expands one leaf for ever, but for what it is given."""

    def __init__(self, *, children: object = 4, expand: object = 1, keep: object = 5) -> None:
        self.children, self._expand, self._keep = children, expand, keep

    def expand(self, _: Growth) -> object:
        return self._expand

    def keep(self, _: Growth) -> object:
        return self._keep


@pytest.mark.parametrize("member", ["children", "expand", "keep"])
@pytest.mark.parametrize(
    ("answer", "error"),
    [(None, TypeError), (1.5, TypeError), ("2", TypeError), (-1, ValueError), (-(10**20), ValueError)],
)
def test_a_policy_that_answers_nonsense_is_named(member: str, answer: object, error: type[Exception]) -> None:
    policy = Nonsense(**{member: answer})
    drafter = TreeDrafter(lookups(), policy, 300)  # type: ignore[arg-type]
    drafter.start(np.array([1, 2, 1, 2, 1], np.int32))
    with pytest.raises(error, match=rf"Nonsense\.{member} must be"):
        drafted(drafter, SamplingConfig(), 20)


@pytest.mark.parametrize(
    "policy",
    [Nonsense(), Nonsense(expand=10**6), Nonsense(keep=10**30), Nonsense(children=50257, expand=np.int64(10**6))],
    ids=["for ever", "all", "keep", "children"],
)
def test_a_policy_is_cut_to_the_budget_of_an_engine(policy: TreePolicy) -> None:
    drafter = TreeDrafter(lookups(), policy, 300)
    text = np.random.default_rng(0).integers(0, 3, 400).astype(np.int32)
    drafter.start(text)
    tree = drafted(drafter, SamplingConfig(), 10**9)
    assert 1 < len(tree) <= MAX_NODES + 1
    assert drafter.work()["ngram"].passes <= MAX_EXPANDED


def test_a_wide_tree_is_found_behind_sizes_that_do_not_pay() -> None:
    policy = GainPolicy(PassCost({1: 1.0, 2: 1.4, 4: 2.0, 8: 3.0, 32: 5.0}))
    scores = [0.3] * 31
    assert policy.keep(Growth(scores[:4], [], 1, 0.0)) == 0
    assert policy.keep(Growth(scores, [], 1, 0.0)) == 31
