"""Recurrent layers: whatever a text went through, it goes on with the bits of its tokens decoded one by one."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.families import models
from support.memory import held
from support.plain import Plain
from support.random_models import RandomModel, write
from support.steps import evaluate, path_to, prefill

from pystaged import _core
from pystaged._core import LogitRules, ModelError, Sampling, Session, Work

SCHEDULES = int(os.environ.get("PYSTAGED_SCHEDULES", "4"))
MOST_PENDING = 512
MODELS = models("recurrent")  # threads share the channels of a convolution of more than 256
# A sampling that fails after its pass; the models' vocabularies are no larger.
NOTHING = Sampling(rules=LogitRules(logit_bias=[(token, -math.inf) for token in range(300)]))
TREE = [-1, 0, 1, 0, -1, 4, 3, 6, 5]  # branches at the root, and below


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("recurrent")
    return cache(lambda name: write(folder / f"{name}.gguf", MODELS[name]))


def branches(generator: np.random.Generator, most: int) -> tuple[list[int], list[int]]:
    """A random tree: its tokens and parents."""
    n = int(generator.integers(1, most + 1))
    parents = [-1, *(int(generator.integers(max(-1, i - 3), i)) for i in range(1, n))]
    return generator.integers(0, 4, n).tolist(), parents


def assert_goes_on_plainly(session: Session, plain: Plain) -> None:
    """A tree behind the text has the logits of chains."""
    committed, tokens = session.tokens.tolist(), [3, 1, 0, 2, 1, 1, 0, 3, 2]
    evaluate(session, tokens, TREE)
    for row in range(len(TREE)):
        expected = plain([*committed, *(tokens[i] for i in path_to(row, TREE))])
        np.testing.assert_array_equal(session.logits(row), expected)
    session.discard()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_random_schedules(path_of: Callable[[str], Path], name: str, schedule: int) -> None:
    """Texts that share passes: they read, verify, draft, commit, go back and fork; some passes fail."""
    generator, path = np.random.default_rng(schedule), path_of(name)
    kernels = _core.kernels()
    model = _core.Model(path, kernels[schedule % len(kernels)], 1 + schedule % 3)
    if tapped := schedule % 2 == 1:
        model.tap([1, 2], last_row=True)
    plain = Plain(path)
    texts = [Session(model) for _ in range(3)]
    for _ in range(12):
        works, texts_read = [], []
        for i, session in enumerate(texts):
            committed = session.tokens.tolist()
            ahead = len(committed) + generator.integers(-5, 40, 3)
            session.keep_states(ahead, int(generator.integers(4)))
            kind = generator.choice(["read", "verify", "draft", "back", "fork"], p=[0.3, 0.3, 0.2, 0.1, 0.1])
            if kind == "read":
                most = 400 if generator.random() < 0.05 else 40  # perhaps in two passes
                works.append(Work.read(session, generator.integers(0, 4, generator.integers(1, most))))
                texts_read.append(session)
            elif kind == "verify":
                sampling = Sampling(temperature=2.0, seed=int(generator.integers(100)), top_k=4)
                works.append(Work.verify(session, *branches(generator, 12), sampling))
            elif kind == "draft":  # in several passes, of which a path is kept
                parents: list[int] = []
                for _ in range(3):
                    tokens, its = branches(generator, 6)
                    begin, n = int(generator.integers(-1, len(parents))) if parents else -1, len(parents)
                    more = [begin if parent < 0 else parent + n for parent in its]
                    evaluate(session, tokens, more, 0)
                    parents += more
                session.commit(path_to(int(generator.integers(-1, len(parents))), parents))
            elif kind == "back":
                asked = int(generator.integers(0, len(committed) + 1))
                reached = session.reachable(asked)
                assert reached <= asked
                assert session.rewind(asked) == reached
                assert session.tokens.tolist() == committed[:reached]
            elif kind == "fork":
                length = int(generator.integers(0, len(committed) + 1))
                texts[i] = session.fork(length)
                assert texts[i].tokens.tolist() == committed[: session.reachable(length)]
        if works and generator.random() < 0.2:
            before = [session.tokens.tolist() for session in texts]
            failing = Work.verify(Session(model), [1], [-1], NOTHING)
            with pytest.raises(ValueError, match="exclude all tokens"):
                _core.run([*works, failing])
            assert [session.tokens.tolist() for session in texts] == before
        else:
            _core.run(works)
            for session in texts_read if tapped else []:
                alone = Session(model)
                prefill(alone, session.tokens)
                np.testing.assert_array_equal(session.hidden.numpy(), alone.hidden.numpy())
        assert_goes_on_plainly(texts[int(generator.integers(3))], plain)
    for session in texts:
        assert_goes_on_plainly(session, plain)


def test_where_a_text_can_go_back_to(path_of: Callable[[str], Path]) -> None:
    """To every position of the last pass, if it was a tree, to states that were kept, else to its beginning."""
    model, plain = _core.Model(path_of("lfm2")), Plain(path_of("lfm2"))
    session = Session(model)
    tokens = np.random.default_rng(2).integers(0, 4, 400)
    session.keep_states([163, 125, 90, 130, 500], 2**31 - 1)
    prefill(session, tokens[:100])
    prefill(session, tokens[100:130])
    assert [session.reachable(length) for length in (130, 129, 124, 90, 89)] == [130, 125, 90, 90, 0]
    prefill(session, tokens[130:160])
    for token in tokens[160:200]:
        evaluate(session, [token], [-1], 0)
        session.commit([0])
    assert [session.reachable(length) for length in (200, 199, 198, 162, 129)] == [200, 199, 163, 130, 125]
    fork = session.fork(180)
    assert len(fork.tokens) == 163
    assert_goes_on_plainly(fork, plain)
    assert session.rewind(140) == 130
    assert_goes_on_plainly(session, plain)
    assert session.rewind(99) == 90
    assert_goes_on_plainly(session, plain)
    assert session.rewind(89) == 0
    prefill(session, tokens[:10])
    assert_goes_on_plainly(session, plain)
    assert len(fork.tokens) == 163
    assert_goes_on_plainly(fork, plain)


def test_states_of_a_reading(path_of: Callable[[str], Path]) -> None:
    """However long it is, one is left, and those that are kept, the closer to each other the nearer the end is."""
    model = _core.Model(path_of("lfm2"))
    # layers; taps before a row, channels; two states and inputs of few rows; bytes
    assert model.kept_state_bytes == 2 * 2 * 32 * 4
    assert model.state_bytes == 2 * model.kept_state_bytes + 2 * 32 * 32 * 4
    session = Session(model)
    tokens = np.random.default_rng(3).integers(0, 4, 400)
    prefill(session, tokens)
    assert session.num_bytes == 400 * model.cell_bytes + model.kept_state_bytes

    def kept(most: int, anchor: int = -1) -> list[int]:
        session.rewind(0)
        session.keep_states(range(10, 400, 10), most, anchor)
        prefill(session, tokens)
        evaluate(session, [1], [-1], 0)
        session.commit([0])
        return sorted({session.reachable(length) for length in range(400)} - {0})

    assert kept(4) == [310, 360, 380, 390]
    row = 2 * 32 * 4
    assert session.num_bytes == 401 * model.cell_bytes + 5 * model.kept_state_bytes + row
    assert [kept(most, anchor=50) for most in (4, 2, 1)] == [[50, 360, 380, 390], [50, 390], [390]]
    with pytest.raises(ValueError, match="most must be at least 0"):
        session.keep_states([1], -1)


def test_pending_rows_have_a_bound(path_of: Callable[[str], Path]) -> None:
    model, plain = _core.Model(path_of("lfm2")), Plain(path_of("lfm2"))
    session = Session(model)
    tokens = np.random.default_rng(4).integers(0, 4, 1300)
    chain = np.arange(-1, 1299)
    with pytest.raises(ValueError, match="has 512 pending rows at most"):
        evaluate(session, tokens, chain, 0)
    assert (session.num_pending, len(session.tokens)) == (0, 0)
    prefill(session, tokens)
    in_trees = Session(model)
    for first in range(0, 1300, MOST_PENDING):
        piece = tokens[first : first + MOST_PENDING]
        evaluate(in_trees, piece, chain[: len(piece)], 0)
        in_trees.commit(range(len(piece)))
    for text in (session, in_trees):
        assert text.tokens.tolist() == tokens.tolist()
        assert_goes_on_plainly(text, plain)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_memory_is_given_back_by_texts_that_go_back(tmp_path: Path) -> None:
    """Inputs of rows of a large tree, where no later pass has as many."""
    shape = RandomModel(
        "qwen35", layers=3, recurrent=(0, 1, 2), width=32, heads=2, kv_heads=1, delta_heads=(16, 64, 64), context=2000
    )
    model = _core.Model(write(tmp_path / "model.gguf", shape), num_threads=1)
    tokens = np.random.default_rng(6).integers(0, 4, 500)
    texts = [Session(model) for _ in range(5)]
    before = 0
    for session in texts:
        prefill(session, tokens)
        evaluate(session, [1] * 200, [-1] * 200, 0)
        session.rewind(0)
        prefill(session, tokens[:1])
        evaluate(session, [1], [-1], 0)
        session.commit([0])
        before = before or held()  # the first text brings what passes need
    # A text's inputs took 25 MB; what else a process holds varies by a few.
    assert held() - before < sum(session.num_bytes + (8 << 20) for session in texts[1:])
    assert all(session.num_bytes <= model.state_bytes + 3 * model.cell_bytes for session in texts)


def test_states_out_of_proportion_are_refused(tmp_path: Path) -> None:
    narrow: dict[str, Any] = {"width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 32, "quantization": "Q4_0"}
    shape = RandomModel("qwen35", layers=17, recurrent=tuple(range(16)), delta_heads=(1, 4, 1024), **narrow)
    with pytest.raises(ModelError, match=r"would take \d+ MiB of memory for a file of"):
        _core.Model(write(tmp_path / "model.gguf", shape))


@pytest.mark.parametrize("name", ["lfm2", "nemotron_h"])
def test_a_long_reading_hands_out_the_hidden_states_of_all_its_rows(path_of: Callable[[str], Path], name: str) -> None:
    model = _core.Model(path_of(name))
    model.tap([1, 3], all_rows=True)
    tokens = np.random.default_rng(7).integers(0, 4, MOST_PENDING + 100)
    session, in_pieces = Session(model), Session(model)
    prefill(session, tokens)
    states = []
    for first in range(0, len(tokens), 200):
        prefill(in_pieces, tokens[first : first + 200])
        states.append(in_pieces.hidden.numpy())
    np.testing.assert_array_equal(session.hidden.numpy(), np.concatenate(states))


def test_stretching_is_for_timing_alone(path_of: Callable[[str], Path]) -> None:
    model, plain = _core.Model(path_of("lfm2")), Plain(path_of("lfm2"))
    session = Session(model)
    prefill(session, [1, 2, 3])
    session.stretch(100)
    evaluate(session, [1], [-1])
    assert np.isfinite(session.logits(0)).all()
    assert session.rewind(0) == 0
    prefill(session, [1, 2])
    assert_goes_on_plainly(session, plain)
