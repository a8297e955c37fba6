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
from support.decoding import text_of

from pystaged.decoding.account import LEAST, LEAST_SECONDS, MOST, OPENING, PROMPT, SHARE, Account, Meter
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import BatchLoad
from pystaged.decoding.requests import Clocks, Read, Verify, fulfil
from pystaged.decoding.text import Phase
from pystaged.decoding.tree import Stage, TreeBuilder
from pystaged.options.config import SamplingConfig
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

    passes: seconds of each pass of the drafter. accept: nodes that come true. interrupted: seconds that other programs
    take in the step. telling: seconds of being told. obeys: whether the drafter minds its deadline.
    """

    passes: Sequence[float]
    accept: int = 0
    interrupted: float = 0.0
    telling: float = 0.0
    obeys: bool = True


class SimulatedDrafter:
    """A chain, a pass for each node.

    took: seconds of its last draft; late: most of them by which a pass exceeded its price.
    """

    recycled = None

    def __init__(self, machine: Machine, price: float = 0.1, lag: float = 0.0, true_lag: float | None = None) -> None:
        self._machine, self._price = machine, price
        self._lag, self._true_lag = lag, lag if true_lag is None else true_lag
        self.behaviour = Behaviour([])
        self.took = self.late = 0.0
        self.drafted = 0  # nodes
        self._behind = False

    def work(self) -> dict[str, DrafterStats]:
        return {}

    def end(self) -> None:
        """It keeps nothing."""

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        return len(prompt)

    def watch(self, prompt: NDArray[np.int32], first: int, last: int) -> None:
        del prompt, first, last

    def start(self, context: NDArray[np.int32], **options: Any) -> None:
        del context, options
        self._behind, self.took, self.late, self.drafted = True, 0.0, 0.0, 0

    def lag(self) -> float:
        return self._lag if self._behind else 0.0

    def price(self) -> float:
        return self._price

    def catch_up(self, seconds: float = math.inf) -> None:
        if self.lag() <= seconds:
            self._machine.work(self._true_lag)
            self.late = self._true_lag - self._lag
            self._behind = False

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> None:
        del sampling
        begin, builder = self._machine.processor, TreeBuilder(0)
        for i, took in enumerate(self.behaviour.passes[:max_depth]):
            price = self.lag() + self._price
            if i and self.behaviour.obeys and self._machine.processor - begin + price > seconds:
                break
            whole = took + (self._true_lag if self._behind else 0.0)
            self._machine.work(whole, self.behaviour.interrupted)
            self.late, self._behind = max(self.late, whole - price), False
            builder.add(i, 1, 0.5, Stage.DRAFT)
        self.took = self._machine.processor - begin
        self.late = self.late if self.behaviour.obeys else self.took
        self.drafted = len(builder.nodes) - 1
        self.tree = builder.build(range(1, len(builder.nodes)))

    def request(self) -> None:
        """It needs no passes."""

    def advance(self, tokens: Sequence[int]) -> None:
        del tokens
        if self.drafted:
            self._machine.work(self.behaviour.telling)
        self.drafted = 0


class SimulatedSession:
    """Accepts as many nodes of a chain as it is told, in the time that the costs say."""

    n_ctx, most_pending, on_device, weight_bytes = 10**6, 10**6, False, 1

    def __init__(self, machine: Machine, cost: PassCost, others: int) -> None:
        self._machine, self._cost, self._others = machine, cost, others  # rows of the other sequences in each pass
        self.behaviour = Behaviour([])
        self.tokens = np.zeros(0, np.int32)
        self.past = 0

    def rewind(self, length: int) -> int:
        self.past = length
        return length

    def run(self, kind: str, tokens: NDArray[np.int32], *_: object) -> object:
        return self._verify(tokens) if kind == "verify" else self._read(tokens)

    def _read(self, tokens: NDArray[np.int32]) -> None:
        self.past += len(tokens)
        self._machine.work(self._cost(32) / 32 * len(tokens))

    def _verify(self, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        self._machine.work(self._cost(self._others + len(tokens), self.past), self.behaviour.interrupted)
        path = np.arange(min(self.behaviour.accept, len(tokens) - 1) + 1, dtype=np.int32)
        self.past += len(path)
        return path, np.zeros(len(path), np.int32)


class Text:
    """Texts on a simulated machine, and how far each falls behind plain decoding, worked out apart from the account.

    Args:
        cost: seconds of a pass, in truth and as believed.
        drafter: its price, lag, and true lag.
        sequences: of the batch; the others decode plainly, and wait while this one drafts.
    """

    def __init__(self, cost: PassCost, *drafter: float, sequences: int = 1) -> None:
        self.machine, self._cost, self._sequences = Machine(), cost, sequences
        self.drafter = SimulatedDrafter(self.machine, *drafter)
        self.session = SimulatedSession(self.machine, cost, sequences - 1)
        parts: Any = self.session, self.drafter
        batch = BatchLoad(sequences, sequences - 1)
        self.decoder = Context(*parts, cost=copy.deepcopy(cost), batch=batch, clocks=self.machine.clocks)
        self.used: list[bool] = []  # whether each step of the last text drafted
        self.lost = self.tokens = 0.0  # of the last text, in tokens of plain decoding
        self._lost = self._bound = 0.0  # of the texts before

    def start(self, prompt_tokens: int = 40, speculate: bool = True) -> None:
        self.text = text_of(np.zeros(prompt_tokens, np.int32), None, 10**9, speculate=speculate)
        self.text.begin(self.decoder)
        while self.text._phase is not Phase.STEP:
            if request := (self.text._drafter and self.text._drafter.request()) or self.text._go_on():
                self._pass(request)

    def step(self, behaviour: Behaviour) -> int:
        """Returns the number of tokens."""
        self.session.behaviour = self.drafter.behaviour = behaviour
        before = len(self.text.tokens)
        self.text.ask()
        self._pass(self.text.request)
        if self.text.error is not None:
            raise self.text.error
        return len(self.text.tokens) - before

    def _pass(self, request: Any) -> None:
        """Make a pass, which the target shares with the other sequences."""
        if isinstance(request, Read):
            request.num_rows = len(request.tokens)
        fulfil([request], self.machine.clocks)
        rows = request.num_rows + self._sequences - 1
        request.share, request.pass_rows = request.num_rows / rows, rows
        self.text.request = request
        self.text.take()

    def write(self, behaviours: Iterable[Behaviour], prompt_tokens: int = 40, speculate: bool = True) -> None:
        """Write a text, a step for each behaviour, and check the bound after every one."""
        machine, cost, drafter, texts = self.machine, self._cost, self.drafter, self._sequences
        begin = machine.processor
        self.start(prompt_tokens, speculate)
        token = cost(texts, self.session.past) / texts
        reading = cost(32) / 32
        self.lost = (machine.processor - begin - reading * (prompt_tokens - 1)) / token
        overdrawn = drafter.late / token
        prompt = PROMPT * cost(32, prompt_tokens // 2) / 32 * prompt_tokens / token
        least = max(LEAST if self._bound else OPENING, LEAST_SECONDS / cost(1))
        self.tokens, self.used = 0.0, []
        for behaviour in behaviours:
            drafter.took = drafter.late = 0.0
            begin, plain = machine.processor, cost(texts, self.session.past)
            count = self.step(behaviour)
            token = plain / texts
            self.used.append(drafter.took > 0)
            self.tokens += count
            self.lost += (machine.processor - begin - plain) / token - (count - 1)
            overdrawn = max(overdrawn, (drafter.late + behaviour.telling) / token)
            bound = SHARE * self.tokens + prompt + overdrawn + 1e-6 * (1 + abs(self._lost + self.lost))
            assert self.lost <= (MOST if self._bound else least) + bound
            assert self._lost + self.lost <= self._bound + least + bound
        self._lost, self._bound = self._lost + self.lost, self._bound + least + bound


FLAT = PassCost({1: 1.0, 32: 1.0})
GOOD, BAD = Behaviour([0.1] * 3, accept=3), Behaviour([0.1] * 3)
SECONDS = st.floats(0.0, 6.0)
RISES = st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4)


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
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("sequences", [1, 5])
@given(RISES, st.floats(0.0, 5.0), st.tuples(SECONDS, st.floats(0.0, 3.0), SECONDS), behaviours)
@settings(max_examples=30)
def test_no_text_falls_further_behind_than_the_bound_whatever_happens(
    sequences: int,
    rises: list[float],
    slope: float,
    drafter: tuple[float, float, float],
    steps: list[Behaviour],
) -> None:
    text = Text(rising(rises, slope), *drafter, sequences=sequences)
    for prompt_tokens, speculate in ((40, True), (2000, True), (40, False), (40, True)):
        text.write(itertools.islice(itertools.cycle(steps), 50), prompt_tokens, speculate)


def test_a_drafter_that_is_always_wrong_or_always_late_is_given_up() -> None:
    for passes in ([0.3, 0.3], [1.5]):
        text = Text(FLAT, 0.3)
        for i in range(4):
            text.write([Behaviour(passes)] * 96)
            assert text.lost <= (LEAST if i else OPENING) + SHARE * 96 + 0.6 + 1.2
            assert text.used[0]
            assert sum(text.used[-50:]) <= 2


@pytest.mark.parametrize("price", [0.02, 0.05, 0.1])
def test_a_text_that_was_unlucky_for_twenty_steps_drafts_again(price: float) -> None:
    text = Text(rising([0.05, 0.15, 0.3, 0.6]), price, 0.02)
    text.write([Behaviour([price] * 3)] * 20 + [Behaviour([price] * 3, accept=3)] * 200)
    assert sum(text.used[20:84]) > 0
    assert text.used[120:].count(False) < 25


def test_a_hiccup_does_not_end_the_drafting_of_a_tiny_target() -> None:
    """Its token takes less than a scheduling delay, which the credit of a later text covers nevertheless."""
    text = Text(PassCost({1: 9e-4, 32: 9e-4}), 9e-5)
    hiccup = Behaviour([1e-3])
    text.write([hiccup] + [Behaviour([9e-5] * 3)] * 300)
    assert not text.used[-1]
    text.write([hiccup] + [Behaviour([9e-5] * 3, accept=2)] * 60)
    assert text.used == [True] * 61


def test_what_other_programs_take_of_the_machine_is_charged_to_nobody() -> None:
    """The same with and without interruptions, each of which takes as long as a hundred passes."""
    runs = []
    for interrupted in (0.0, 100.0):
        text = Text(FLAT)
        chance = random.Random(0)
        text.write(
            Behaviour([0.1] * 3, accept=chance.choice((0, 0, 3)), interrupted=chance.choice((0.0, interrupted)))
            for _ in range(200)
        )
        runs.append((text.used, text.lost))
    assert runs[0] == runs[1]
    assert all(runs[0][0])


@pytest.mark.parametrize(("lag", "tokens", "read"), [(7.0, 40, False), (0.2, 40, True), (5.0, 10_000, True)])
def test_a_prompt_is_read_where_it_costs_no_more_than_may_be_lost(lag: float, tokens: int, read: bool) -> None:
    text = Text(PassCost({1: 1.0, 32: 1.2}), 0.1, lag)
    text.start(tokens)
    assert (text.drafter.lag() == 0) == read
    text.write([GOOD] * 20, tokens)
    assert any(text.used) == read


def test_what_costs_more_than_may_be_lost_is_not_tried() -> None:
    text = Text(FLAT, 50.0)
    text.write([Behaviour([50.0], accept=1)] * 100)
    assert not any(text.used)


@pytest.mark.parametrize("fails", ["prefill", "step", "plain step"])
def test_credit_is_kept_for_the_next_text_and_lost_by_what_is_interrupted(fails: str) -> None:
    """The time of an interrupted prefill or draft is not charged, so that it must not be had again."""
    text = Text(FLAT, 0.1)
    account = text.decoder.account
    text.write([GOOD] * 20)
    text.start()
    assert account.credit == MOST

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    text.drafter._price = 50.0 if fails == "plain step" else 0.1
    where, name = (text.drafter, "catch_up") if fails == "prefill" else (text.session, "run")
    act = text.start if fails == "prefill" else lambda: text.step(GOOD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            act()
    text.start()
    assert account.credit == (MOST if fails == "plain step" else LEAST)


def test_a_tree_is_cut_to_what_the_credit_covers_but_not_its_forced_tokens_and_first_guess() -> None:
    builder = TreeBuilder(0)
    for i, stage in enumerate([Stage.GRAMMAR] * 2 + [Stage.DRAFT] * 5):
        builder.add(i, 1, 0.5, stage)
    tree = builder.build(range(1, 8))
    machine = Machine()
    account = Account(PassCost({1: 1.0, 2: 1.5}), BatchLoad(), Meter(machine.clocks.processor))
    drafter: Any = SimulatedDrafter(machine)
    for credit, seconds, kept in ((MOST, 0.1, 8), (1.1, 0.1, 5), (0.6, 0.1, 4), (0.6, 3.0, 4)):
        account.credit = credit
        assert account.begin(drafter, 0) == pytest.approx(credit - 0.5)
        machine.work(seconds)
        assert len(account.trim(tree)) == kept
    # Two forced tokens are no gain of the drafter's, and their rows no cost.
    session: Any = None
    verified = Verify(session, 0, tree.head(4), SamplingConfig().native)
    verified.result, verified.pass_rows, verified.processor_seconds = ([0, 1, 2], [1, 1, 1], None, ()), 4, 2.5
    account.record(verified, 0.25, 2)
    assert account.credit == pytest.approx(0.6 - 3.0 - 0.25 - 0.5 + SHARE)


def test_the_meter_stands_still_while_others_work_and_counts_a_share_of_a_draft_pass() -> None:
    machine = Machine()
    meter = Meter(machine.clocks.processor)
    session: Any = None
    request = Verify(session, 0, TreeBuilder(1).build(), SamplingConfig().native)
    request.share, request.processor_seconds = 0.25, 2.0
    spent = []
    for draft in (request, None):
        begin = meter()
        machine.work(1.0)
        meter.stop()
        machine.work(50.0)
        meter.go_on(draft)
        machine.work(0.125)
        spent.append(meter() - begin)
    assert spent == [1.125 + 0.25 * 2.0, 1.125]


def test_in_a_crowd_all_wait_for_what_one_drafts() -> None:
    """A draft that takes 0.6 of a plain pass costs a text alone 0.6 tokens, and one of eight 4.8."""
    for sequences in (1, 8):
        text = Text(FLAT, 0.6, sequences=sequences)
        text.write([Behaviour([0.6])])
        assert text.used == [sequences == 1]


def test_the_speedup_is_that_of_the_tokens_and_seconds_of_a_step() -> None:
    text = Text(rising([0.1] * 4), 0.05)
    text.start(4)
    for behaviour in (GOOD, BAD, replace(GOOD, interrupted=50.0), replace(GOOD, telling=0.2, passes=[2.0])) * 20:
        begin, past = text.machine.processor, text.session.past
        before = replace(text.text.stats)
        plain, stats = text.step(behaviour) * text._cost(1, past), text.text.stats
        speedup = (stats.plain_seconds - before.plain_seconds) / (stats.decode_seconds - before.decode_seconds)
        assert speedup == pytest.approx(plain / (text.machine.processor - begin), rel=0.02)
