"""Policies, costs, calibration and choice: plain arithmetic, checked against brute force."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pystaged.config import SamplingConfig
from pystaged.decoding import budget
from pystaged.decoding.budget import MOST, OPENING, PROMPT, SHARE, Budget
from pystaged.decoding.calibration import Calibration
from pystaged.decoding.constraint import Constraint
from pystaged.decoding.cost import PassCost, measure
from pystaged.decoding.crowd import Crowd
from pystaged.decoding.loop import Decoder
from pystaged.decoding.policy import MAX_EXPANDED, MAX_NODES, FixedPolicy, GainPolicy, Growth, TreePolicy
from pystaged.decoding.requests import Requests, finish
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.drafting.ngrams import NgramDrafter
from pystaged.loading.costs import CostStore
from pystaged.loading.pair import expected_use
from pystaged.stats import DrafterStats

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


def test_a_long_text_drafts_as_much_as_pays_there() -> None:
    growths = [Growth([0.9**i for i in range(1, 20)], [0.4], 1, 0.001, cells) for cells in (0, 1000, 4000, 16_000)]

    def nodes_and_passes(target: PassCost, draft: PassCost) -> tuple[list[int], list[int]]:
        policy = GainPolicy(target, draft)
        return [policy.keep(growth) for growth in growths], [policy.expand(growth) for growth in growths]

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
        cost.observe(4, 0, 1.5 * 4)
    assert cost(4) == pytest.approx(1.5 * 4, rel=0.01)
    # Larger passes are believed to have become dearer too, as far as nothing else is known.
    assert 1.2 * 8 < cost(8) < 1.5 * 8
    before = cost(1)
    cost.observe(1, 0, 1000.0)
    assert cost(1) < 1.1 * before


def test_costs_that_were_wrong_are_put_right() -> None:
    true = {1: 1.0, 2: 1.0, 4: 1.1, 8: 1.3, 16: 2.0}
    cost = PassCost({1: 1.0, 2: 1.0, 4: 20.0, 8: 1.3, 16: 30.0})
    for _ in range(600):
        for n, seconds in true.items():
            cost.observe(n, 0, seconds)
    assert cost.seconds == pytest.approx(true, rel=0.02)
    assert all(cost(n) <= cost(n + 1) for n in range(16, 80))


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


def test_measuring_tells_rows_from_cells() -> None:
    now = [0.0]
    passes: list[tuple[int, int]] = []

    def true(n: int, cells: int) -> float:
        return 0.01 + 0.001 * n + (0.004 + 0.002 * n) * cells / 1000

    def run(n: int, cells: int) -> None:
        passes.append((n, cells))
        # At first things are slow, and now and then something interrupts.
        now[0] += true(n, cells) * (5 if len(passes) < 3 or len(passes) % 10 == 0 else 1)

    cost = measure(run, cells=2048, clock=lambda: now[0])
    assert {cells for _, cells in passes} == {0, 2048}
    for n, cells in itertools.product((1, 2, 5, 8, 32, 40), (0, 300, 2048, 9000)):
        assert cost(n, cells) == pytest.approx(true(n, cells))
    assert now[0] < 4


@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 15), (0.03, 2), (0.1, 2), (0.25, 1)])
def test_slow_passes_are_measured_less_often(seconds: float, rounds: int) -> None:
    now = [0.0]
    passes: list[tuple[int, int]] = []

    def run(n: int, cells: int) -> None:
        passes.append((n, cells))
        now[0] += seconds

    measure(run, cells=2048, clock=lambda: now[0])
    assert [passes.count(each) for each in ((1, 0), (8, 0), (8, 2048))] == [rounds] * 3


def test_measuring_takes_less_than_two_seconds() -> None:
    rows: list[int] = []
    now = [0.0]

    def run(n: int, cells: int) -> None:
        rows.append(n)
        now[0] += 0.001 * n + cells * 1e-7

    cost = measure(run, most_rows=16, cells=2048, clock=lambda: now[0])
    assert now[0] < 2
    assert max(rows) == 16
    assert cost(16) > cost(1) >= 0.001


def test_stored_costs_come_back_and_damaged_ones_are_measured_again(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "costs")
    assert store.load("machine|model") is None
    store.save("machine|model", PassCost(DRAFT.seconds, dict.fromkeys(DRAFT.seconds, 1e-4)))
    again = store.load("machine|model")
    assert again is not None
    assert again.seconds == DRAFT.seconds
    assert again(1, 3000) == pytest.approx(DRAFT(1) + 3e-4)
    assert store.load("machine|other") is None
    file = next((tmp_path / "costs").iterdir())
    for damage in (
        "",
        "{",
        "[]",
        '{"key": "machine|model"}',
        json.dumps({"key": "machine|model", "measured": 1, "seconds": {"1": -1}, "slopes": {"1": 0}}),
        json.dumps({"key": "other", "measured": 1, "seconds": {"1": 1}, "slopes": {"1": 0}}),
        json.dumps({"key": "machine|model", "measured": 1, "seconds": {"2": 1}, "slopes": {"2": 0}}),
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
    drafter = NgramDrafter(None, policy, 300)  # type: ignore[arg-type]
    drafter.start(np.array([1, 2, 1, 2, 1], np.int32))
    with pytest.raises(error, match=rf"Nonsense\.{member} must be"):
        finish(drafter.draft(SamplingConfig(), 20))


@pytest.mark.parametrize(
    "policy",
    [Nonsense(), Nonsense(expand=10**6), Nonsense(keep=10**30), Nonsense(children=50257, expand=np.int64(10**6))],
    ids=["for ever", "all", "keep", "children"],
)
def test_a_policy_is_cut_to_the_budget_of_an_engine(policy: TreePolicy) -> None:
    drafter = NgramDrafter(None, policy, 300)
    text = np.random.default_rng(0).integers(0, 3, 400).astype(np.int32)
    drafter.start(text)
    tree = finish(drafter.draft(SamplingConfig(), 10**9))
    assert 1 < len(tree) <= MAX_NODES + 1
    assert drafter.stats.passes <= MAX_EXPANDED


# ---- The budget, on a simulated machine ----


class Machine:
    """A clock, and how slow the machine is at the moment."""

    def __init__(self) -> None:
        self.now, self.slowness = 0.0, 1.0

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float) -> float:
        self.now += seconds * self.slowness
        return seconds * self.slowness


@dataclass
class Behaviour:
    """What happens in a step.

    passes: seconds of each pass of a drafter. accept: nodes that come true. interrupt: seconds more of a verify pass,
    but of none that verifies the root alone in vain. telling: seconds of being told. obeys: whether the drafter minds
    its deadline.
    """

    passes: list[float]
    accept: int = 0
    interrupt: float = 0.0
    telling: float = 0.0
    obeys: bool = True
    slowness: float = 1.0


class SimulatedDrafter:
    """A chain, a pass for each node, of whatever it says that passes and catching up cost.

    overshoot: what the last of its operations took beyond its price.
    """

    memory = None

    def __init__(self, machine: Machine, price: float = 0.1, lag: float = 0.0, true_lag: float = 0.0) -> None:
        self._machine, self._price, self._lag, self._true_lag = machine, price, lag, true_lag
        self.behaviour = Behaviour([])
        self.overshoot, self.used, self._behind = 0.0, False, False

    def constrain(self, constraint: Constraint | None) -> None:
        assert constraint is None

    def work(self) -> dict[str, DrafterStats]:
        return {"draft": DrafterStats()}

    def close(self) -> None:
        pass

    def start(self, context: NDArray[np.int32]) -> None:
        del context
        self._behind, self.overshoot = True, 0.0

    def lag(self) -> float:
        return self._lag if self._behind else 0.0

    def price(self) -> float:
        return self._price

    def catch_up(self, seconds: float = math.inf) -> Requests[None]:
        yield from ()
        if self.lag() <= seconds:
            self.overshoot = self._machine.work(self._true_lag) - self._lag
            self._behind = False

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        yield from ()
        del sampling
        begin, price, builder = self._machine.now, self.lag() + self._price, TreeBuilder(0)
        for i, took in enumerate(self.behaviour.passes[:max_depth]):
            if i and self.behaviour.obeys and self._machine.now - begin + price > seconds:
                break
            self.overshoot = self._machine.work(took + (self._true_lag if self._behind else 0.0)) - price
            self._behind, price = False, self._price
            builder.add(i, 1, 0.5, Stage.DRAFT, (1, 0, 0))
        if not self.behaviour.obeys:
            # Then all that it does is one operation.
            self.overshoot = self._machine.now - begin - seconds
        self.used = True
        return builder.build(range(1, len(builder.nodes)))

    def advance(self, tokens: Sequence[int]) -> None:
        del tokens
        self._machine.work(self.behaviour.telling if self.used else 0.0)


class SimulatedSession:
    """Accepts as many nodes of a chain as it is told, in the time that the curve says."""

    n_ctx, weight_bytes = 10**6, 1

    def __init__(self, machine: Machine, curve: Callable[[int, int], float], reading: float, text: Text) -> None:
        self._machine, self._curve, self._reading, self._text = machine, curve, reading, text
        self.tokens = np.zeros(0, np.int32)
        self.cells = 0

    def truncate(self, length: int) -> None:
        self.cells = length

    def prefill(self, tokens: NDArray[np.int32]) -> None:
        self.cells += len(tokens)
        self._machine.work(self._reading * len(tokens))

    def verify(
        self,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        sampling: object,
        num_candidates: int,
        masks: object,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        del parents, sampling, num_candidates, masks
        behaviour, rows = self._text.behaviour, len(tokens)
        in_vain = rows == 1 and any(drafter.used for drafter in self._text.drafters)
        self._machine.work(self._curve(rows, self.cells) + (0.0 if in_vain else behaviour.interrupt))
        path = np.arange(min(behaviour.accept, rows - 1) + 1, dtype=np.int32)
        self.cells += len(path)
        return path, np.zeros(len(path), np.int32)


class Text:
    """Texts on a simulated machine, with the bounds on what drafting may lose, in a text and in all of them, worked out
    apart from the budget.

    Args:
        curve: seconds of a verify pass, in truth. cost: as believed.
        drafters: each its price, lag, and true lag. uses: as in Decoder, of any text or by its length.
        reading: seconds of a token of the prompt. nested: as in Decoder.
    """

    def __init__(
        self,
        curve: Callable[[int, int], float],
        cost: PassCost,
        drafters: Sequence[tuple[float, float, float]],
        uses: Sequence[tuple[float, float]] | Callable[[int], Sequence[tuple[float, float]]],
        reading: float = 0.01,
        nested: bool = False,
    ) -> None:
        self._machine, self._curve, self._cost = Machine(), curve, cost
        self.drafters = [SimulatedDrafter(self._machine, *drafter) for drafter in drafters]
        self.behaviour = Behaviour([])
        self._session = SimulatedSession(self._machine, curve, reading, self)
        self._decoder = Decoder(
            self._session,  # type: ignore[arg-type]
            *self.drafters,
            cost=cost,
            uses=uses if callable(uses) else lambda _: uses,
            crowd=Crowd(self._machine.clock),
            nested=nested,
        )
        self._reading = reading
        self.mistaken = self.misjudged = 0.0
        self.used: list[int | None] = []  # the drafter of each step of the last text
        self.plain = self.seconds = 0.0  # of the last text, the prompt excluded
        self._lost = self._bound = 0.0  # in the texts before

    def write(self, behaviours: Iterable[Behaviour], prompt_tokens: int = 40, speculate: bool = True) -> None:
        """Write a text, a step for each behaviour, and check the bounds after every one."""
        budget, machine = self._decoder.budget, self._machine
        machine.slowness = 1.0
        begin = machine.now
        for drafter in self.drafters:
            drafter.overshoot = 0.0
        finish(self._decoder.start(np.zeros(prompt_tokens, np.int32), speculate=speculate), machine.clock)
        reading = PROMPT * self._reading * prompt_tokens
        opening, carried = OPENING * budget.plain_seconds, MOST * budget.plain_seconds if self._bound else 0.0
        self.seconds = machine.now - begin - self._reading * (prompt_tokens - 1)
        overshoot = max((drafter.overshoot for drafter in self.drafters), default=0.0)
        self.plain = self.mistaken = self.misjudged = 0.0
        self.used = []
        for behaviour in behaviours:
            self.behaviour, machine.slowness = behaviour, behaviour.slowness
            for drafter in self.drafters:
                drafter.behaviour, drafter.used, drafter.overshoot = behaviour, False, 0.0
            begin, cells = machine.now, self._session.cells
            dearer = [max(0.0, self._cost(n, cells) / self._cost(1, cells) - 1) for n in range(1, 10)]
            step = finish(self._decoder.step(SamplingConfig(), 10**6), machine.clock)
            rows, tokens = len(step.tree), len(step.tokens)
            used = [drafter.used for drafter in self.drafters]
            self.used.append(used.index(True) if any(used) else None)
            self.seconds += machine.now - begin
            plain_step = behaviour.slowness * self._curve(1, cells)
            if not any(used):
                # What interrupts a plain step interrupts plain decoding.
                self.plain += machine.now - begin
            else:
                # Only plain steps change what is believed of them at that length.
                believed = budget.plain_seconds
                self.misjudged = max(self.misjudged, abs(believed / plain_step - 1))
                self.plain += tokens * plain_step
                self.mistaken += (1 + SHARE) * tokens * max(0.0, believed - plain_step)
                verify = step.verify_seconds - plain_step - believed * dearer[rows - 1]
                telling = behaviour.slowness * behaviour.telling
                overshoot = max(
                    overshoot, telling + max(0.0, verify, *(drafter.overshoot for drafter in self.drafters))
                )
            bound = reading + SHARE * self.plain + overshoot + self.mistaken
            lost, nothing = self.seconds - self.plain, 1e-9 * (1 + self.seconds + self._bound)
            assert lost <= max(opening, carried) + bound + nothing
            assert self._lost + lost <= self._bound + opening + bound + nothing
        self._lost, self._bound = self._lost + lost, self._bound + opening + bound


SECONDS = st.floats(0.0, 6.0)
CURVES = st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4)
USES = st.tuples(st.floats(1.0, 8.0), st.floats(0.5, 4.0))
DRAFTERS = st.lists(st.tuples(SECONDS, st.floats(0.0, 3.0), SECONDS), min_size=1, max_size=2)


def rising(rises: Sequence[float], factor: float = 1.0, slope: float = 0.0) -> PassCost:
    """Costs of 1, 2, 4, 8, and 16 rows, that of one row being the factor; a thousand cells add the slope per row."""
    seconds = [1.0]
    for rise in rises:
        seconds.append(seconds[-1] + rise)
    knots = {2**i: factor * value for i, value in enumerate(seconds)}
    return PassCost(knots, {n: slope * n for n in knots})


def behaviours(
    slowness: st.SearchStrategy[float], interrupt: st.SearchStrategy[float]
) -> st.SearchStrategy[list[Behaviour]]:
    return st.lists(
        st.builds(
            Behaviour,
            passes=st.lists(st.one_of(st.floats(0.0, 0.3), SECONDS), min_size=1, max_size=8),
            accept=st.integers(0, 8),
            interrupt=interrupt,
            telling=st.floats(0.0, 0.2),
            obeys=st.booleans(),
            slowness=slowness,
        ),
        min_size=1,
        max_size=40,
    )


@given(
    CURVES,
    CURVES,
    st.floats(0.3, 3.0),
    DRAFTERS,
    st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)),
    st.data(),
    behaviours(st.floats(0.1, 10.0), st.one_of(st.just(0.0), SECONDS)),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_no_text_loses_more_than_the_bound_whatever_happens(
    true: list[float],
    believed: list[float],
    factor: float,
    drafters: list[tuple[float, float, float]],
    slopes: tuple[float, float],
    data: st.DataObject,
    steps: list[Behaviour],
) -> None:
    uses = data.draw(st.lists(USES, min_size=len(drafters), max_size=len(drafters)))
    curve, cost = rising(true, 1.0, slopes[0]), rising(believed, factor, slopes[1])
    text = Text(curve, cost, drafters, uses, nested=data.draw(st.booleans()))
    for prompt_tokens, speculate in ((40, True), (2000, True), (40, False), (40, True)):
        text.write(itertools.islice(itertools.cycle(steps), 50), prompt_tokens, speculate)


@given(CURVES, CURVES, st.floats(0.3, 1.0), DRAFTERS, behaviours(st.just(1.0), st.just(0.0)), SECONDS)
@settings(derandomize=True, deadline=None, max_examples=30)
def test_nothing_is_mistaken_where_the_machine_does_not_become_faster(
    true: list[float],
    believed: list[float],
    factor: float,
    drafters: list[tuple[float, float, float]],
    steps: list[Behaviour],
    slowing: float,
) -> None:
    text = Text(rising(true), rising(believed, factor), drafters, [(4.0, 1.5)] * len(drafters))
    text.write(
        replace(step, slowness=1 + slowing * i) for i, step in enumerate(itertools.islice(itertools.cycle(steps), 50))
    )
    assert text.mistaken == 0


FLAT = PassCost({1: 1.0, 32: 1.0})


def lost(text: Text) -> float:
    """The share of the time of plain decoding that the last text lost."""
    return text.seconds / text.plain - 1


@pytest.mark.parametrize("believed", [0.5, 1.0, 1.3, 6.0])
@pytest.mark.parametrize("steps", [96, 600])
@pytest.mark.parametrize("nested", [False, True])
def test_drafters_that_are_always_wrong_lose_less_than_three_percent_of_any_text(
    believed: float, steps: int, nested: bool
) -> None:
    drafters = [(0.3, 0.0, 0.0), (0.1, 0.0, 0.0)]
    text = Text(FLAT, PassCost(FLAT.seconds), drafters, [(believed, 1.0)] * 2, nested=nested)
    for _ in range(5):
        text.write([Behaviour([0.3, 0.3])] * steps)
        assert lost(text) < 0.03


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0, 5.0, 20.0, 20_000.0])
def test_plain_steps_that_were_believed_to_take_longer_are_put_right(factor: float) -> None:
    """As by costs that were measured on a busy machine: what is drafted seems to gain much, and loses a third."""
    believed = PassCost({n: factor * seconds for n, seconds in FLAT.seconds.items()})
    text = Text(FLAT, believed, [(0.3 * factor, 0.0, 0.0)], [(3.2, 1.5)])
    losses = []
    for _ in range(3):
        text.write([Behaviour([1.0, 1.0, 1.0], accept=2)] * 300)
        losses.append(lost(text))
    assert losses[0] < 0.2
    assert max(losses[1:]) < 0.03


def test_what_a_step_of_a_crowd_takes_says_little_of_a_lone_one() -> None:
    """Where passes of several texts take less than believed for long, say because one of them often waits."""
    crowd = Crowd(lambda: 0.0)
    budget = Budget(PassCost({1: 1.0, 2: 2.0}), lambda _: [], crowd)
    crowd.texts = 4
    budget.choose([], 0)
    for _ in range(3000):
        budget._see_plain(1.0)
    crowd.texts = 1
    budget.choose([], 0)
    assert budget.plain_seconds == 1.0


@pytest.mark.parametrize("turn", [1, 3, 10, 40])
def test_drafters_that_turn_wrong_lose_less_than_three_percent_of_any_text(turn: int) -> None:
    text = Text(FLAT, PassCost(FLAT.seconds), [(0.2, 0.0, 0.0)], [(2.0, 1.0)])
    good, bad = Behaviour([0.2] * 2, accept=2), Behaviour([0.2] * 2)
    text.write([good] * turn + [bad] * 96)
    assert lost(text) < 0.03
    text.write([good] * 500)
    assert lost(text) < -0.4
    # In the next texts it is wrong from the beginning: one of them may lose a part of what was gained, and no other.
    text.write([bad] * 96)
    assert 0.03 < lost(text) < (MOST + 1) / 96
    for _ in range(3):
        text.write([bad] * 96)
        assert lost(text) < 0.03


@pytest.mark.parametrize("speculate", [True, False])
def test_what_is_carried_is_bounded(speculate: bool) -> None:
    """However much a text gained, or a plain one left of its share."""
    text = Text(FLAT, PassCost(FLAT.seconds), [(0.2, 0.0, 0.0)], [(2.0, 1.0)])
    text.write([Behaviour([0.2] * 2, accept=2)] * 5000, speculate=speculate)
    text.write([Behaviour([0.2] * 2)] * 200)
    assert text.seconds - text.plain < MOST + 1 + SHARE * text.plain


@pytest.mark.parametrize("member", ["verify", "catch_up"])
def test_a_text_that_is_interrupted_leaves_nothing(member: str) -> None:
    """What the interrupted work took was charged to nobody, so it must not be had again."""
    text = Text(FLAT, PassCost(FLAT.seconds), [(0.2, 0.0, 0.0)], [(2.0, 1.0)])
    text.write([Behaviour([0.2] * 2, accept=2)] * 50)
    broken = text._session if member == "verify" else text.drafters[0]
    decoder, machine, lost = text._decoder, text._machine, []
    whole = getattr(broken, member)

    def interrupted(*_: object) -> Requests[None]:
        machine.work(1.0)
        raise KeyboardInterrupt

    for _ in range(3):
        setattr(broken, member, interrupted)
        with suppress(KeyboardInterrupt):
            finish(decoder.start(np.zeros(2, np.int32)), machine.clock)
            finish(decoder.step(SamplingConfig(), 10**6), machine.clock)
        setattr(broken, member, whole)
        finish(decoder.start(np.zeros(2, np.int32)), machine.clock)
        lost.append(decoder.budget.credit / decoder.budget.plain_seconds)
    assert lost == [OPENING] * 3


def test_what_a_text_gained_lets_the_next_one_last_through_bad_luck() -> None:
    good, bad = Behaviour([0.2] * 2, accept=2), Behaviour([0.2] * 2)
    used = []
    for before in ([good] * 50, [bad] * 50):
        text = Text(FLAT, PassCost(FLAT.seconds), [(0.2, 0.0, 0.0)], [(2.0, 1.0)])
        text.write(before)
        text.write([bad] * 8 + [good] * 50)
        used.append(text.used.count(0))
    assert used[0] == 58
    assert used[1] < used[0] / 2


def test_an_interruption_is_paid_for_and_forgotten_by_the_next_text() -> None:
    text = Text(FLAT, PassCost(FLAT.seconds), [(0.1, 0.0, 0.0)], [(3.0, 1.2)])
    good = Behaviour([0.1] * 3, accept=3)
    text.write([good, replace(good, passes=[40.0]), *[good] * 60])
    # No credit, no drafting: all that was lost is what the interruption took.
    assert text.used[2:] == [None] * 60
    text.write([good] * 60)
    assert text.used.count(0) > 50
    # A text that has gained much bears a short one.
    text.write([*[good] * 30, replace(good, passes=[10.0]), *[good] * 30])
    assert text.used[32:].count(0) > 25


@pytest.mark.parametrize("slope", [0.2, 2.0])
def test_what_a_growing_text_adds_to_plain_steps_is_no_loss_and_no_gain_of_drafting(
    monkeypatch: pytest.MonkeyPatch, slope: float
) -> None:
    """Rows share the keys, so whatever its length a step of three guesses takes two thirds longer than a plain one."""

    def curve() -> PassCost:
        return PassCost({1: 1.0, 4: 5 / 3}, {1: slope, 4: slope * 5 / 3})

    class Growing(SimulatedDrafter):
        def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
            return super().draft(sampling, min(max_depth, 3), seconds)

    monkeypatch.setattr(budget, "_RARE_CHECK", 10**6)  # so that no step is plain only to be seen
    text = Text(curve(), curve(), [(0.01, 0.0, 0.0)], [(3.0, 1.7)])
    text.drafters[0].__class__ = Growing
    good, bad = Behaviour([0.01] * 3, accept=2), Behaviour([0.01] * 3)
    for prompt_tokens in (40, 6000, 40):
        # From 40 cells to 3,000, and from 6,000 on to 9,000, with no plain step to see.
        text.write([good] * 1000, prompt_tokens)
        assert text.misjudged < 1e-9
        assert text.mistaken < 1e-9
        assert text.used == [0] * 1000
    for prompt_tokens in (40, 6000, 40):
        text.write([bad] * 600, prompt_tokens)
        assert lost(text) < MOST / 600 + SHARE


def test_what_a_drafter_brings_is_believed_by_the_length_of_the_text() -> None:
    curve = PassCost({1: 1.0, 4: 1.1}, {1: 0.1, 4: 0.2})
    text = Text(
        curve, PassCost(curve.seconds, curve.slopes), [(0.1, 0.0, 0.0)], lambda cells: [(2.4, 1 if cells < 200 else 5)]
    )
    good = Behaviour([0.1] * 3, accept=3)
    text.write([good] * 3, 4000)
    assert text.used == [None] * 3
    text.write([good] * 3, 40)
    assert text.used[-1] == 0
    # What has been seen of it counts for more, in texts of about that length, and where one grows longer.
    text.write([good] * 200, 400)
    assert text.used == [0] * 200
    text.write([good], 10_000)
    assert text.used == [None]


@pytest.mark.parametrize("seed", range(4))
def test_what_was_bad_while_it_had_learnt_nothing_is_used_when_it_has(seed: int) -> None:
    right = random.Random(seed)
    text = Text(FLAT, PassCost(FLAT.seconds), [(0.1, 0.0, 0.0)], [(1.2, 1.0)])

    def write(texts: int, share: float) -> None:
        for _ in range(texts):
            text.write([Behaviour([0.1] * 2, accept=int(right.random() < share)) for _ in range(128)])

    write(40, 0.05)  # far longer than old uses count
    assert text.used.count(0) < 30
    write(2, 0.45)
    assert text.used.count(0) > 110


def test_what_costs_more_than_may_be_lost_is_not_tried() -> None:
    dear = Text(FLAT, PassCost(FLAT.seconds), [(50.0, 0.0, 0.0)], [(60.0, 1.0)])
    dear.write([Behaviour([50.0], accept=1)] * 100)
    assert set(dear.used) == {None}
    # Nor is a prompt read that takes longer than may be lost, while reading a cheaper one is no loss.
    good = Behaviour([0.1] * 3, accept=3)
    for lag, tokens, read in ((5.0, 40, False), (0.9, 40, True), (5.0, 10_000, True)):
        text = Text(FLAT, PassCost(FLAT.seconds), [(0.1, lag, lag)], [(3.0, 1.2)])
        text.write([good] * 20, tokens)
        assert (0 in text.used) == read


class FixedLength(SimulatedDrafter):
    """Drafts a chain of `num_nodes`, whatever the behaviour says."""

    num_nodes = 2

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        self.behaviour = Behaviour([self._price] * self.num_nodes)
        return super().draft(sampling, max_depth, seconds)


def test_the_drafter_that_gains_most_is_used() -> None:
    text = Text(FLAT, PassCost(FLAT.seconds), [(0.25, 0.0, 0.0), (0.9, 0.0, 0.0)], [(1.1, 1.0), (1.3, 1.0)])
    for drafter in text.drafters:
        drafter.__class__ = FixedLength
    text.write([Behaviour([], accept=2)] * 3000)
    assert text.used[:3].count(1) >= 1
    assert text.used[-100:].count(0) > 90
    # The other one goes on being tried, ever so rarely.
    assert 0 < text.used[1000:].count(1) < 60


@pytest.mark.parametrize(
    ("nested", "price", "num_nodes", "least", "most"),
    [
        (True, 0.05, 3, 60, 100),  # believed to be as good, found to be better
        (False, 0.05, 3, 0, 0),  # believed to be worse, and no purse pays for a trial yet
        (True, 0.9, 3, 0, 1),  # dearer than what it would bring
        (True, 0.05, 1, 0, 20),  # brings less in fact
    ],
)
def test_what_mixes_in_the_next_ones_guesses_is_believed_to_bring_as_much(
    nested: bool, price: float, num_nodes: int, least: int, most: int
) -> None:
    drafters = [(price, 0.0, 0.0), (0.05, 0.0, 0.0)]
    text = Text(FLAT, PassCost(FLAT.seconds), drafters, [(1.4, 1.1), (3.0, 1.1)], nested=nested)
    for drafter, nodes in zip(text.drafters, (num_nodes, 2), strict=True):
        drafter.__class__, drafter.num_nodes = FixedLength, nodes  # type: ignore[attr-defined]
    text.write([Behaviour([], accept=3)] * 100)
    assert least <= text.used.count(0) <= most


@pytest.mark.parametrize(("texts", "best"), [(1, 0), (8, None)])
def test_what_is_mixed_in_costs_a_crowd_its_waiting(texts: int, best: int | None) -> None:
    machine = Machine()
    crowd = Crowd(machine.clock)
    budget = Budget(PassCost(FLAT.seconds), lambda _: [(1.0, 2.0), (2.2, 1.2)], crowd, nested=True)
    budget.credit, crowd.texts = 100.0, texts
    # Only the first one's prompt can be paid for.
    drafters = [SimulatedDrafter(machine, 0.15), SimulatedDrafter(machine, 0.05, lag=1e9)]
    for drafter in drafters:
        drafter.start(np.zeros(1, np.int32))
    budget.choose(drafters, 0)  # the step itself is plain, to see what that takes
    assert budget._best == best


def test_expected_use() -> None:
    def gain(cost: PassCost, pass_seconds: float, rate: float) -> float:
        tokens, steps = expected_use(cost, pass_seconds, rate)
        return tokens - steps

    assert gain(TARGET, DRAFT(1), 0.75) > 0.03
    assert gain(TARGET, TARGET(1), 0.75) < 0
    assert gain(PassCost({1: 1.0}), 0.0, 0.5) < 0
    # A text may be too long for it.
    steep = PassCost(TARGET.seconds, {n: 0.01 * n for n in TARGET.seconds})
    gains = [tokens - steps for tokens, steps in (expected_use(steep, DRAFT(1), 0.75, cells) for cells in (0, 9000))]
    assert gains[0] > 0.03
    assert gains[1] < 0
    # Nothing is lost by a longer chain that costs nothing.
    assert expected_use(PassCost({1: 3.0, 32: 3.0}), 0.0, 0.5) == (pytest.approx(2 - 0.5**8), 1.0)
