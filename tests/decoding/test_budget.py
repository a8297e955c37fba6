"""The account that decides whether to draft, on a simulated machine."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pystaged.config import SamplingConfig
from pystaged.decoding.batch_load import BatchLoad
from pystaged.decoding.budget import LEAST, LEAST_SECONDS, MOST, OPENING, PROMPT, SHARE, Budget, chain_speedup
from pystaged.decoding.constraint import Constraint
from pystaged.decoding.cost import PassCost
from pystaged.decoding.decoder import Decoder
from pystaged.decoding.experts import ExpertCost
from pystaged.decoding.meter import Meter
from pystaged.decoding.requests import Clocks, Done, Requests, finish
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.stats import DrafterStats


@dataclass
class Machine:
    """Its processor and the wall: other programs make the wall run faster."""

    processor: float = 0.0
    wall: float = 0.0

    def work(self, seconds: float, interrupted: float = 0.0) -> None:
        self.processor += seconds
        self.wall += seconds + interrupted

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.wall, lambda: self.processor)


@dataclass(frozen=True)
class Behaviour:
    """What happens in a step.

    passes: seconds of each pass of a drafter. accept: nodes that come true. interrupted: seconds that other programs
    take in the step. telling: seconds of being told. obeys: whether the drafter minds its deadline. experts: for each
    guess, distinct experts of its pass beyond the usual number.
    """

    passes: Sequence[float]
    accept: int = 0
    interrupted: float = 0.0
    telling: float = 0.0
    obeys: bool = True
    experts: int = 0


class SimulatedDrafter:
    """A chain, a pass for each node.

    overshoot: what the last of its operations took beyond its price.
    """

    recycled, places = None, 1
    prediction: Sequence[int] = ()

    def __init__(self, machine: Machine, price: float = 0.1, lag: float = 0.0, true_lag: float | None = None) -> None:
        self._machine, self._price = machine, price
        self._lag, self._true_lag = lag, lag if true_lag is None else true_lag
        self.behaviour = Behaviour([])
        self.hit: bool | None = None
        self.overshoot, self.drafted = 0.0, 0  # nodes
        self.first = 0.0  # seconds of its first draft
        self._behind, self._is_unused = False, True

    def constrain(self, constraint: Constraint | None) -> None:
        assert constraint is None

    def work(self) -> dict[str, DrafterStats]:
        return {"draft": DrafterStats()}

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        return len(prompt)

    def watch(self, prompt: NDArray[np.int32], first: int, last: int) -> Requests[None]:
        del prompt, first, last
        yield from ()

    def start(self, context: NDArray[np.int32]) -> None:
        del context
        self._behind, self.overshoot, self.drafted = True, 0.0, 0

    def lag(self) -> float:
        return self._lag if self._behind else 0.0

    def price(self) -> float:
        return self._price

    def catch_up(self, seconds: float = math.inf) -> Requests[None]:
        yield from ()
        if self.lag() <= seconds:
            self._machine.work(self._true_lag)
            self.overshoot = self._true_lag - self._lag
            self._behind = False

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        yield from ()
        del sampling
        begin, price, builder = self._machine.processor, self.lag() + self._price, TreeBuilder(0)
        for i, took in enumerate(self.behaviour.passes[:max_depth]):
            if i and self.behaviour.obeys and self._machine.processor - begin + price > seconds:
                break
            whole = took + (self._true_lag if self._behind else 0.0)
            self._machine.work(whole, self.behaviour.interrupted)
            self.overshoot = max(self.overshoot, whole - price)
            self._behind, price = False, self._price
            builder.add(i, 1, 0.5, Stage.DRAFT, (1, 0, 0))
        if not self.behaviour.obeys:
            # Then all that it does is one operation.
            self.overshoot = self._machine.processor - begin
        self.drafted = len(builder.nodes) - 1
        if self._is_unused:
            self.first, self._is_unused = self._machine.processor - begin + self.behaviour.telling, False
        return builder.build(range(1, len(builder.nodes)))

    def advance(self, tokens: Sequence[int]) -> None:
        del tokens
        self.hit = self.behaviour.accept > 0 if self.drafted else None
        if self.drafted:
            self._machine.work(self.behaviour.telling)
        self.drafted = 0


class SimulatedSession:
    """Accepts as many nodes of a chain as it is told, in the time that the costs say."""

    n_ctx, most_pending, weight_bytes, on_device = 10**6, 10**6, 1, False

    def __init__(self, machine: Machine, cost: PassCost, reading: float) -> None:
        self._machine, self._cost, self._reading = machine, cost, reading
        self.behaviour = Behaviour([])
        self.tokens = np.zeros(0, np.int32)
        self.past = 0
        self.experts = np.zeros((0, 1), np.uint8), 0
        self.overshoot = 0.0  # what a tree's experts cost more than as many as usual

    def rewind(self, length: int) -> int:
        self.past = length
        return length

    def prefill(self, tokens: NDArray[np.int32]) -> None:
        self.past += len(tokens)
        self.experts = np.zeros((len(tokens), 1), np.uint8), 0
        self._machine.work(self._reading * len(tokens))

    def verify(self, tokens: NDArray[np.int32], *_: object) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        rows = len(tokens)
        if isinstance(self._cost, ExpertCost):
            usual = self._cost.union(rows)
            distinct = round(usual + self.behaviour.experts * (rows - 1))
            self.experts = np.zeros((rows, 1), np.uint8), distinct
            took = self._cost(rows, self.past, distinct)
            self.overshoot = max(0.0, took - self._cost(rows, self.past))
        else:
            took = self._cost(rows, self.past)
        self._machine.work(took, self.behaviour.interrupted)
        path = np.arange(min(self.behaviour.accept, len(tokens) - 1) + 1, dtype=np.int32)
        self.past += len(path)
        return path, np.zeros(len(path), np.int32)


class Text:
    """Texts on a simulated machine, and how far each falls behind plain decoding, worked out apart from the budget.

    Args:
        cost: seconds of a pass, in truth and as believed.
        drafters: each its price, lag, and true lag. rates: as in Decoder.
    """

    def __init__(self, cost: PassCost, drafters: Sequence[tuple[float, ...]], rates: Sequence[float]) -> None:
        self.machine, self._cost = Machine(), cost
        self.drafters = [SimulatedDrafter(self.machine, *drafter) for drafter in drafters]
        self._session = SimulatedSession(self.machine, cost, cost(32) / 32)
        session: object = self._session
        believed = copy.deepcopy(cost)
        self.decoder = Decoder(
            session,  # type: ignore[arg-type]
            *self.drafters,
            cost=believed,
            rates=rates,
            clocks=self.machine.clocks,
        )
        self.used: list[int | None] = []  # the drafter of each step of the last text
        self.lost = self.tokens = 0.0  # of the last text, in tokens of plain decoding
        self._lost = self._bound = 0.0  # of the texts before

    def write(self, behaviours: Iterable[Behaviour], prompt_tokens: int = 40, speculate: bool = True) -> None:
        """Write a text, a step for each behaviour, and check the bound after every one."""
        machine, cost = self.machine, self._cost
        begin = machine.processor
        start = self.decoder.start(np.zeros(prompt_tokens, np.int32), speculate=speculate)
        finish(start, machine.clocks)
        reading = cost(32) / 32
        self.lost = (machine.processor - begin - reading * (prompt_tokens - 1)) / cost(1, self._session.past)
        overshoot = max((drafter.overshoot for drafter in self.drafters), default=0.0) / cost(1, self._session.past)
        prompt = PROMPT * cost(32, prompt_tokens // 2) / 32 * prompt_tokens / cost(1, self._session.past)
        self.tokens, self.used = 0.0, []
        for behaviour in behaviours:
            self._session.behaviour = behaviour
            for drafter in self.drafters:
                drafter.behaviour, drafter.overshoot = behaviour, 0.0
            begin, plain = machine.processor, cost(1, self._session.past)
            step = finish(self.decoder.step(SamplingConfig(), 10**6), machine.clocks)
            self.used.append(self.decoder.budget.chosen)
            self.tokens += len(step.tokens)
            self.lost += (machine.processor - begin) / plain - len(step.tokens)
            over = max((drafter.overshoot for drafter in self.drafters), default=0.0) + self._session.overshoot
            overshoot = max(overshoot, (over + behaviour.telling * len(self.drafters)) / plain)
            first = sum(drafter.first for drafter in self.drafters) / plain
            bound = SHARE * self.tokens + prompt + overshoot + 1e-6 * (1 + abs(self._lost + self.lost)) + first
            least = max(LEAST if self._bound else OPENING, LEAST_SECONDS / cost(1))
            assert self.lost <= (MOST if self._bound else least) + bound
            assert self._lost + self.lost <= self._bound + least + bound
        self._lost, self._bound = self._lost + self.lost, self._bound + least + bound


FLAT = PassCost({1: 1.0, 32: 1.0})
GOOD, BAD = Behaviour([0.1] * 3, accept=3), Behaviour([0.1] * 3)
SECONDS = st.floats(0.0, 6.0)
RISES = st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4)
DRAFTERS = st.lists(st.tuples(SECONDS, st.floats(0.0, 3.0), SECONDS), min_size=1, max_size=2)


def rising(rises: Sequence[float], slope: float = 0.0) -> PassCost:
    """Costs of 1, 2, 4, 8, and 16 rows; a thousand tokens add the slope to each."""
    seconds = itertools.accumulate([1.0, *rises])
    knots = {2**i: value for i, value in enumerate(seconds)}
    return PassCost(knots, dict.fromkeys(knots, slope))


behaviours = st.lists(
    st.builds(
        Behaviour,
        passes=st.lists(st.one_of(st.floats(0.0, 0.3), SECONDS), min_size=1, max_size=8),
        accept=st.integers(0, 8),
        interrupted=st.one_of(st.just(0.0), st.floats(0.0, 100.0)),
        telling=st.floats(0.0, 0.2),
        obeys=st.booleans(),
        experts=st.integers(-5, 5),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("price", [None, 0.0, 0.02], ids=["dense", "free-experts", "experts"])
@given(RISES, st.floats(0.0, 5.0), DRAFTERS, st.data(), behaviours)
@settings(max_examples=30)
def test_no_text_falls_further_behind_than_the_bound_whatever_happens(
    price: float | None,
    rises: list[float],
    slope: float,
    drafters: list[tuple[float, float, float]],
    data: st.DataObject,
    steps: list[Behaviour],
) -> None:
    rates = data.draw(st.lists(st.floats(0.0, 1.0), min_size=len(drafters), max_size=len(drafters)))
    cost = rising(rises, slope)
    if price is not None:
        cost = ExpertCost(cost.seconds, cost.slopes, price, {n: 10.0 * n**0.7 for n in cost.seconds})
    text = Text(cost, drafters, rates)
    for prompt_tokens, speculate in ((40, True), (2000, True), (40, False), (40, True)):
        text.write(itertools.islice(itertools.cycle(steps), 50), prompt_tokens, speculate)


@pytest.mark.parametrize(("rate", "steps"), [(0.3, 96), (0.9, 96), (0.6, 600)])
def test_drafters_that_are_always_wrong_are_given_up(rate: float, steps: int) -> None:
    text = Text(FLAT, [(0.3,), (0.1,)], [rate] * 2)
    for i in range(5):
        text.write([Behaviour([0.3, 0.3])] * steps)
        first = 0 if i else sum(drafter.first for drafter in text.drafters)
        assert text.lost <= (LEAST if i else OPENING) + SHARE * steps + 0.7 + first
        assert text.used[-50:].count(None) >= 45


@pytest.mark.parametrize("drafters", [1, 2])
@pytest.mark.parametrize("price", [0.02, 0.05, 0.1])
def test_a_text_that_was_unlucky_for_twenty_steps_drafts_again_within_64(drafters: int, price: float) -> None:
    bad, good = Behaviour([price] * 3), Behaviour([price] * 3, accept=3)
    text = Text(rising([0.05, 0.15, 0.3, 0.6]), [(price, 0.02, 0.02)] * drafters, [0.5] * drafters)
    text.write([bad] * 20 + [good] * 200)
    assert text.used[20:84] != [None] * 64
    assert text.used[120:].count(None) < 25


def test_a_first_draft_that_takes_long_does_not_end_the_drafting() -> None:
    """Memory and code are used for the first time; a later draft that takes as long does end it."""
    text = Text(FLAT, [(0.1,)], [0.5])
    text.write([Behaviour([20.0], accept=1), *[GOOD] * 60, Behaviour([40.0]), GOOD])
    assert text.used == [0] * 62 + [None]


def test_a_hiccup_does_not_end_the_drafting_of_a_tiny_target() -> None:
    """The first step of a later text, for which the ones before left nothing, takes longer than a token."""
    text = Text(PassCost({1: 9e-4, 32: 9e-4}), [(9e-5,)], [0.5])
    text.write([Behaviour([9e-5] * 3)] * 300)
    assert text.used[-1] is None
    text.write([Behaviour([1e-3])] + [Behaviour([9e-5] * 3, accept=2)] * 60)
    assert text.used == [0] * 61


def test_what_other_programs_take_of_the_machine_is_charged_to_nobody() -> None:
    """The same with and without interruptions, each of which takes as long as a hundred passes."""
    runs = []
    for interrupted in (0.0, 100.0):
        text = Text(FLAT, [(0.1,)], [0.5])
        chance = random.Random(0)
        text.write(
            Behaviour([0.1] * 3, accept=chance.choice((0, 0, 3)), interrupted=chance.choice((0.0, interrupted)))
            for _ in range(200)
        )
        runs.append((text.used, text.lost))
    assert runs[0] == runs[1]
    assert runs[0][0].count(0) == 200


def test_the_drafter_whose_guesses_bring_most_is_used() -> None:
    text = Text(FLAT, [(0.05,), (0.1,)], [0.3, 0.95])
    text.write([Behaviour([0.05] * 2, accept=2)] * 1500)
    assert text.used[0] == 1  # by the first belief
    assert set(text.used[-100:]) == {0}  # as right, and cheaper


def test_where_rows_have_experts_of_their_own_cheap_drafters_wait_for_surer_guesses() -> None:
    seconds, unions = {1: 1.0, 2: 1.5, 32: 10.0}, {1: 8, 2: 14, 32: 64}
    for cost, price, used in (
        (PassCost(seconds), 0.01, None),
        (ExpertCost(seconds, None, 0.01, unions), 0.01, 0),
        (ExpertCost(seconds, None, 0.01, unions), 0.2, None),  # more than it could gain
    ):
        text = Text(cost, [(price,)], [0.3])
        text.write([Behaviour([])])
        assert text.used == [used]


def test_a_drafter_that_does_not_draft_is_scored_without_a_pass_of_the_target() -> None:
    text = Text(FLAT, [(0.05,), (0.01,)], [0.9, 0.6])
    rows: list[int] = []
    verify = text._session.verify
    text._session.verify = lambda tokens, *more: rows.append(len(tokens)) or verify(tokens, *more)  # type: ignore[method-assign, func-returns-value]
    text.write([Behaviour([0.05] * 3, accept=3)] * 1500)
    assert set(text.used[:16]) == {0}
    assert text.used[-1] == 1  # it was found to be as right, and is cheaper
    assert set(rows) == {4}


def test_scoring_leaves_the_chosen_drafter_what_it_needs() -> None:
    text = Text(FLAT, [(0.5,), (0.15,)], [0.9, 0.1])
    finish(text.decoder.start(np.zeros(40, np.int32)), text.machine.clocks)
    budget = text.decoder.budget
    budget.credit = 0.56
    budget.choose(text.drafters, 39)
    assert (budget.chosen, budget.shadow) == (0, None)


def test_what_is_learnt_is_kept_apart_by_sampling_and_returns_with_new_texts() -> None:
    budget = Budget(FLAT, BatchLoad(), Meter(lambda: 0.0), [0.5])
    machine = Machine()
    drafter = SimulatedDrafter(machine)
    rates = []
    for greedy in (True, False, True):
        finish(budget.open([drafter], 1, 0, greedy))
        rates.append(budget._kinds[greedy].rates[0])
        for _ in range(100):
            budget._score(0, hit=False)
    assert rates[0] == rates[1] == 0.5
    assert 0.02 < rates[2] < 0.2


@pytest.mark.parametrize(("lag", "tokens", "read"), [(7.0, 40, False), (0.2, 40, True), (5.0, 10_000, True)])
def test_a_prompt_is_read_where_it_costs_no_more_than_may_be_lost(lag: float, tokens: int, read: bool) -> None:
    text = Text(PassCost({1: 1.0, 32: 1.2}), [(0.1, lag)], [0.7])
    text.write([GOOD] * 20, tokens)
    assert (0 in text.used) == read


def test_what_costs_more_than_may_be_lost_is_not_tried() -> None:
    text = Text(FLAT, [(50.0,)], [0.99])
    text.write([Behaviour([50.0], accept=1)] * 100)
    assert set(text.used) == {None}


def test_where_drafting_does_not_pay_its_price_is_seldom_asked() -> None:
    text = Text(FLAT, [(50.0,)], [0.99])
    drafter, asked = text.drafters[0], 0
    price = drafter.price

    def counted(*given: int) -> float:
        nonlocal asked
        asked += 1
        return price(*given)

    drafter.price = counted  # type: ignore[method-assign]
    text.write([Behaviour([50.0], accept=1)] * 160)
    assert 160 / 8 <= asked <= 160 / 8 + 2


def test_a_text_that_is_interrupted_by_an_exception_goes_on() -> None:
    text = Text(FLAT, [(0.1,)], [0.5])
    verify = text._session.verify

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        text._session.verify = interrupted  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            text.write([GOOD])
        # What the interrupted step took was charged to nobody, so it must not be had again.
        text._session.verify = verify  # type: ignore[method-assign]
        finish(text.decoder.start(np.zeros(2, np.int32)), text.machine.clocks)
        assert text.decoder.budget.credit == LEAST
        text.write([GOOD] * 20)
        assert text.used == [0] * 20
        assert text.decoder.budget.credit > OPENING


def test_the_meter_stands_still_while_others_work_and_counts_a_share_of_a_draft_pass() -> None:
    machine = Machine()
    meter = Meter(machine.clocks.processor)
    request: Any = None
    spent = []
    for ask in (meter.draft, meter.target):
        begin, asking = meter(), ask(request)
        machine.work(1.0)
        next(asking)
        machine.work(50.0)
        with pytest.raises(StopIteration):
            asking.send(Done(None, 0.25, 8, 0, 3.0, 2.0))
        machine.work(0.125)
        spent.append(meter() - begin)
    assert spent == [1.125 + 0.25 * 2.0, 1.125]


def test_in_a_crowd_all_wait_for_what_one_drafts() -> None:
    batch = BatchLoad()
    budget = Budget(PassCost(FLAT.seconds), batch, Meter(lambda: 0.0), [0.5])
    drafter = SimulatedDrafter(Machine(), price=0.2)
    drafter.hit = None
    chosen = []
    for batch.sequences in (1, 8):
        finish(budget.open([drafter], 1, 0, True))
        budget.choose([drafter], 0)
        chosen.append(budget.chosen)
    assert chosen == [0, None]


def test_a_step_is_never_believed_to_be_faster_than_its_tokens_say() -> None:
    text = Text(rising([0.1] * 4), [(0.05,)], [0.5])
    finish(text.decoder.start(np.zeros(4, np.int32)), text.machine.clocks)
    for behaviour in (GOOD, BAD, replace(GOOD, interrupted=50.0)) * 20:
        text.drafters[0].behaviour = text._session.behaviour = behaviour
        step = finish(text.decoder.step(SamplingConfig(), 100), text.machine.clocks)
        assert 0 < step.speedup <= len(step.tokens)


def test_the_speedup_of_a_chain() -> None:
    def extra(num_rows: int) -> float:
        return 0.05 * (num_rows - 1)

    for rate, price in itertools.product((0.1, 0.5, 0.9), (0.0, 0.1, 2.0)):
        lengths = range(1, 9)
        best = max(sum(rate**i for i in range(n + 1)) / (1 + extra(n + 1) + n * price) for n in lengths)
        assert chain_speedup(rate, price, extra) == pytest.approx(best)
        # All guesses for the price of one.
        at_once = max(sum(rate**i for i in range(n + 1)) / (1 + extra(n + 1) + price) for n in lengths)
        assert chain_speedup(rate, price, extra, 8) == pytest.approx(at_once)
