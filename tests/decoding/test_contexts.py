"""Which context a text gets, what that holds, and how much memory all take: first with simulated sessions."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.decoding import drafted
from support.plain import plain_tokens
from support.random_models import RandomModel, write
from support.scheduling import held, wait_until

import pystaged
import pystaged.drafting.lookups
from pystaged import DeviceError, Engine, FixedPolicy, SamplingConfig, _core
from pystaged.decoding.context import SPARE_CELLS, Context, ContextPool, Wait
from pystaged.decoding.cost import PassCost
from pystaged.loading.costs import Costs

TEXTS = int(os.environ.get("PYSTAGED_TEST_TEXTS", "2000"))  # of the test of memory

# ---- Simulated ----

CELL, DRAFT_CELL, N_CTX, DRAFT_N_CTX = 10, 3, 200, 150  # bytes and positions
FULL = CELL * (SPARE_CELLS + N_CTX) + DRAFT_CELL * (SPARE_CELLS + DRAFT_N_CTX)


def room(*texts: int) -> int:
    """Bytes for texts of so many tokens."""
    return sum((SPARE_CELLS + tokens) * (CELL + DRAFT_CELL) for tokens in texts)


class SimulatedSession:
    """Holds tokens, and takes the memory of as many cells."""

    windowed_cell_bytes = most_windowed = state_bytes = kept_state_bytes = 0

    def __init__(self, cell_bytes: int, n_ctx: int, tokens: Sequence[int] = ()) -> None:
        self.cell_bytes, self.n_ctx = cell_bytes, n_ctx
        self.tokens = np.array(tokens, np.int32)
        self.closed = self.forked = False

    def reachable(self, length: int) -> int:
        assert length <= len(self.tokens)
        return length

    @property
    def num_bytes(self) -> int:
        return self.cell_bytes * len(self.tokens)

    def rewind(self, length: int) -> int:
        assert not self.closed
        assert length <= len(self.tokens)
        self.tokens = self.tokens[: self.reachable(length)]
        return len(self.tokens)

    def fork(self, length: int) -> SimulatedSession:
        assert not self.closed
        assert length <= len(self.tokens)
        fork = type(self)(self.cell_bytes, self.n_ctx, self.tokens[: self.reachable(length)].tolist())
        fork.forked = True
        return fork

    def close(self) -> None:
        self.closed = True
        self.tokens = self.tokens[:0]


class WindowedSession(SimulatedSession):
    """Keeps but the last tokens in most of its layers, which have to see some of them."""

    most_windowed, _seen = 40, 25

    def __init__(self, cell_bytes: int, n_ctx: int, tokens: Sequence[int] = (), first: int = 0) -> None:
        super().__init__(cell_bytes, n_ctx, tokens)
        self.windowed_cell_bytes = cell_bytes * 2 // 3
        self._first, self._length = first, len(tokens)

    @property
    def first(self) -> int:
        """The first token that they keep."""
        if len(self.tokens) < self._length:
            self._first = 0  # it was read anew
        self._length = len(self.tokens)
        self._first = max(self._first, self._length - self.most_windowed)
        return self._first

    def reachable(self, length: int) -> int:
        return super().reachable(length) if self.first == 0 or length - self.first >= self._seen else 0

    @property
    def num_bytes(self) -> int:
        return super().num_bytes - self.windowed_cell_bytes * self.first

    def rewind(self, length: int) -> int:
        first, reached = self.first, super().rewind(length)
        self._first, self._length = first if reached else 0, reached
        return reached

    def fork(self, length: int) -> SimulatedSession:
        fork = super().fork(length)
        assert isinstance(fork, WindowedSession)
        fork._first = self.first if len(fork.tokens) else 0
        return fork


class RecurrentSession(SimulatedSession):
    """Takes memory of a fixed size besides, of which some is there as soon as it holds any token, and goes back to
    every 16th."""

    state_bytes, kept_state_bytes = 500, 100

    def keep_states(self, lengths: Sequence[int], most: int, anchor: int = -1) -> None:
        self.kept = sorted(lengths), most, anchor

    def reachable(self, length: int) -> int:
        return super().reachable(length) if length == len(self.tokens) else length // 16 * 16

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (min(500, 100 + 25 * (len(self.tokens) // 16)) if len(self.tokens) else 0)


class SimulatedDrafter:
    """A draft, of which the pool asks only for its session."""

    def __init__(self, session: SimulatedSession) -> None:
        self._session = session

    def sessions(self) -> list[SimulatedSession]:
        return [self._session]


class Simulation:
    """A pool of simulated contexts, and the texts that have them."""

    def __init__(
        self,
        memory: int | None = None,
        *,
        room: float = float("inf"),
        session: type[SimulatedSession] = SimulatedSession,
        **options: Any,
    ) -> None:
        self._session = session
        self.made: list[Context] = []
        self.sources: list[tuple[Context | None, int]] = []
        self._room = room  # contexts that there may be
        self.pool = ContextPool(self._make, memory, **options)

    def _make(self, source: Context | None, length: int) -> Context:
        self.made = [context for context in self.made if not context.target.closed]
        if len(self.made) >= self._room:
            raise DeviceError("no room on the device")
        self.sources.append((source, length))
        if source and length:
            target, draft = (session.fork(min(length, len(session.tokens))) for session in source.sessions)
        else:
            target, draft = (
                cast(_core.Session, self._session(*shape)) for shape in ((CELL, N_CTX), (DRAFT_CELL, DRAFT_N_CTX))
            )
        context = Context(target, cast(Any, SimulatedDrafter(cast(Any, draft))))
        self.made.append(context)
        return context

    def tried(self, prompt: Sequence[int], max_tokens: int = 10, *, must: bool = False) -> Context | None:
        """A context, None where the text has to wait for one."""
        taken = self.pool.take(np.array(prompt, np.int32), max_tokens, most_reused=len(prompt) - 1, must=must)
        return None if isinstance(taken, Wait) else taken

    def take(self, prompt: Sequence[int], max_tokens: int = 10, *, must: bool = False) -> Context:
        """A context, which is there."""
        context = self.tried(prompt, max_tokens, must=must)
        assert context is not None
        return context

    def begin(self, prompt: Sequence[int], max_tokens: int = 10) -> Context:
        """Take a context and bring it to a prompt; the draft only in part."""
        return self.brought(self.take(prompt, max_tokens), prompt)

    def brought(self, context: Context, prompt: Sequence[int]) -> Context:
        reused = len(context.target.tokens)
        assert context.target.tokens.tolist() == list(prompt[:reused])
        assert reused < len(prompt)
        self.fill(context, prompt[:-1])
        return context

    def fill(self, context: Context, tokens: Sequence[int], drafted: float = 1.0) -> None:
        for session, length in zip(context.sessions, (len(tokens), int(drafted * len(tokens))), strict=True):
            cast(Any, session).tokens = np.array(tokens[: min(length, session.n_ctx)], np.int32)

    def run(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> int:
        """A whole text; returns how many tokens of its prompt it did not have to read."""
        context = self.take(prompt, len(answer) + 1)
        reused = len(context.target.tokens)
        self.fill(context, [*prompt, *answer][: context.target.n_ctx])
        self.pool.give_back(context)
        return reused

    @property
    def at_rest(self) -> list[list[int]]:
        """What the contexts at rest hold, the least recently used first."""
        return [context.target.tokens.tolist() for context in self.pool._idle]

    @property
    def num_bytes(self) -> int:
        """That all contexts really take."""
        return sum(
            session.cell_bytes * SPARE_CELLS + session.num_bytes
            for context in self.made
            for session in context.sessions
            if not session.closed
        )


SYSTEM = list(range(100))


def test_a_context_that_survives_is_taken_and_another_one_forked() -> None:
    texts = Simulation(10**6)
    assert texts.run([*SYSTEM, 1, 2, 3], [4, 5]) == 0
    conversation = texts.made[-1]
    assert len(texts.made) == 1  # the first context, which held nothing
    # The next turn, whose first tokens are written otherwise than the model wrote them.
    assert texts.run([*SYSTEM, 1, 2, 3, 4, 6, 7], list(range(40))) == 104
    assert texts.at_rest == [[*SYSTEM, 1, 2, 3, 4, 6, 7, *range(40)]]
    assert texts.made == [conversation]
    # A stranger.
    assert texts.run([*SYSTEM, 9, 9]) == 100
    assert texts.sources[-1] == (conversation, 100)
    assert texts.at_rest == [[*SYSTEM, 1, 2, 3, 4, 6, 7, *range(40)], [*SYSTEM, 9, 9]]


def test_what_begins_another_one_does_not_rest() -> None:
    texts = Simulation(10**6)
    for _ in range(5):
        texts.run(SYSTEM, list(range(50)))
    assert texts.at_rest == [[*SYSTEM, *range(50)]]
    texts.run([*SYSTEM, 7], list(range(50)))
    assert texts.at_rest == [[*SYSTEM, *range(50)], [*SYSTEM, 7, *range(50)]]
    assert sum(not context.target.closed for context in texts.made) == 2


def test_a_text_that_runs_is_forked() -> None:
    texts = Simulation(10**6)
    first = texts.begin([*SYSTEM, 1])
    texts.begin([*SYSTEM, 2])
    assert texts.sources[-1] == (first, 100)
    assert first.target.tokens.tolist() == SYSTEM
    # One at rest that is as long is preferred: its text cannot need it any more.
    texts.pool.give_back(first)
    assert texts.begin([*SYSTEM, 3]) is first


def test_what_another_text_is_just_reading_is_waited_for() -> None:
    texts = Simulation(10**6)
    first = texts.take([*SYSTEM, 1])
    assert texts.tried([*SYSTEM, 2]) is None
    texts.take([7] * 90)
    texts.take([*SYSTEM[:50], 2])  # that little is read sooner
    texts.fill(first, SYSTEM[:36])
    assert texts.tried([*SYSTEM, 2]) is None
    texts.take([*SYSTEM, 2], must=True)
    texts.fill(first, SYSTEM[:37])
    second = texts.take([*SYSTEM, 3])
    assert second.target.tokens.tolist() == SYSTEM[:37]
    # Nobody will read it any more.
    texts = Simulation(10**6)
    texts.pool.give_back(texts.take([*SYSTEM, 1]))
    texts.take([*SYSTEM, 2])


@pytest.mark.parametrize("drafted", [0.5, 1.0])
def test_a_draft_is_forked_as_far_as_it_has_read(drafted: float) -> None:
    texts = Simulation(10**6)
    first = texts.begin([*SYSTEM, 1])
    texts.fill(first, SYSTEM, drafted)
    second = texts.take([*SYSTEM[:80], 3], 1)
    assert [len(session.tokens) for session in second.sessions] == [80, min(80, 100 * drafted)]


def test_a_text_that_does_not_fit_waits() -> None:
    texts = Simulation(room(60, 70, 20))
    texts.begin([1] * 50)
    second = texts.begin([2] * 60)
    assert texts.pool.num_bytes == room(60, 70)
    assert texts.tried([3] * 30) is None
    texts.begin([3] * 10)
    texts.pool.give_back(second)
    texts.begin([3] * 30)
    # Alone, any text has room.
    small = Simulation(room(10))
    only = small.begin([1] * 150)
    assert small.tried([2]) is None
    small.pool.give_back(only)
    small.begin([2], 1)
    assert small.num_bytes <= room(10)


def test_the_least_recently_used_makes_room_first() -> None:
    texts = Simulation(room(50, 50, 50, 10) - 13 * CELL)
    for first in (1000, 2000, 3000):
        texts.run(list(range(first, first + 50)))
    texts.run(list(range(1000, 1050)))  # is used again
    assert [tokens[0] for tokens in texts.at_rest] == [2000, 3000, 1000]
    # Its end goes first; the target's cells alone make the room, so some of the draft's are spare then.
    context = texts.begin(list(range(4000, 4005)), 5)
    assert [(tokens[0], len(tokens)) for tokens in texts.at_rest] == [(2000, 37), (3000, 50), (1000, 50)]
    # What would be too short to be worth anything goes altogether, and the four tokens are another text's.
    texts.pool.give_back(context)
    texts.run(list(range(5000, 5030)))
    assert [tokens[0] for tokens in texts.at_rest] == [3000, 1000, 5000]


def test_how_many_rest() -> None:
    texts = Simulation(10**9)
    for i in range(100):
        texts.run([i, *range(40)])
    assert [tokens[0] for tokens in texts.at_rest] == list(range(36, 100))


def test_what_an_end_was_cut_from_may_begin_another_one() -> None:
    texts = Simulation(room(160, 160))
    texts.run([*SYSTEM, 1], list(range(59)))
    texts.run([*SYSTEM, 2], list(range(59)))
    texts.begin(list(range(1000, 1060)), 1)
    assert texts.at_rest == [[*SYSTEM, 2, *range(59)]]


def test_the_source_is_taken_itself_where_a_copy_has_no_room() -> None:
    texts = Simulation(room(131, 61))
    texts.run(SYSTEM, list(range(30)))
    texts.run(list(range(1000, 1060)))
    assert texts.run([*SYSTEM, 1, 2], list(range(40))) == 100
    assert texts.at_rest == [[*SYSTEM, 1, 2, *range(40)]]
    assert texts.sources[-1][1] == 0


def test_a_device_may_have_less_room_than_the_bound() -> None:
    texts = Simulation(10**6, room=2)
    texts.run([1] * 50)
    texts.run([2] * 50)
    assert texts.run([3] * 50) == 0
    assert texts.at_rest == [[3] * 50]
    texts.begin([4] * 50)
    texts.begin([5] * 50)
    assert texts.tried([6] * 50) is None


def test_the_default_bound() -> None:
    assert Simulation(free=100 * FULL).pool.memory == 25 * FULL
    assert Simulation(free=FULL).pool.memory == FULL
    assert Simulation(7, free=FULL).pool.memory == 7


def test_a_closed_pool() -> None:
    texts = Simulation(10**6)
    texts.run(SYSTEM)
    live = texts.begin([1, 2, 3])
    texts.pool.close()
    assert texts.pool.closed
    assert [context for context in texts.made if not context.target.closed] == [live]
    texts.pool.give_back(live)
    assert texts.pool.num_bytes == 0
    with pytest.raises(ValueError, match="the engine is closed"):
        texts.begin([1])


def test_what_is_lost_does_not_rest() -> None:
    class Lost(SimulatedSession):
        @property
        def tokens(self) -> NDArray[np.int32]:
            raise DeviceError("lost")

        @tokens.setter
        def tokens(self, _: object) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    texts = Simulation(10**6)
    context, other = texts.begin([1] * 50), texts.begin([2] * 50)
    context.target = cast(Any, Lost(CELL, N_CTX))
    texts.pool.give_back(context)
    assert texts.at_rest == []
    assert context.target.closed
    other.target = cast(Any, Lost(CELL, N_CTX))
    texts.begin([2] * 50)  # it cannot be looked into, and harms nobody
    for lent in list(texts.pool._lent):
        texts.pool.give_back(lent)
    texts.pool.forget()
    assert texts.pool.num_bytes == 0


prompts = st.builds(
    lambda system, person, length, turns: [system] * length + [10 + person] * turns,
    st.integers(0, 2),
    st.integers(0, 5),
    st.integers(1, 120),
    st.integers(0, 60),
)


@given(
    memory=st.integers(200, 20_000),
    events=st.lists(
        st.one_of(st.tuples(prompts, st.integers(1, 60), st.floats(0, 1)), st.integers(0, 10)), min_size=1, max_size=40
    ),
)
@pytest.mark.parametrize("session", [SimulatedSession, WindowedSession, RecurrentSession])
def test_the_bound_holds_at_every_moment(
    session: type[SimulatedSession], memory: int, events: list[tuple[list[int], int, float] | int]
) -> None:
    texts, lent = Simulation(memory, session=session), list[tuple[Context, list[int], int, float]]()
    for event in events:
        if isinstance(event, int):
            if lent:
                context, prompt, max_tokens, drafted = lent.pop(event % len(lent))
                written = prompt + [99] * (max_tokens - 1)
                texts.fill(context, written[: context.target.n_ctx], drafted)
                assert texts.num_bytes <= memory or not lent
                texts.pool.give_back(context)
        else:
            prompt, max_tokens, drafted = event
            found = texts.tried(prompt, max_tokens)
            if found is not None:
                lent.append((texts.brought(found, prompt), *event))
            else:
                assert lent
        # Dropped ones may not have been collected yet, and only one that is alone may be larger than the bound.
        assert texts.num_bytes <= memory or len(lent) <= 1
    for context, *_ in lent:
        texts.pool.give_back(context)
    texts.run([1])  # perhaps the first there is
    assert texts.num_bytes == texts.pool.num_bytes <= memory
    closed = [context for context in texts.made if context.target.closed]
    assert len(texts.made) - len(closed) == len(texts.pool._idle)


def test_texts_of_models_with_windows_take_less_memory() -> None:
    needed = sum(cell * (SPARE_CELLS + 140) - cell * 2 // 3 * (140 - 40) for cell in (CELL, DRAFT_CELL))
    texts = Simulation(2 * needed, session=WindowedSession)
    for i in range(2):
        texts.begin([i] * 130)
        assert texts.pool.num_bytes == (i + 1) * needed
    assert texts.tried([3]) is None
    assert Simulation(10**6, session=WindowedSession).pool.full_bytes < FULL


def test_states_of_recurrent_layers_count() -> None:
    needed = sum(cell * (SPARE_CELLS + 140) + 500 + 3 * 100 for cell in (CELL, DRAFT_CELL))
    texts = Simulation(2 * needed + needed // 2, session=RecurrentSession)
    for i in range(2):
        texts.begin([i] * 130)
        assert texts.pool.num_bytes == (i + 1) * needed
    assert texts.tried([3]) is None  # for which there would be room without them
    assert Simulation(10**6, session=RecurrentSession).pool.full_bytes == FULL + 2 * (500 + 8 * 100)


def test_states_are_kept_before_ends_of_prompts_and_where_prompts_part() -> None:
    texts = Simulation(11_000, session=RecurrentSession)
    texts.run([*SYSTEM, *[1] * 60])
    other = texts.take([*SYSTEM[:75], *[2] * 80], 10)
    assert len(other.target.tokens) == 64  # states are kept of every 16th token
    # Of the memory's sixteenth there is room for three of the target and three of the draft.
    for session in cast(Any, other.sessions):
        assert session.kept == ([154 - 256, 75, 154 - 16], 3, 154 - 16)
    assert texts.tried([*SYSTEM[:75], *[2] * 70, 3], 10) is None  # waits until the other one has read so far
    for session in cast(Any, other.sessions):
        assert session.kept == ([154 - 256, 75, 154 - 16, 145], 3, 154 - 16)


def test_a_context_is_chosen_that_can_go_back() -> None:
    texts = Simulation(10**6, session=WindowedSession)
    assert texts.run([*SYSTEM, 1], list(range(300, 350))) == 0
    # Too far back: read again, and not forgotten for the longer text.
    assert texts.run(SYSTEM[:60]) == 0
    assert texts.run([*SYSTEM[:59], 7]) == 59
    assert texts.run([*SYSTEM, 1, *range(300, 345), 8]) == 146
    assert sorted(map(len, texts.at_rest)) == [60, 147]


def test_what_another_text_has_read_and_given_up_is_not_waited_for() -> None:
    texts = Simulation(10**6, session=WindowedSession)
    first = texts.take([*SYSTEM, *[1] * 80], 5)
    texts.fill(first, SYSTEM[:90])
    texts.take([*SYSTEM, 2], 5)  # 90 of them by copying
    texts.take([*SYSTEM[:70], 2], 5)
    texts.fill(first, [*SYSTEM, *[1] * 40])
    texts.take([*SYSTEM, 2], 5)


def test_a_cut_that_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Simulation(room(230))
    texts.run(SYSTEM)
    with monkeypatch.context() as broken:
        broken.setattr(texts.made[0].sessions[1], "rewind", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            texts.take(range(500, 550), 50)
    kept = len(texts.made[0].target.tokens)
    assert 32 <= kept < 100
    assert texts.run([*SYSTEM, 1]) == kept


def test_a_closed_context_does_not_rest(random_gguf: Callable[..., Path]) -> None:
    with pystaged.load(random_gguf(), draft=None) as engine:
        pool, prompt = engine._contexts, np.arange(5, dtype=np.int32)
        empty, closed = (pool.take(prompt, 5, most_reused=4) for _ in range(2))
        assert isinstance(empty, Context)
        assert isinstance(closed, Context)
        closed.close()
        pool.give_back(empty)
        pool.give_back(closed)
        assert pool.take(prompt, 5, most_reused=4) is empty


# ---- Real ----

GREETING = "def fibonacci(n):\n    if n < 2:\n        return n\n    a, b = 0, 1\n    for i in range(n):\n"


@pytest.fixture(params=["draft", "n-grams"])
def bundled(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pystaged.load("bundled", draft="auto" if request.param == "draft" else "none") as engine:
        yield engine


def test_texts_that_begin_together_read_their_common_beginning_once(bundled: Engine) -> None:
    prompts = [GREETING * 3 + f"# {i}\n" for i in range(4)]
    streams = [bundled.stream(prompt, max_tokens=20) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        with held(bundled):
            reading = [threads.submit(stream.finish) for stream in streams]
            wait_until(lambda: all(stream.text.is_open for stream in streams))
        results = [each.result(600) for each in reading]
    for prompt, result in zip(prompts, results, strict=True):
        greedy, is_end = _core.Sampling(), bundled.tokenizer.is_end
        assert result.tokens == plain_tokens(bundled.model, bundled.encode(prompt), 20, greedy, is_end)
    common = len(bundled.encode(GREETING * 3)) - 64
    assert sorted(result.stats.reused_tokens > common > 40 for result in results) == [False, True, True, True]


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    shape = RandomModel("lfm2", layers=2, recurrent=(0,), width=32, heads=2, kv_heads=1, context=512)
    return write(tmp_path / "model.gguf", shape)


def test_prompts_go_on_from_kept_states(hybrid: Path) -> None:
    prompt = list(range(290))
    with pystaged.load(hybrid, draft=None) as engine:
        first = engine.generate(prompt, max_tokens=40, prompt_logprobs=0)
        again = engine.generate(prompt, max_tokens=40)
        assert again.tokens == first.tokens
        assert again.stats.reused_tokens == 289 - 16
        chat = [*prompt, *again.tokens, *range(50)]
        assert engine.generate(chat, max_tokens=1).stats.reused_tokens == 290 + 40 - 1
        other = [*prompt[:200], *range(100)]
        assert engine.generate(other, max_tokens=1).stats.reused_tokens == 289 - 256
        assert engine.generate([*prompt[:200], 7], max_tokens=1).stats.reused_tokens == 200


def test_the_state_at_the_last_user_turn_is_kept_while_prompts_go_on(hybrid: Path) -> None:
    with pystaged.load(hybrid, draft=None) as engine:
        for first in (0, 1):
            question = prompt = [*range(first, 100)]
            for _ in range(13):  # as when tools are called
                prompt = [*prompt, *engine.generate(prompt, max_tokens=10).tokens, *range(20)]
            # The template drops the reasoning now.
            other = engine.generate([*question, 7, 8], max_tokens=10)
            assert other.stats.reused_tokens == len(question) - 1 - 16


def test_a_state_is_kept_where_waiting_prompts_part(hybrid: Path) -> None:
    prompts = [[*range(200), *[i] * 60] for i in range(3)]
    with pystaged.load(hybrid, draft=None) as engine, ThreadPoolExecutor(4) as threads:
        running, *streams = [engine.stream(prompt, max_tokens=5) for prompt in ([7], *prompts)]
        with held(engine):
            # While it runs the others arrive, so that all of them are there before any prompt is read.
            threads.submit(running.finish)
            wait_until(lambda: running.text.context)
            reading = [threads.submit(stream.finish) for stream in streams]
            wait_until(lambda: all(stream.text.is_open for stream in streams))
        results = [each.result(600) for each in reading]
        assert sorted(result.stats.reused_tokens for result in results) == [0, 200, 200]


def test_what_was_learnt_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "of", lambda *_, **__: PassCost({1: 1e-3, 32: 1.2e-3}))
    with pystaged.load("bundled") as engine:
        engine.generate(GREETING, max_tokens=60, temperature=0.5)
        (old,) = engine._contexts._idle
        old.drafter.start(old.target.tokens)
        tree = drafted(old.drafter, SamplingConfig(0.5), 3)
        assert len(tree) > 1
        old.drafter.advance([int(tree.tokens[1])])
        begun = engine._factory.context(0, None, old, 5)
        assert begun.target.tokens.tolist() == old.target.tokens[:5].tolist()
        assert begun.account.left == old.account.left
        # How often candidates are right, all contexts of an engine learn together.
        for each in (begun, engine._factory.context(0, None)):
            assert cast(Any, each.drafter)._learnt is old.drafter._learnt


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_memory_is_flat_over_many_short_texts(random_gguf: Callable[..., Path], hybrid: Path, kind: str) -> None:
    process, generator = psutil.Process(), np.random.default_rng(0)
    path = hybrid if kind == "hybrid" else random_gguf(vocab_size=300, context=96)
    # Writing recycled candidates to their file every ten seconds takes 40 MB for a moment, which malloc may keep.
    with pystaged.load(path, draft=None, recycle=False, kv_memory=4 << 20) as engine:

        def write(count: int) -> int:
            for _ in range(count):
                system = generator.integers(4)
                prompt = [
                    *range(system, system + 20),
                    *generator.integers(256, size=generator.integers(1, 30)).tolist(),
                ]
                stream = engine.stream(prompt, max_tokens=3, temperature=1.0)
                left = generator.random()
                if left < 0.3:
                    next(stream)
                    if left < 0.1:
                        # Only the collector can free this one, at any moment, in the middle of anything.
                        holder: list[object] = [stream]
                        holder.append(holder)
                        del holder
                    del stream
                else:
                    stream.finish()
                assert engine._contexts.num_bytes <= 4 << 20
            gc.collect()
            return process.memory_info().rss

        before = write(TEXTS // 4)
        after = write(TEXTS)
    assert after - before < 8 << 20


def test_what_n_grams_know_goes_with_their_text(
    random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pystaged.decoding.scheduler, "MOST_UNREAD", 1)
    with pystaged.load(random_gguf("F32", context=512), policy=FixedPolicy(2, 3, 6)) as engine:
        prompt = [i * i % 251 for i in range(400)]
        engine.generate("a", max_tokens=4)
        tracemalloc.start()
        try:
            stream = engine.stream(prompt, max_tokens=60)
            next(stream)
            wait_until(lambda: engine._scheduler._is_waiting)
            during = taken_by_ngrams()
            stream.finish()
            after = taken_by_ngrams()
        finally:
            tracemalloc.stop()
    assert during > 10_000
    assert after < 1_000


def taken_by_ngrams() -> int:
    """Bytes."""
    gc.collect()
    only = tracemalloc.Filter(True, pystaged.drafting.lookups.__file__)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([only]).traces)
