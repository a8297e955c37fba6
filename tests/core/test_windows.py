"""Layers with a window give back the cells behind it: what a text can still go back to, its bits, and the memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.memory import resident
from support.random_models import RandomModel, write
from support.steps import evaluate, prefill

import pystaged
from pystaged import _core
from pystaged._core import Sampling, Session, Work
from pystaged.decoding.requests import only

CONTEXT = 2000
SLACK = 256  # positions that a text can go back from where it was read to, and from its end
TOKENS = np.random.default_rng(0).integers(0, 257, CONTEXT, dtype=np.int32)

Model = Callable[..., _core.Model]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a model whose layers but the last have a window, or all of them."""
    folder = tmp_path_factory.mktemp("windows")

    @cache
    def make(window: int = 24, every: bool = False) -> Path:
        metadata = {"attention.sliding_window": window, "attention.sliding_window_pattern": [True, True, every]}
        shape: dict[str, Any] = {"width": 32, "heads": 2, "kv_heads": 1, "layers": 3, "quantization": "Q8_0"}
        model = RandomModel("gemma3", context=CONTEXT, metadata=metadata, **shape)
        return write(folder / f"{window}-{every}.gguf", model)

    return make


def chain(length: int) -> npt.NDArray[np.int32]:
    return np.arange(-1, length - 1, dtype=np.int32)


def assert_goes_on_as_if_nothing_was_given_back(session: Session, model: _core.Model) -> None:
    """What follows has the bits that it has behind a text that is not committed, of which nothing is given back."""
    tokens = session.tokens
    ends = [5, 6, 7, 8]
    evaluate(session, ends, [-1, 0, 0, -1])  # a tree that branches at its root, too
    found = [session.logits(row) for row in range(4)]
    session.discard()
    n = len(tokens)
    keeping = Session(model)
    evaluate(keeping, [*tokens, *ends], [*chain(n), n - 1, n, n, n - 1], 4)
    assert keeping.num_pending == n + 4
    for row, logits in enumerate(found):
        np.testing.assert_array_equal(logits, keeping.logits(n + row))


def write_text(session: Session, length: int) -> None:
    """Let a text grow to `length` tokens, by trees of which paths behind other rows are kept."""
    while (missing := length - len(session.tokens)) > 0:
        path = min(missing, 40)
        at = len(session.tokens)
        others = [3] * 5
        evaluate(session, [*others, *TOKENS[at : at + path]], [-1] * 5 + [-1, *range(5, 4 + path)], 0)
        session.commit(range(5, 5 + path))


@pytest.mark.parametrize("window", [1, 24, 700])
def test_where_a_text_can_go_back_to(path_of: Callable[..., Path], window: int) -> None:
    model = _core.Model(path_of(window))
    session = Session(model)
    prefill(session, TOKENS[:900])
    write_text(session, 1900)
    for length in (*range(1900 - SLACK, 1901), *range(900 - SLACK, 901), 0):
        assert session.reachable(length) == length
    between = 900 + (1900 - SLACK - 900) // 2  # nearer to neither
    assert session.reachable(between) == (900 if window < 700 else between)
    assert session.reachable(500 if window < 700 else 100) == (0 if window < 700 else 100)
    fork = session.fork(between)
    assert fork.tokens.tolist() == TOKENS[: session.reachable(between)].tolist()
    assert session.rewind(880) == 880
    assert session.reachable(880 - SLACK + 20) == 880 - SLACK + 20
    assert_goes_on_as_if_nothing_was_given_back(session, model)
    for length in (901, -1):
        with pytest.raises(ValueError, match=f"cannot rewind 880 tokens to {length}"):
            session.reachable(length)
    prefill(session, TOKENS[880:1500])  # the end of the prompt before is forgotten
    if window < 700:
        assert session.reachable(880) == 0
    assert session.rewind(0) == 0
    prefill(session, TOKENS[:30])
    assert session.reachable(20) == 20


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize(("window", "every"), [(1, False), (24, False), (24, True), (150, False)])
def test_texts_that_go_back_and_on_have_the_bits_of_texts_that_keep_everything(
    path_of: Callable[..., Path], window: int, every: bool, kv: str
) -> None:
    model = _core.Model(path_of(window, every), "", 2, kv=kv)
    generator = np.random.default_rng(window)
    texts = [Session(model) for _ in range(3)]
    gone_back = set()
    for _ in range(25):
        # All of them in one pass: some read, some are written.
        works = []
        for session in texts:
            at = len(session.tokens)
            n = int(min(generator.integers(1, 256), CONTEXT - 30 - at))
            if n > 0 and generator.random() < 0.6:
                works.append(Work.read(session, TOKENS[at : at + n]))
            elif n > 0:
                masks = only(TOKENS[at + 1 : at + 1 + n])
                works.append(Work.verify(session, TOKENS[at : at + n], chain(n), Sampling(), 0, masks))
        _core.run(works)
        i = int(generator.integers(3))
        session, length = texts[i], len(texts[i].tokens)
        asked = int(length - generator.integers(0, min(length, 600) + 1))
        reached = session.reachable(asked)
        assert reached <= asked
        if generator.random() < 0.5:
            texts[i] = session.fork(asked)
            assert session.tokens.tolist() == TOKENS[:length].tolist()
        else:
            assert session.rewind(asked) == reached
        assert texts[i].tokens.tolist() == TOKENS[:reached].tolist()
        gone_back.add((reached < asked, reached > 0))
        assert_goes_on_as_if_nothing_was_given_back(texts[i], model)
    assert {(False, True), (True, False)} <= gone_back
    for session in texts:
        assert_goes_on_as_if_nothing_was_given_back(session, model)


def test_an_interrupted_reading_leaves_what_was_there(path_of: Callable[..., Path]) -> None:
    model = _core.Model(path_of())
    session = Session(model)
    prefill(session, TOKENS[:600])
    with pytest.raises(pystaged.ContextFullError):
        prefill(session, np.zeros(CONTEXT, np.int32))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        evaluate(session, [300], [-1])
    evaluate(session, TOKENS[600:1100], chain(500), 0)
    session.discard()
    prefill(session, TOKENS[:0])
    assert session.reachable(600 - SLACK) == 600 - SLACK
    assert_goes_on_as_if_nothing_was_given_back(session, model)


def test_what_a_text_takes(path_of: Callable[..., Path]) -> None:
    for every, kv in ((False, "f16"), (True, "f16"), (False, "q8_0")):
        model = _core.Model(path_of(every=every), kv=kv)
        windowed = model.windowed_cell_bytes
        assert windowed == (model.cell_bytes if every else model.cell_bytes // 3 * 2)
        session = Session(model)
        for length in range(100, CONTEXT - 100, 100):
            if length < 1000:
                prefill(session, TOKENS[length - 100 : length])
            else:
                write_text(session, length)
            held = session.num_bytes - length * (model.cell_bytes - windowed)
            assert held <= windowed * min(length, session.most_windowed)
            assert held >= windowed * min(length, SLACK + 23)
        assert held < windowed * 800
        fork = session.fork(length)
        assert fork.num_bytes == session.num_bytes
    # No layer has the window that the file names.
    metadata = {"attention.sliding_window": 24, "attention.sliding_window_pattern": [False]}
    model = _core.Model(write(path_of().parent / "none.gguf", RandomModel("gemma3", layers=1, metadata=metadata)))
    session = Session(model)
    prefill(session, TOKENS[:500])
    assert (model.windowed_cell_bytes, session.reachable(3), session.num_bytes) == (0, 3, 500 * model.cell_bytes)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_memory_is_given_back(tmp_path: Path, kv: str) -> None:
    metadata = {"attention.sliding_window": 512, "attention.sliding_window_pattern": [True] * 5 + [False]}
    shape = RandomModel("gemma3", width=64, heads=4, kv_heads=4, head_dim=64, layers=6, context=8192, metadata=metadata)
    model = _core.Model(write(tmp_path / "model.gguf", shape), kv=kv)

    session = Session(model)
    prefill(session, TOKENS[:256])
    before = resident()
    session.stretch(8000)
    assert resident() - before < 1.1 * session.num_bytes < 0.35 * 8000 * model.cell_bytes


def test_an_engine_writes_the_same_whatever_it_held(path_of: Callable[..., Path]) -> None:
    """Prompts that share a beginning within reach of another text's, and far before."""
    path = path_of()
    base = TOKENS[:1200].tolist()
    prompts = [base, base[:1000] + base[:300], base[:300] + base[700:], base[:1190] + base[:5], base]
    options = {"max_tokens": 40, "temperature": 0.7, "seed": 4, "ignore_eos": True}
    with pystaged.load(path, draft=None, recycle=False) as engine:
        cold = [engine.generate(prompt, reuse=False, speculate=False, **options).tokens for prompt in prompts]
    with pystaged.load(path, draft=None, recycle=False) as engine:
        results = [engine.generate(prompt, **options) for prompt in [*prompts, base]]
    assert [result.tokens for result in results] == [*cold, cold[0]]
    assert [result.stats.reused_tokens for result in results] == [0, 1000, 0, 1190, 1190, 1199]
    # A crowd of them, with a draft that has windows, too, in room for about two.
    policy = pystaged.FixedPolicy(width=2, depth=3, budget=6)
    with (
        pystaged.load(path, draft=path, recycle=False, policy=policy, kv_memory=900_000) as engine,
        ThreadPoolExecutor(5) as threads,
    ):
        for _ in range(2):
            together = threads.map(lambda prompt: engine.generate(prompt, **options).tokens, prompts)
            assert list(together) == cold
        assert engine._contexts.num_bytes <= 900_000
