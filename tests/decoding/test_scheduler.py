"""Texts of one engine from many places: they join passes by themselves, and nobody hangs."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.commands import run_python
from support.scheduling import ActingPolicy, held, is_idle, wait_until

import pystaged
from pystaged import Growth
from pystaged.decoding.policy import FixedPolicy
from pystaged.decoding.readers import Stream, pieces
from pystaged.decoding.scheduler import MOST_UNREAD, Scheduler
from pystaged.decoding.stepper import Stepper
from pystaged.decoding.text import Text
from pystaged.engine import Engine
from pystaged.options.config import GenerationConfig

PROMPTS = ["the tree then ", "a", "over and over and over ", "0123456789" * 12]
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_p": 0.9}, {}]


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with pystaged.load(path, policy=FixedPolicy(2, 3, 6)) as engine:
        yield engine
        wait_until(lambda: is_idle(engine))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts took part in each round."""
    counts: list[int] = []
    step = Stepper.step

    def counted(self: Stepper, texts: Sequence[Text]) -> None:
        counts.append(len(texts))
        step(self, texts)

    monkeypatch.setattr(Stepper, "step", counted)
    return counts


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What comes of them when they are done at once; an exception of one is the test's."""

    def run(work: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    futures = [Future[Any]() for _ in works]
    for each in zip(works, futures, strict=True):
        threading.Thread(target=run, args=each, daemon=True).start()  # one that hangs must not hold the process
    return [future.result(600) for future in futures]


def together(engine: Engine, *works: Callable[[], Any]) -> list[Any]:
    """The same where no text takes a step before each work has opened one."""
    scheduler, start = engine._scheduler, threading.Barrier(len(works) + 1)

    def hold() -> None:
        with held(engine):
            start.wait()
            wait_until(lambda: len(scheduler._texts) + scheduler._inbox.qsize() == len(works))

    def begin(work: Callable[[], Any]) -> Any:
        start.wait()
        return work()

    return in_threads(*(partial(begin, work) for work in works), hold)[:-1]


def begun(engine: Engine, count: int, max_tokens: int = 400) -> list[Stream]:
    """Texts of which a piece each is read. Long ones wait for their readers before their end."""
    streams = [engine.stream(PROMPTS[0], max_tokens=max_tokens) for _ in range(count)]
    for stream in streams:
        next(stream)
    return streams


def test_texts_of_many_threads_share_passes(engine: Engine, steps: list[int]) -> None:
    def text(i: int, **options: Any) -> list[int]:
        return engine.generate(PROMPTS[i % 4], max_tokens=60, **OPTIONS[i % 4], **options).tokens

    alone = [text(i, speculate=False) for i in range(4)]
    assert max(steps) == 1
    assert together(engine, *(partial(text, i) for i in range(8))) == alone * 2
    assert max(steps) > 3


def test_a_reader_that_is_left_behind(engine: Engine) -> None:
    left, read = (engine.stream(PROMPTS[0], max_tokens=400) for _ in range(2))
    next(left)
    whole = read.finish()
    wait_until(lambda: engine._scheduler._is_waiting)
    unread = left.text.num_sent - left.text.num_read
    assert MOST_UNREAD <= unread < MOST_UNREAD + 8
    assert left.finish().tokens == whole.tokens
    assert len(whole.tokens) == 400


@pytest.mark.slow
def test_what_is_dropped_or_closed_leaves_the_others_alone(engine: Engine) -> None:
    alone = engine.generate(PROMPTS[1], max_tokens=300).tokens
    kept, dropped, closed, unread = (engine.stream(PROMPTS[i], max_tokens=300) for i in (1, 2, 3, 0))
    for stream in (kept, dropped, closed):
        next(stream)
    del dropped, unread
    gc.collect()
    closer = threading.Thread(target=closed.close)
    closer.start()
    assert kept.finish().tokens == alone
    closer.join(600)
    assert closed.result.finish_reason == "cancelled"
    wait_until(lambda: is_idle(engine))


def test_a_policy_that_fails_harms_nobody_else(path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    policy = ActingPolicy(fail)
    with pystaged.load(path, policy=policy) as engine:
        alone = engine.generate(PROMPTS[0], max_tokens=400, speculate=False).tokens
        streams = begun(engine, 4)
        with held(engine):  # or a call that counts down might set it back
            policy.left = 5
        found: list[object] = []
        for stream in streams:
            try:
                found.append(stream.finish().tokens)
            except RuntimeError as error:
                found.append(str(error))
        assert sorted(found, key=str) == [alone] * 3 + ["mine"]
        assert engine.generate(PROMPTS[0], max_tokens=400).tokens == alone


class _Empty(Exception):
    """An error that is false in a condition."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(("error", "raised"), [(_Empty, _Empty), (StopIteration, RuntimeError)])
def test_every_error_of_a_policy_ends_the_text(path: Path, error: type[Exception], raised: type[Exception]) -> None:
    def fail() -> None:
        raise error

    with pystaged.load(path, policy=ActingPolicy(fail, 4, FixedPolicy(1, 3, 3))) as engine:
        with pytest.raises(raised):
            engine.generate(PROMPTS[0], max_tokens=60)
        plain = engine.generate(PROMPTS[0], max_tokens=60, speculate=False)
        assert engine.generate(PROMPTS[0], max_tokens=60).tokens == plain.tokens


def test_a_policy_that_generates_with_its_own_engine_is_refused(path: Path) -> None:
    calls, refused = list[Callable[[], object]](), []

    def generate() -> None:
        for call in calls:
            with pytest.raises(RuntimeError, match="a policy cannot generate with its own engine"):
                call()
            refused.append(call)

    policy = ActingPolicy(generate)
    with pystaged.load(path, policy=policy) as engine:
        alone = engine.generate(PROMPTS[0], max_tokens=20, speculate=False).tokens
        stream, unread = (engine.stream(PROMPTS[0], max_tokens=20) for _ in range(2))
        batch = pieces(sequences(engine))
        next(batch)
        calls += [partial(engine.generate, "a"), partial(engine.generate, ["a", "b"])]
        calls += [partial(engine.score, "a"), partial(engine.embed, ["a"]), partial(engine.chat, [])]
        calls += [partial(next, each) for each in (stream, unread, batch)]
        policy.left = 1
        assert stream.finish().tokens == alone
        assert refused == calls
        assert unread.finish().tokens == alone


def test_a_policy_that_ends_texts_in_their_own_step(path: Path) -> None:
    class Ending(FixedPolicy):
        streams: Sequence[Stream] = ()

        def keep(self, growth: Growth) -> int:
            if threading.current_thread().name == "pystaged":
                for stream in self.streams:
                    stream.close()
                Ending.streams = ()
            return super().keep(growth)

    with pystaged.load(path, policy=Ending(2, 3, 6)) as engine:
        alone = engine.generate(PROMPTS[0], max_tokens=400, speculate=False).tokens
        streams = begun(engine, 4)
        Ending.streams = streams[:3]
        found = [each.tokens for each in in_threads(*(stream.finish for stream in streams[1:]))]
        assert not Ending.streams
        found.append(streams[0].finish().tokens)
        assert found[2] == alone
        assert all(tokens == alone[: len(tokens)] for tokens in found)
        assert [stream.result.finish_reason for stream in streams[:3]] == ["cancelled"] * 3
        wait_until(lambda: is_idle(engine))


@pytest.fixture
def one_slice() -> Iterator[None]:
    """No other thread runs before this one waits, or computes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(interval)


def opened(engine: Engine, text: Text, most_unread: float = math.inf) -> SimpleQueue[Any]:
    """What a text says."""
    said: SimpleQueue[Any] = SimpleQueue()
    engine._scheduler.open(text, said, most_unread)
    return said


def test_a_text_opened_while_another_one_is_cancelled(engine: Engine, one_slice: None) -> None:
    del one_slice
    asleep = engine.stream(PROMPTS[0], max_tokens=400).text
    opened(engine, asleep, 1)
    wait_until(lambda: asleep.num_sent > 0 and engine._scheduler._is_waiting)
    other = engine.stream(PROMPTS[1], max_tokens=3).text
    said = opened(engine, other)
    engine._scheduler.cancel(asleep)
    while said.get(timeout=600)[1] is not None:
        pass
    assert other.error is None


def test_a_thread_that_the_system_refuses_is_asked_for_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    refused, stream = (engine.stream(PROMPTS[0], max_tokens=30) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(refused)
    assert stream.finish().tokens == engine.generate(PROMPTS[0], max_tokens=30).tokens
    assert refused.result.finish_reason == "cancelled"


def test_ctrl_c_while_a_thread_is_started(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            monkeypatch.undo()
            raise RuntimeError("release unlocked lock")  # as threading says then

    stream = engine.stream(PROMPTS[0], max_tokens=30)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert stream.result.finish_reason == "cancelled"


def test_a_text_that_waits_behind_one_that_cannot_begin(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pystaged.load(path, kv_memory=1) as engine:
        alone = engine.generate(PROMPTS[1], max_tokens=30).tokens
        left, failing, waiting = (engine.stream(PROMPTS[i], max_tokens=400) for i in range(3))
        next(left)
        left.text.most_unread = 0  # it waits for its reader
        contexts = engine._contexts
        take = contexts.take

        def fail(prompt: Any, *args: Any, **options: Any) -> Any:
            if prompt is failing.text.prompt_tokens:
                raise MemoryError("no room")
            return take(prompt, *args, **options)

        monkeypatch.setattr(contexts, "take", fail)
        texts = [stream.text for stream in (failing, waiting)]
        wait_until(lambda: engine._scheduler._is_waiting)
        for text in texts:
            opened(engine, text)
        wait_until(lambda: all(text.is_over for text in texts))
        assert str(texts[0].error) == "no room"
        left.text.most_unread = MOST_UNREAD
        assert left.finish().finish_reason == "length"
        monkeypatch.undo()
        assert engine.generate(PROMPTS[1], max_tokens=30).tokens == alone


def test_a_fault_of_the_scheduler_ends_its_texts_and_no_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = engine.generate(PROMPTS[0], max_tokens=30).tokens
    streams = begun(engine, 2)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise AssertionError("a fault")

        patch.setattr(Stepper, "step", fail)
        for stream in streams:
            with pytest.raises(AssertionError, match="a fault"):
                stream.finish()
    assert engine.generate(PROMPTS[0], max_tokens=30).tokens == alone


def test_a_context_that_cannot_be_given_back_hangs_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = engine.generate(PROMPTS[0], max_tokens=30).tokens
    streams = begun(engine, 3)
    with monkeypatch.context() as patch:

        def fail(_: object) -> None:
            raise MemoryError("a fault")

        patch.setattr(engine._contexts, "give_back", fail)
        streams[0].close()
        with pytest.raises(MemoryError, match="a fault"):
            streams[1].finish()
    assert streams[2].finish().tokens[:30] == alone
    assert engine.generate(PROMPTS[0], max_tokens=30).tokens == alone


def sequences(engine: Engine) -> list[Text]:
    return [engine.start(prompt, GenerationConfig(max_tokens=400)) for prompt in PROMPTS]


def test_a_batch_that_the_collector_closes_in_the_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pystaged.decoding.readers, "inf", 1)  # unread tokens, after which its texts wait
    policy = ActingPolicy(lambda: None)
    with pystaged.load(path, policy=policy) as engine:
        batch: Any = pieces(sequences(engine))
        next(batch)
        policy.do, policy.left = batch.close, 1
        opened(engine, engine.stream(PROMPTS[0], max_tokens=30).text)  # whose steps close it
        wait_until(lambda: is_idle(engine))


def test_an_engine_goes_with_its_last_reference(path: Path) -> None:
    engine = pystaged.load(path)
    gc.collect()
    gc.disable()
    try:
        engine.generate(PROMPTS, max_tokens=3)
        engine.stream(PROMPTS[0], max_tokens=3).finish()
        bundle = weakref.ref(engine._bundle)
        del engine
        wait_until(lambda: bundle() is None)
    finally:
        gc.enable()


def test_progress_cannot_end_a_reader_silently(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="StopIteration was raised by `progress`"):
        engine.generate([i % 250 for i in range(400)], max_tokens=3, progress=lambda *_: next(iter(())))

    async def end(*_: int) -> None:
        raise StopAsyncIteration

    async def read() -> list[object]:
        return [piece async for piece in engine.astream([i % 250 for i in range(400)], max_tokens=3, progress=end)]

    with pytest.raises(RuntimeError, match="StopAsyncIteration was raised by `progress`"):
        asyncio.run(read())


def test_progress_may_read_its_own_stream_and_close_it(engine: Engine) -> None:
    prompt, pieces = [i % 250 for i in range(400)], list[str]()
    stream: Stream = engine.stream(prompt, max_tokens=30, progress=lambda *_: pieces.append(next(stream)))
    pieces += stream
    assert "".join(pieces) == stream.result.text
    assert len(stream.result.tokens) == 30
    closed: Stream = engine.stream(prompt, reuse=False, progress=lambda *_: closed.close())
    assert list(closed) == []
    assert closed.result.finish_reason == "cancelled"


def test_running_texts_stay_counted_when_others_are_forgotten(engine: Engine) -> None:
    with engine.stream("def f(", max_tokens=100) as stream:
        next(stream)
        engine.forget()
        assert engine._contexts.num_bytes > 0


def test_the_first_exception_of_progress_is_the_reader_s(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pystaged.decoding.scheduler, "MOST_UNREAD", 1)  # so that the text does not end meanwhile
    told: list[int] = []

    def fail(tokens: int, _: int) -> None:
        told.append(tokens)
        raise LookupError(f"after {tokens}")

    stream = engine.stream([i % 250 for i in range(400)], max_tokens=100, progress=fail)
    with pytest.raises(LookupError, match="after 0"):
        next(stream)
    assert told == [0]
    assert stream.result.finish_reason == "cancelled"


def test_closing_an_engine_under_its_texts(path: Path) -> None:
    with pystaged.load(path) as engine:
        alone = engine.generate(PROMPTS[0], max_tokens=50).tokens
    engine = pystaged.load(path)
    streams = begun(engine, 3, 50)
    engine.close()
    assert [stream.finish().tokens for stream in streams] == [alone] * 3
    with pytest.raises(ValueError, match="closed"):
        engine.generate(PROMPTS[0])


def test_texts_wait_for_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pystaged.load(path, kv_memory=1) as engine:
        alone = [engine.generate(prompt, max_tokens=30).tokens for prompt in PROMPTS]
        most: list[int] = []
        contexts = engine._contexts
        take = contexts.take

        def counted(*args: Any, **options: Any) -> Any:
            context = take(*args, **options)
            most.append(len(contexts._lent))
            return context

        monkeypatch.setattr(contexts, "take", counted)
        streams = [engine.stream(prompt, max_tokens=30) for prompt in PROMPTS]
        found = together(engine, *(stream.finish for stream in streams))
        monkeypatch.undo()
        assert [each.tokens for each in found] == alone
        assert max(most) == 1
        # But none waits for a text whose reader waits for it.
        (left,) = begun(engine, 1)
        assert engine.generate(PROMPTS[1], max_tokens=30).tokens == alone[1]
        assert left.finish().tokens[:30] == alone[0]


class Listening:
    """Hears how far a prompt is read, at once."""

    @staticmethod
    def put(item: Any) -> None:
        if callable(item[1]):
            item[1]()


def test_who_is_told_of_a_prompt_may_wait_for_another_text(path: Path) -> None:
    with pystaged.load(path) as engine:
        beside: list[list[int]] = []

        def generate(*_: int) -> None:
            in_threads(lambda: beside.append(engine.generate(PROMPTS[0], max_tokens=3).tokens))

        for running in (0, 1):
            streams = [engine.stream(PROMPTS[1], max_tokens=300) for _ in range(running)]
            for stream in streams:
                next(stream)
            engine.generate(list(range(50 + running, 150)), max_tokens=3, progress=generate)
            engine.generate([list(range(60 + running, 150))], max_tokens=3, progress=generate)
        assert len(beside) == 8
        assert beside == [engine.generate(PROMPTS[0], max_tokens=3).tokens] * 8


def test_who_waits_for_a_prompt_of_another_text_keeps_nobody_waiting(random_gguf: Callable[..., Path]) -> None:
    with pystaged.load(random_gguf("F32", context=2048), draft=None, prefill_budget=0.0) as engine:
        prompt = [i % 250 for i in range(2000)]
        read: list[int] = []
        began: dict[int, int] = {}  # how much of the prompt was read then

        def begin(prompt: list[int], progress: Callable[[int, int], object] | None = None, **options: Any) -> None:
            engine._scheduler.open(engine.stream(prompt, progress=progress, **options).text, Listening)

        def begin_others() -> None:
            for text, each in enumerate([prompt, prompt, [7, 8, 9]]):
                begin(each, lambda *_, text=text: began.setdefault(text, read[-1]), max_tokens=3)

        def note(tokens: int, _: int) -> None:
            read.append(tokens)
            if len(read) == 3:
                in_threads(begin_others)  # while the engine's thread waits here

        first = engine.stream([1, 2, 3], max_tokens=200).text
        engine._scheduler.open(first, Listening, 1)
        wait_until(lambda: first.num_sent and engine._scheduler._is_waiting)  # for a reader
        first.most_unread = math.inf
        begin(prompt, note, max_tokens=3)
        wait_until(lambda: len(began) == 3 and is_idle(engine))
        assert began[2] < 200 < min(began[0], began[1])


def test_texts_are_ended_while_the_process_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pystaged.load(path) as engine:
        came, running, ending, told = (engine.stream("Hello").text for _ in range(4))
        scheduler = engine._scheduler
        # The process ends while a text does that is settled after another one.
        monkeypatch.setattr(scheduler._contexts, "give_back", lambda _: setattr(scheduler, "_is_stopping", True))
        monkeypatch.setattr(scheduler, "_thread", threading.current_thread())
        scheduler._texts = [running, ending, told]
        scheduler._admit(ending)
        ending.finish, told.is_over = "stop", True
        assert not scheduler.work()
        scheduler._inbox.put(came)
        scheduler._settle()
        errors = [type(text.error) for text in (came, running, ending, told)]
        assert errors == [RuntimeError, RuntimeError, type(None), type(None)]
        assert came.is_over
        assert running.is_over


def test_streams_can_be_closed_when_the_process_ends(path: Path) -> None:
    with pystaged.load(path) as engine:
        closed, read = begun(engine, 2)
        engine._scheduler.stop()
        in_threads(closed.close)
        for stream in (read, engine.stream(PROMPTS[0])):
            with pytest.raises(RuntimeError, match="no text can be generated while the process exits"):
                stream.finish()
        assert closed.result.finish_reason == "cancelled"


ENDING = """
import sys, threading
import pystaged

engine = pystaged.load(sys.argv[1])
streams = [engine.stream("the tree", max_tokens=400) for _ in range(4)]
for stream in streams:
    next(stream)
print(bool(engine._scheduler._texts))
"""


@pytest.mark.slow
def test_a_process_ends_while_texts_are_being_written(path: Path) -> None:
    for _ in range(3):
        done = run_python(ENDING, path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_an_end_that_ctrl_c_kept_from_its_reader(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[0], max_tokens=20)
    next(stream)
    wait_until(lambda: is_idle(engine))
    while not stream._queue.empty():
        stream._queue.get()
    in_threads(stream.close)
    assert stream.result.finish_reason == "length"


def test_a_text_that_ctrl_c_kept_from_being_opened(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    stream = engine.stream(PROMPTS[0], max_tokens=100)
    monkeypatch.setattr(Scheduler, "open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert (stream.result.finish_reason, stream.result.tokens) == ("cancelled", [])
