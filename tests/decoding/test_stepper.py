"""Texts that share passes: every byte as alone, and nobody waits longer than was chosen."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.decoding import Text, step
from support.random_models import RandomModel, write

from pystaged._core import Model, RecycledCandidates, Session, kernels
from pystaged.bench.pairs import LyingDrafter, continuation
from pystaged.decoding.account import Meter
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import BatchLoad, FixedPolicy, GainPolicy, Growth, TreePolicy
from pystaged.decoding.requests import AnyRequest, Clocks, Read, Verify, make_pass
from pystaged.decoding.stepper import Stepper, best_rows
from pystaged.decoding.tree import Stage, TreeBuilder
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.features import feature_proposer
from pystaged.drafting.lookups import lookups
from pystaged.drafting.model import ModelProposer, ParallelModelProposer
from pystaged.drafting.proposer import Proposer
from pystaged.options.config import SamplingConfig

# Of random schedules; more by PYSTAGED_SCHEDULES.
SCHEDULES = int(os.environ.get("PYSTAGED_SCHEDULES", "30"))
MOST_TOKENS = 24
SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=1.0, top_k=40, seed=1),
    SamplingConfig(temperature=0.7, top_p=0.9, seed=2),
    SamplingConfig(temperature=1.3, seed=3),
]
# Some begin alike, some are longer than what a pass reads of them.
BEGINNING = (np.arange(70) * 7 % 50).astype(np.int32)
PROMPTS = [
    BEGINNING[:1],
    BEGINNING[:33],
    BEGINNING,
    np.concatenate([BEGINNING[:40], BEGINNING[::-1]]),
    np.tile(BEGINNING[:5], 60),
]
DRAFTERS = ["plain", "draft", "parallel draft", "draft and n-grams", "n-grams", "recycled", "lies", "by gain", "mtp"]


@dataclass(frozen=True)
class Arrival:
    """A text of a schedule. after: rounds after the one before it. cancelled_after: rounds of its own, or None. forks:
    whether it begins in a fork of the text before it."""

    after: int
    prompt: int
    sampling: int
    max_tokens: int
    drafter: str
    cancelled_after: int | None
    forks: bool


arrivals = st.builds(
    Arrival,
    after=st.integers(0, 6),
    prompt=st.integers(0, len(PROMPTS) - 1),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    max_tokens=st.integers(1, MOST_TOKENS),
    drafter=st.sampled_from(DRAFTERS),
    cancelled_after=st.none() | st.integers(0, 12),
    forks=st.booleans(),
)


class Alone:
    """Texts decoded plainly, each in a context of its own, on another instruction set."""

    def __init__(self, folder: Path) -> None:
        self.paths = [
            write(folder / f"{seed}.gguf", RandomModel("llama", quantization=type_, seed=seed, ahead=1))
            for seed, type_ in ((1, "Q8_0"), (2, "Q4_0"))
        ]
        self.models: dict[tuple[int, int], Model] = {}
        self.layers: dict[int, Model] = {}
        self.texts: dict[tuple[int, int], list[int]] = {}

    def model(self, which: int, num_threads: int) -> Model:
        key = which, num_threads
        if key not in self.models:
            model = self.models[key] = Model(self.paths[which], num_threads=num_threads)
            model.tap([model.num_layers], all_rows=True)  # which its MTP layer reads
        return self.models[key]

    def layer(self, num_threads: int) -> Model:
        """The first model's MTP layer."""
        if num_threads not in self.layers:
            target = self.model(0, num_threads)
            self.layers[num_threads] = Model(self.paths[0], num_threads=num_threads, target=target)
        return self.layers[num_threads]

    def text(self, prompt: int, sampling: int) -> list[int]:
        key = prompt, sampling
        if key not in self.texts:
            session = Session(Model(str(self.paths[0]), kernels()[0], 1), 512)
            self.texts[key] = continuation(Context(session), PROMPTS[prompt], SAMPLINGS[sampling], MOST_TOKENS)
        return self.texts[key]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("rounds"))


def decoder_of(
    kind: str,
    session: Session,
    draft: Model,
    cost: PassCost,
    memory: RecycledCandidates | None = None,
    layer: Model | None = None,
) -> Context:
    """A context with a way of drafting; `layer` is the target's MTP layer."""
    batch, meter, vocab = BatchLoad(), Meter(), session.vocab_size
    if kind in ("plain", "lies"):
        return Context(session, LyingDrafter(vocab) if kind == "lies" else None, batch=batch, meter=meter)
    by_gain = cost if kind == "by gain" else None  # one tree
    policy = GainPolicy(cost, batch=batch) if by_gain else FixedPolicy(width=3, depth=3, budget=10)
    has_lookups = kind not in ("draft", "parallel draft", "mtp")
    proposers: list[Proposer] = [*lookups(recycled=memory)] if has_lookups else []
    if kind in ("draft", "draft and n-grams", "by gain"):
        proposers.append(ModelProposer(Session(draft, 512), by_gain))
    elif kind == "parallel draft":
        proposers.append(ParallelModelProposer(Session(draft, 512), 299))
    elif kind == "mtp":
        assert layer
        proposers.append(feature_proposer(Session(layer, 512), layer, session))
    return Context(session, TreeDrafter(proposers, policy, vocab, meter=meter), cost=by_gain, batch=batch, meter=meter)


@pytest.mark.slow
@settings(max_examples=SCHEDULES)
@given(st.lists(arrivals, min_size=1, max_size=7), st.integers(1, 3), st.sampled_from([0.0, 0.002, 1.0]), st.booleans())
def test_every_text_of_a_batch_is_what_it_is_alone(
    alone: Alone, schedule: list[Arrival], num_threads: int, delay: float, trims: bool
) -> None:
    target, draft, layer = alone.model(0, num_threads), alone.model(1, num_threads), alone.layer(num_threads)
    cost = PassCost({1: 0.001, 8: 0.0015, 32: 0.004})
    stepper = Stepper(cost if trims else None, delay)
    live: list[Text] = []
    due = list(itertools.accumulate(arrival.after for arrival in schedule))
    before: Context | None = None
    memory = RecycledCandidates(slots=64)
    for number in itertools.count():
        while len(live) < len(schedule) and due[len(live)] <= number:
            arrival = schedule[len(live)]
            prompt = PROMPTS[arrival.prompt]
            session = (
                before.target.fork(len(before.target.tokens)) if before and arrival.forks else Session(target, 512)
            )
            before = decoder_of(arrival.drafter, session, draft, cost, memory, layer)
            live.append(Text(before, prompt, SAMPLINGS[arrival.sampling], arrival.max_tokens))
        for arrival, begin, text in zip(schedule, due, live, strict=False):
            if arrival.cancelled_after is not None and number >= begin + arrival.cancelled_after:
                text.end()
        if all(text.is_over for text in live) and len(live) == len(schedule):
            break
        step(stepper, live)
    assert [text.error for text in live] == [None] * len(schedule)
    for arrival, text in zip(schedule, live, strict=True):
        tokens = text.tokens
        expected = alone.text(arrival.prompt, arrival.sampling)[: arrival.max_tokens]
        if arrival.cancelled_after is None:
            assert tokens == expected
        assert tokens == expected[: len(tokens)]
        assert text.context.target.num_pending == 0
        text.context.close()


def test_a_text_that_fails_ends_alone(alone: Alone) -> None:
    class Failing(LyingDrafter):
        def advance(self, _: Sequence[int]) -> None:
            raise RuntimeError("mine")

    target = alone.model(0, 2)
    live = []
    for i in range(4):
        drafter = Failing(target.vocab_size) if i == 1 else LyingDrafter(target.vocab_size)
        prompt = PROMPTS[i].copy()
        if i == 2:
            prompt[-1] = 10**6  # no token: then the pass fails, and not its fault alone
        live.append(Text(Context(Session(target, 512), drafter), prompt, SAMPLINGS[i], MOST_TOKENS))
    stepper = Stepper(None)
    while not all(text.is_over for text in live):
        step(stepper, live)
    assert live[0].error is live[3].error is None
    assert str(live[1].error) == "mine"
    assert isinstance(live[2].error, ValueError)
    for i in (0, 3):
        assert live[i].tokens == alone.text(i, i)


@pytest.mark.parametrize("kind", ["plain", "draft"])
@pytest.mark.parametrize("failing", range(7, 15))
def test_a_pass_is_not_made_twice(alone: Alone, kind: str, failing: int) -> None:
    """Where memory is short for what came of it, its texts end."""
    passes = 0

    def make(requests: Sequence[AnyRequest]) -> list[Any]:
        nonlocal passes
        passes += len(requests) > 1
        found = make_pass(requests)
        if len(requests) > 1 and passes == failing:
            raise MemoryError("no memory")
        return found

    live = []
    for i in range(2):
        decoder = decoder_of(kind, Session(alone.model(0, 2), 512), alone.model(1, 2), PassCost({1: 1.0}))
        live.append(Text(decoder, PROMPTS[i], SAMPLINGS[i], MOST_TOKENS))
    stepper = Stepper(None, make=make)
    while not all(text.is_over for text in live):
        step(stepper, live)
    assert {str(text.error) for text in live} == {"no memory"}
    for i, text in enumerate(live):
        assert text.tokens == alone.text(i, i)[: len(text.tokens)] != []


def test_a_result_that_cannot_be_taken_ends_one_text(alone: Alone) -> None:
    def make(requests: Sequence[AnyRequest]) -> list[Any]:
        found = make_pass(requests)
        return [found[0], None] if len(requests) > 1 and isinstance(requests[0], Verify) else found

    live = []
    for i in range(2):
        decoder = decoder_of("plain", Session(alone.model(0, 2), 512), alone.model(1, 2), PassCost({1: 1.0}))
        live.append(Text(decoder, PROMPTS[i], SAMPLINGS[i], MOST_TOKENS))
    stepper = Stepper(None, make=make)
    while not all(text.is_over for text in live):
        step(stepper, live)
    assert (live[0].error, type(live[1].error)) == (None, TypeError)
    assert live[0].tokens == alone.text(0, 0)


def test_a_shared_pass_without_memory_is_made_for_each_text(alone: Alone) -> None:
    def make(requests: Sequence[AnyRequest]) -> list[Any]:
        if len(requests) > 1:
            raise MemoryError("too many rows")
        return make_pass(requests)

    live = []
    for i in range(2):
        decoder = decoder_of("plain", Session(alone.model(0, 2), 512), alone.model(1, 2), PassCost({1: 1.0}))
        live.append(Text(decoder, PROMPTS[i], SAMPLINGS[i], MOST_TOKENS))
    stepper = Stepper(None, make=make)
    while not all(text.is_over for text in live):
        step(stepper, live)
    assert [text.tokens for text in live] == [alone.text(i, i) for i in range(2)]


# ---- On a simulated machine ----


class Machine:
    """Makes passes that take what a curve says."""

    def __init__(self, curve: PassCost) -> None:
        self.curve, self.now, self.passes, self.ends = curve, 0.0, list[list[AnyRequest]](), list[float]()

    def make(self, requests: Sequence[Any]) -> list[Any]:
        self.now += self.curve(sum(request.num_rows for request in requests))
        self.passes.append(list(requests))
        self.ends.append(self.now)
        return [
            request.session.follow(len(request.tree) - 1) if isinstance(request, Verify) else None
            for request in requests
        ]

    def requests(self, text: Text, kind: type[AnyRequest]) -> list[tuple[float, AnyRequest]]:
        """Those of a text, each with when its pass ended."""
        return [
            (end, request)
            for end, requests in zip(self.ends, self.passes, strict=True)
            for request in requests
            if isinstance(request, kind) and request.session is text.context.target
        ]

    @property
    def clocks(self) -> Clocks:
        """It does nothing else."""
        return Clocks(lambda: self.now, lambda: self.now)


class SimulatedSession:
    """A session whose target accepts each node of a chain with some chance."""

    n_ctx, most_pending, weight_bytes = 10**6, 10**6, 1

    def __init__(self, machine: Machine, chance: float, random: Random) -> None:
        self.machine, self._chance, self._random = machine, chance, random
        self.tokens = np.zeros(0, np.int32)

    def rewind(self, length: int) -> int:
        return length

    def follow(self, nodes: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        accepted = 0
        while accepted < nodes and self._random.random() < self._chance:
            accepted += 1
        return np.arange(accepted + 1, dtype=np.int32), np.zeros(accepted + 1, np.int32)


class Guesser(TreeDrafter):
    """Proposes a chain of such scores, in a fifth of a millisecond."""

    def __init__(self, machine: Machine, scores: Sequence[float], policy: TreePolicy) -> None:
        super().__init__([Proposer()], policy, 300)
        self._machine, self._scores = machine, scores

    def price(self) -> float:
        return 0.0002

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> None:
        del sampling, max_depth, seconds
        self._machine.now += self.price()
        builder = TreeBuilder(0)
        for depth, score in enumerate(self._scores):
            builder.add(depth, 1, score, Stage.DRAFT)
        self.tree = builder.build(range(1, 1 + self._policy.keep(Growth(self._scores, [], 1, self.price()))))

    def advance(self, tokens: Sequence[int]) -> None:
        """It learns nothing."""


def simulated(machine: Machine, prompt: int, scores: Sequence[float] = ()) -> Text:
    """A text that reads so many tokens, and then verifies a tree with these scores for ever, of which none is right."""
    session: Any = SimulatedSession(machine, 0.0, Random(0))
    drafter = Guesser(machine, scores, FixedPolicy(1, len(scores), len(scores))) if scores else None
    context = Context(session, drafter, clocks=machine.clocks)
    return Text(context, np.zeros(prompt + 1, np.int32), SAMPLINGS[0], 10**6)


CURVE = PassCost({1: 0.060, 4: 0.066, 8: 0.080, 32: 0.320})


def test_a_long_prefill_budgets_nobody_for_longer_than_was_chosen() -> None:
    machine = Machine(CURVE)
    stepper = Stepper(CURVE, 0.25, make=machine.make, clocks=machine.clocks)
    texts = [simulated(machine, 5) for _ in range(4)]
    for _ in range(10):
        step(stepper, texts)
    newcomer = simulated(machine, 4000)
    while not newcomer.steps:
        step(stepper, [*texts, newcomer])
    for text in texts:
        ends = [end for end, _ in machine.requests(text, Verify)]
        assert len(ends) == len(text.steps)
        assert max(np.diff(ends[1:])) <= 0.25 + 1e-9
    # All the room that the delay leaves is used.
    assert len(machine.passes) < 10 + 1.2 * 4000 / 20


def test_prompts_share_the_rows_so_that_none_waits_for_ever() -> None:
    machine = Machine(CURVE)
    stepper = Stepper(CURVE, 0.25, make=machine.make, clocks=machine.clocks)
    reader = simulated(machine, 1)
    step(stepper, [reader])
    long, short, middle = (simulated(machine, n) for n in (2000, 30, 200))
    texts = [reader, long, short, middle]
    while not middle.steps:
        step(stepper, texts)
    assert 0 < machine.requests(short, Verify)[0][0] < machine.requests(middle, Verify)[0][0]
    assert not long.steps
    assert sum(request.num_rows for _, request in machine.requests(long, Read)) >= 200
    while not long.steps:
        step(stepper, texts)
    # Prompts by themselves fill a pass.
    step(stepper, [simulated(machine, 1000)])
    assert machine.passes[-1][0].num_rows == 256


def test_guesses_fade_as_texts_come() -> None:
    shares = []
    for count in (1, 2, 4, 8, 16):
        machine = Machine(CURVE)
        stepper = Stepper(CURVE, make=machine.make, clocks=machine.clocks)
        texts = [simulated(machine, 1, (0.9, 0.6, 0.5, 0.3, 0.1)) for _ in range(count)]
        for _ in range(3):
            step(stepper, texts)
        rows = sum(request.num_rows for request in machine.passes[-1])
        shares.append((rows - count) / count)
        assert {text.context.batch.texts for text in texts} == {count}
    # One text is not trimmed here: its own policy has chosen already.
    assert shares[0] == 5
    assert shares[1:] == sorted(shares[1:], reverse=True)
    assert shares[1] > 1 > shares[-1]


def test_texts_on_rpc_servers_share_no_pass() -> None:
    machine = Machine(CURVE)
    stepper = Stepper(CURVE, make=machine.make, clocks=machine.clocks)
    texts = [simulated(machine, 1, (0.9, 0.6, 0.5, 0.3, 0.1)) for _ in range(8)]
    for text in texts:
        text.context.target.run = None  # only such a session has it
    for _ in range(3):
        step(stepper, texts)
    assert [[request.num_rows for request in requests] for requests in machine.passes[-8:]] == [[6]] * 8
    assert {text.context.batch.texts for text in texts} == {1}
    texts[0].context.target.kept_state_bytes = 0
    assert ModelProposer(texts[0].context.target, CURVE).price(1, 8) == CURVE(1)


@given(
    st.lists(
        st.lists(st.floats(0, 1), max_size=4).map(lambda s: [1.0, *sorted(s, reverse=True)]), min_size=1, max_size=4
    ),
    st.floats(0, 0.1),
    st.floats(0.001, 0.05),
)
def test_the_best_rows_are_verified(trees: list[list[float]], spent: float, slope: float) -> None:
    def cost(rows: int) -> float:
        return 0.03 + slope * rows

    def rate(rows: Sequence[int]) -> float:
        tokens = sum(sum(scores[:n]) for scores, n in zip(trees, rows, strict=True))
        return tokens / (spent + cost(sum(rows)))

    found = best_rows(trees, cost, spent)
    every = itertools.product(*(range(1, len(scores) + 1) for scores in trees))
    assert rate(found) == pytest.approx(max(map(rate, every)))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_drafting_in_a_crowd_gains_where_it_can_and_loses_next_to_nothing(count: int) -> None:
    def rate(curve: PassCost, chance: float, believed: float, drafts: bool) -> float:
        """Tokens per second of all texts."""
        machine, random = Machine(curve), Random(0)
        stepper = Stepper(PassCost(curve.seconds), make=machine.make, clocks=machine.clocks)
        live = []
        for _ in range(count):
            cost, batch = PassCost(curve.seconds), BatchLoad()
            session: Any = SimulatedSession(machine, chance, random)
            scores = [believed**depth for depth in range(1, 7)]
            drafter = Guesser(machine, scores, GainPolicy(cost, batch=batch)) if drafts else None
            decoder = Context(session, drafter, cost=cost, batch=batch, clocks=machine.clocks)
            live.append(Text(decoder, np.zeros(3, np.int32), SAMPLINGS[0], 10**6))
        for _ in range(500):
            step(stepper, live)
        assert not any(text.error for text in live)
        return sum(len(text.tokens) for text in live) / machine.now

    # Rows are nearly free, dear, and as dear as passes of their own.
    for slope, gains in ((0.003, 1.25), (0.008, 0.985), (0.06, 0.985)):
        curve = PassCost({1: 0.06, 32: 0.06 + 31 * slope})
        for chance, believed in ((0.0, 0.0), (0.0, 0.8), (0.9, 0.9)):
            ratio = rate(curve, chance, believed, True) / rate(curve, chance, believed, False)
            assert ratio > 0.985
            if chance and count <= 8:
                assert ratio > gains
