"""Several texts at once, by every way to ask for them: what comes out, in which order, and how they end."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scheduling import ActingPolicy, held, in_loop, is_idle, wait_until

import pystaged
from pystaged import Engine, GenerationResult, Piece
from pystaged.decoding.readers import results
from pystaged.decoding.scheduler import MOST_UNREAD
from pystaged.options.config import GenerationConfig

PROMPTS = ["the tree then ", "her hat ", "the tree then and there", "o"]
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 7}
SECONDS = 600.0  # after which something hangs


@pytest.fixture(params=["n-grams", "draft"])
def engine(request: pytest.FixtureRequest, path: Path, random_gguf: Callable[..., Path]) -> Iterator[Engine]:
    draft = random_gguf(vocab_size=300, context=512, width=32, layers=1) if request.param == "draft" else None
    with pystaged.load(path, draft=draft) as engine:
        yield engine


@pytest.fixture
def plain(path: Path) -> Iterator[Engine]:
    with pystaged.load(path, draft=None) as engine:
        yield engine


def told(result: GenerationResult) -> tuple[str, list[int], str, int]:
    return result.text, result.tokens, result.finish_reason, result.seed


def alone(path: Path, prompt: Any, **options: Any) -> tuple[str, list[int], str, int]:
    """By an engine of its own, plainly."""
    with pystaged.load(path, draft=None) as engine:
        return told(engine.generate(prompt, **options | {"speculate": False}))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, SECONDS))


# ---- Several results ----


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, WARM, WARM | {"stop": ("e", "an")}, {"speculate": False} | WARM], ids=str)
def test_several_prompts_are_continued_as_alone(engine: Engine, path: Path, options: dict[str, Any]) -> None:
    results = engine.generate(PROMPTS, max_tokens=24, **options)
    expected = [alone(path, prompt, max_tokens=24, **options) for prompt in PROMPTS]
    assert [told(result) for result in results] == expected
    assert max(result.stats.texts_per_pass for result in results) > 1


def test_lists_of_tokens_are_one_prompt_and_lists_of_those_are_several(plain: Engine, path: Path) -> None:
    ids = [plain.encode(prompt).tolist() for prompt in PROMPTS]
    expected = [alone(path, prompt, max_tokens=8) for prompt in PROMPTS]
    assert told(plain.generate(ids[0], max_tokens=8)) == expected[0]
    for several in (ids, tuple(PROMPTS), [np.array(each) for each in ids], [PROMPTS[0], *ids[1:]]):
        assert [told(each) for each in plain.generate(several, max_tokens=8)] == expected
    assert [told(each) for each in plain.generate([ids[0]], max_tokens=8)] == expected[:1]
    assert [told(each) for each in pystaged.generate(PROMPTS, model=path, max_tokens=8)] == expected


def test_n_texts_have_the_seeds_that_follow(engine: Engine, path: Path) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16}
    results = engine.generate(PROMPTS[:2], n=3, seed=2**64 - 2, **options)
    seeds = [2**64 - 2, 2**64 - 1, 0]
    assert [told(each) for each in results] == [
        alone(path, prompt, seed=seed, **options) for prompt in PROMPTS[:2] for seed in seeds
    ]
    assert [told(each) for each in engine.generate(PROMPTS[0], n=1, seed=5, **options)] == [
        alone(path, PROMPTS[0], seed=5, **options)
    ]
    drawn = engine.generate(PROMPTS[0], n=2, seed=None, **options)
    assert drawn[1].seed == (drawn[0].seed + 1) % 2**64
    (only,) = pystaged.generate(PROMPTS[0], n=1, model=path, **options)
    assert told(only) == alone(path, PROMPTS[0], **options)


def test_texts_begin_to_come_however_many_there_will_be(plain: Engine, path: Path) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 4}
    sequence = plain.start(PROMPTS[0], GenerationConfig(**options))
    with closing(results(plain.repeated([sequence], 10**10))) as found:
        first = [told(next(found)) for _ in range(3)]
    assert first == [alone(path, PROMPTS[0], **options | {"seed": seed}) for seed in (5, 6, 7)]


def test_a_prompt_is_read_by_its_first_text(plain: Engine) -> None:
    """The others begin when it has."""
    read: list[tuple[int, int]] = []
    plain.generate(list(range(200)), n=4, max_tokens=4, progress=lambda *call: read.append(call))
    assert read[: read.index((199, 199))] == [(0, 199)]


def test_more_texts_than_are_stepped_at_once(plain: Engine, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pystaged.decoding.readers.MOST_AT_ONCE", 3)
    prompts = [PROMPTS[i % 4] + str(i % 2) for i in range(9)]
    results = plain.generate(prompts, max_tokens=5)
    assert [told(each) for each in results] == [alone(path, prompt, max_tokens=5) for prompt in prompts]
    assert max(each.stats.texts_per_pass for each in results) <= 3


def test_figures_of_the_whole(engine: Engine) -> None:
    results = engine.generate(PROMPTS, max_tokens=20)
    stats, passes = [result.stats for result in results], engine.passes
    assert passes.steps == sum(each.steps for each in stats)
    assert passes.guesses == sum(each.drafted for each in stats)
    assert passes.prompt_rows == sum(each.prompt_tokens - 1 - each.reused_tokens for each in stats)
    assert passes.rows == passes.steps + passes.guesses + passes.prompt_rows
    assert max(each.steps for each in stats) <= passes.passes < passes.steps
    assert passes.to_dict()["texts_per_pass"] == passes.steps / passes.passes > 1
    engine.generate(PROMPTS[0], max_tokens=5)
    more = engine.passes.since(passes)
    assert more.texts_per_pass <= 1
    for each in stats:
        assert each.rows_per_pass >= each.texts_per_pass >= 1
        assert each.to_dict()["guess_share"] == pytest.approx(each.drafted / each.rows)


# ---- Ends ----


def fail() -> None:
    raise LookupError("the policy failed")


def press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def rest(engine: Engine) -> int:
    """Contexts that are lent when no text is left."""
    wait_until(lambda: is_idle(engine))
    return len(engine._contexts._lent)


@pytest.mark.parametrize(("do", "error"), [(fail, LookupError), (press_ctrl_c, KeyboardInterrupt)])
def test_what_ends_a_text_cancels_its_batch(path: Path, do: Callable[[], object], error: type[BaseException]) -> None:
    with pystaged.load(path, draft=None, policy=ActingPolicy(do, 10)) as engine:
        with pytest.raises(error):
            engine.generate(PROMPTS, max_tokens=400)
        assert rest(engine) == 0
        assert [told(each) for each in engine.generate(PROMPTS, max_tokens=9)] == [
            alone(path, prompt, max_tokens=9) for prompt in PROMPTS
        ]


# ---- Event loops ----


def test_texts_of_an_event_loop(engine: Engine, path: Path) -> None:
    async def read(prompt: str) -> Any:
        stream = engine.astream(prompt, max_tokens=30, **WARM)
        with pytest.raises(RuntimeError, match="has not been read to its end"):
            _ = stream.result
        pieces = [piece async for piece in stream]
        assert all(isinstance(piece, Piece) for piece in pieces)
        assert "".join(pieces) == stream.result.text
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return told(stream.result)

    async def read_all() -> list[Any]:
        return await asyncio.gather(*map(read, PROMPTS))

    expected = [alone(path, prompt, max_tokens=30, **WARM) for prompt in PROMPTS]
    assert run(read_all()) == expected
    # Several loops at once.
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: run(read_all()), range(2))) == [expected, expected]


def test_progress_may_be_told_to_a_coroutine(plain: Engine) -> None:
    """It is over before the text goes on."""
    said: list[Any] = []

    async def progress(read: int, missing: int) -> None:
        await asyncio.sleep(0)
        said.append((read, missing))

    async def read() -> None:
        async for piece in plain.astream(range(300), max_tokens=2, reuse=False, progress=progress):
            said.append(piece.tokens)

    asyncio.run(read())
    assert said[:3] == [(0, 299), (256, 299), (299, 299)]
    assert sum(map(len, said[3:])) == 2


@in_loop
async def test_a_reader_that_is_behind_is_waited_for(plain: Engine) -> None:
    stream = plain.astream(PROMPTS[0], max_tokens=450, speculate=False)
    await anext(stream)
    sequence = stream.text
    while not (plain._scheduler._is_waiting or sequence.is_over):
        await asyncio.sleep(0)
    assert sequence.num_sent <= MOST_UNREAD + 1
    assert len((await stream.finish()).tokens) == 450


@in_loop
async def test_closing_an_async_stream(plain: Engine) -> None:
    whole = plain.generate(PROMPTS[0], max_tokens=400)
    async with plain.astream(PROMPTS[0], max_tokens=400) as stream:
        first = await anext(stream)
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.text.startswith(first)
    assert stream.result.tokens == whole.tokens[: len(stream.result.tokens)]
    await stream.aclose()
    untouched = plain.astream(PROMPTS[0])
    await untouched.aclose()
    assert told(untouched.result) == ("", [], "cancelled", 0)
    assert rest(plain) == 0


@pytest.mark.parametrize("closes", [False, True])
@in_loop
async def test_a_stream_that_could_not_be_opened_ends(
    plain: Engine, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    stream = plain.astream(PROMPTS[0])
    with monkeypatch.context() as patch:
        patch.setattr(plain._scheduler, "open", fail)
        with pytest.raises(MemoryError):
            await anext(stream)
    if closes:
        await asyncio.wait_for(stream.aclose(), 600)
    else:
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(stream), 600)
    assert stream.result.finish_reason == "cancelled"


@in_loop
async def test_several_tasks_may_close_an_async_stream(plain: Engine) -> None:
    stream = plain.astream(PROMPTS[0], max_tokens=400)
    await anext(stream)
    closing = [asyncio.create_task(stream.aclose()) for _ in range(3)]
    await asyncio.sleep(0)
    closing.append(asyncio.create_task(stream.finish()))
    await asyncio.gather(*closing)
    assert stream.result.finish_reason == "cancelled"


@in_loop
async def test_cancelling_a_task_cancels_its_text(plain: Engine) -> None:
    stream = plain.astream(PROMPTS[0], max_tokens=400)
    with held(plain):  # so that the text cannot end by itself meanwhile
        reading = asyncio.create_task(stream.finish())
        other = asyncio.create_task(plain.astream(PROMPTS[1], max_tokens=20).finish())
        while not stream.text.is_open:
            await asyncio.sleep(0)
        reading.cancel()
        while not stream.text.is_cancelled:
            await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (await other).finish_reason == "length"
    await stream.aclose()
    assert stream.result.finish_reason == "cancelled"
    assert rest(plain) == 0


@in_loop
async def test_two_tasks_cannot_read_one_stream(plain: Engine) -> None:
    stream = plain.astream(PROMPTS[0], max_tokens=4)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task reads the stream"):
        await anext(stream)
    await first
    await stream.finish()


def test_a_stream_stays_with_its_event_loop(plain: Engine) -> None:
    stream = plain.astream(PROMPTS[0], max_tokens=500)

    async def begin() -> None:
        await anext(stream)

    async def go_on() -> None:
        for work in (anext(stream), stream.aclose(), stream.finish()):
            with pytest.raises(RuntimeError, match="was begun in another event loop"):
                await work

    run(begin())
    run(go_on())
    assert rest(plain) == 0


@in_loop
async def test_errors_of_async_streams(path: Path) -> None:
    with pystaged.load(path, draft=None, policy=ActingPolicy(fail, 3)) as engine:
        with pytest.raises(LookupError, match="the policy failed"):
            await engine.astream(PROMPTS[0], max_tokens=100).finish()
        with pytest.raises(ValueError, match="the prompt is empty"):
            engine.astream("")
        engine.close()
        with pytest.raises(ValueError, match="the engine is closed"):
            engine.astream(PROMPTS[0])


def test_dropped_async_streams_end(plain: Engine) -> None:
    async def drop() -> None:
        for _ in range(5):
            stream = plain.astream(PROMPTS[0], max_tokens=500)
            async for _ in stream:
                break
            sequence = stream.text
            del stream
            while not sequence.is_over:
                await asyncio.sleep(0)

    gc.collect()
    gc.disable()
    try:
        run(drop())
    finally:
        gc.enable()
    assert rest(plain) == 0


def test_a_loop_that_is_closed_ends_its_texts_alone(plain: Engine, path: Path) -> None:
    loop = asyncio.new_event_loop()
    stream = plain.astream(PROMPTS[0], max_tokens=500)
    loop.run_until_complete(anext(stream))
    loop.close()
    assert told(plain.generate(PROMPTS[1], max_tokens=30)) == alone(path, PROMPTS[1], max_tokens=30)
    wait_until(lambda: stream.text.is_over)
    assert rest(plain) == 0
