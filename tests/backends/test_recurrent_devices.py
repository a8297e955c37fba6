"""Recurrent layers by libllama: whatever a text went through, it goes on as our kernels decode its tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device import DEVICE, GPU_LAYERS, gap_alone
from support.families import CASES
from support.family_reference import log_softmax
from support.libraries import LLAMA_TOLERANCE
from support.logits import llama_context, llama_pass, model_logits
from support.plain import Plain
from support.random_models import write
from support.steps import evaluate, path_to, prefill, verify

import pystaged
from pystaged import FixedPolicy
from pystaged._core import Model, RecycledCandidates, Sampling, Session, Tokenizer, Work, run
from pystaged.bench.pairs import continuation, reckoned
from pystaged.decoding.context import Context
from pystaged.decoding.policy import GainPolicy
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import lookups
from pystaged.drafting.model import ModelProposer
from pystaged.options.config import SamplingConfig
from pystaged.sampling.binding import bind

NAMES = ("lfm2", "qwen35", "granitehybrid", "nemotron_h", "falcon-h1")
HYBRIDS = {name: CASES[name] for name in NAMES}
GO_BACK = {"lfm2": 7, "qwen35": 7, "granitehybrid": 0, "nemotron_h": 7, "falcon-h1": 0}  # rows that libllama takes back
TOLERANCE = 0.02  # ggml's attention sums in float16 where a pass has few rows


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("recurrent")

    @cache
    def make(name: str, quantization: str = "F32") -> Path:
        return write(folder / f"{name}.{quantization}", replace(HYBRIDS[name], quantization=quantization))

    return make


def load(path: Path, **options: Any) -> pystaged.Engine:
    # ggml's threads wait for each other busily, which takes long on a busy machine.
    return pystaged.load(path, **{"draft": None, "num_threads": 1} | options)


def on_device(path: Path) -> Model:
    return Model(path, num_threads=1, device=DEVICE)


def assert_goes_on_plainly(session: Session, plain: Plain) -> None:
    """A chain behind the text has the logits of single rows."""
    committed, tokens = session.tokens.tolist(), [3, 1, 0, 2, 1][: session.most_pending]
    evaluate(session, tokens, range(-1, len(tokens) - 1))
    for row in range(len(tokens)):
        expected = plain([*committed, *tokens[: row + 1]])
        assert np.abs(log_softmax(session.logits(row)) - log_softmax(expected)).max() <= TOLERANCE
    session.discard()


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_texts_of_one_pass_go_back_each_to_its_own_state(path_of: Callable[..., Path], name: str) -> None:
    model, sizes = on_device(path_of(name)), (8, 3, 8)
    chains = [[(7 * text + i) % 50 for i in range(size)] for text, size in enumerate(sizes)]
    for order in permutations(range(3)):
        sessions = [Session(model, 64) for _ in sizes]
        for text, session in enumerate(sessions):
            prefill(session, [text + 1, 5])
        parents = [range(-1, size - 1) for size in sizes]
        run([Work.propose(sessions[i], chains[i], parents[i], sizes[i], 0, Sampling()) for i in order])
        for session, chain in zip(sessions, chains, strict=True):
            session.commit([0])
            alone = Session(model, 64)
            prefill(alone, [*session.tokens[:2], chain[0]])
            for each in (session, alone):
                evaluate(each, [9], [-1])
            assert np.abs(log_softmax(session.logits(0)) - log_softmax(alone.logits(0))).max() <= TOLERANCE
            session.close()
            alone.close()


@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_a_text_against_our_kernels_and_llama_cpp(path_of: Callable[..., Path], name: str, quantization: str) -> None:
    """A reading, and then passes of as many rows as libllama can take back, and one; llama.cpp in the same ones."""
    path, size = path_of(name, quantization), 1 + GO_BACK[name]
    tokens = np.random.default_rng(0).integers(0, 257, 60).tolist()
    own, session = model_logits(Model(path), tokens)[20:], Session(on_device(path))
    assert session.most_pending == size
    found, expected = [], []
    prefill(session, tokens[:20])
    with llama_context(path, GPU_LAYERS, num_threads=1) as context:
        llama_pass(context, tokens[:20], 0)
        for first in range(20, 60, size):
            piece = tokens[first : first + size]
            evaluate(session, piece, range(-1, len(piece) - 1))
            found.append(np.stack([session.logits(row) for row in range(len(piece))]))
            session.commit(range(len(piece)))
            expected.append(llama_pass(context, piece, first))
    logits = np.concatenate(found)
    assert logits.std() > 0.1
    assert np.abs(logits - np.concatenate(expected)).max() <= LLAMA_TOLERANCE
    # ggml rounds quantized products otherwise than our kernels do.
    tolerance = TOLERANCE if quantization == "F32" else 0.2
    assert np.abs(log_softmax(logits) - log_softmax(own)).max() <= tolerance


@pytest.mark.parametrize("name", NAMES)
def test_random_schedules(path_of: Callable[..., Path], name: str) -> None:
    """A text that reads, verifies, drafts, commits, goes back and forks; some passes fail."""
    generator, path = np.random.default_rng(1), path_of(name)
    model, plain = on_device(path), Plain(path)
    session = Session(model)
    kinds = ["read", "verify", "draft", "back", "fork", "fail"]
    for kind in [*kinds, *generator.choice(kinds, 18, p=[0.25, 0.25, 0.2, 0.1, 0.1, 0.1])]:
        committed = session.tokens.tolist()
        session.keep_states(len(committed) + generator.integers(-5, 40, 3), int(generator.integers(4)))
        size = int(generator.integers(1, 1 + session.most_pending))
        if kind == "read":  # perhaps in two passes
            prefill(session, generator.integers(0, 4, generator.choice([size, 3 * size, 80])))
        elif kind == "verify":
            sampling = Sampling(temperature=2.0, seed=size, top_k=4)
            verify(session, generator.integers(0, 4, size), range(-1, size - 1), sampling)
        elif kind == "draft":  # in passes that begin behind any row, of which a path is kept
            parents: list[int] = []
            size = min(size, session.most_pending // 3)
            for _ in range(3 if size else 0):
                begin = int(generator.integers(-1, len(parents))) if parents else -1
                rows = [begin, *range(len(parents), len(parents) + size - 1)]
                evaluate(session, generator.integers(0, 4, size), rows, 0)
                parents += rows
            session.commit(path_to(int(generator.integers(-1, len(parents))), parents))
        elif kind == "back":
            asked = int(generator.integers(0, len(committed) + 1))
            assert session.rewind(asked) == len(session.tokens) <= asked
            assert session.tokens.tolist() == committed[: len(session.tokens)]
        elif kind == "fork":
            asked = int(generator.integers(0, len(committed) + 1))
            other, session = session, session.fork(asked)
            assert session.tokens.tolist() == committed[: other.reachable(asked)]
            assert_goes_on_plainly(other, plain)
        else:
            with pytest.raises(ValueError, match="outside the vocabulary"):
                verify(session, [1, 10000], [-1, 0], Sampling())
            assert session.tokens.tolist() == committed
        assert_goes_on_plainly(session, plain)


def test_where_a_text_can_go_back_to(path_of: Callable[..., Path]) -> None:
    """To every position of the last pass, if it was a chain, to states that were kept, else to its beginning."""
    path = path_of("qwen35")
    plain, tokens = Plain(path), np.random.default_rng(2).integers(0, 4, 120)
    session = Session(on_device(path))
    session.keep_states([30, 70, 90, 500], 2)
    prefill(session, tokens[:100])
    assert [session.reachable(length) for length in (100, 93, 92, 89, 69)] == [100, 93, 90, 70, 0]
    evaluate(session, tokens[100:108], range(-1, 7), 0)
    session.commit(range(8))
    assert [session.reachable(length) for length in range(100, 109)] == [90, *range(101, 109)]
    assert session.rewind(103) == 103
    assert_goes_on_plainly(session, plain)
    assert session.reachable(102) == 90
    assert_goes_on_plainly(session.fork(95), plain)
    assert session.rewind(80) == 70
    assert_goes_on_plainly(session, plain)
    assert session.rewind(20) == 0
    prefill(session, tokens[:10])
    assert_goes_on_plainly(session, plain)


def test_a_failed_step_leaves_no_states(path_of: Callable[..., Path]) -> None:
    """A text that was read in it, and then is another one, does not go back to a state of the first."""
    path = path_of("lfm2")
    model, plain = on_device(path), Plain(path)
    old, new = np.random.default_rng(3).integers(0, 4, (2, 120))
    session, other = Session(model), Session(model)
    session.keep_states([100], 4)
    prefill(other, [1, 2])
    sampling = bind(SamplingConfig(logit_bias={0: -math.inf}), Tokenizer(os.fsencode(path)), 2)
    mask = np.zeros((1, (model.vocab_size + 31) // 32), np.uint32)
    mask[0, 0] = 1  # the same token
    with pytest.raises(ValueError, match="exclude all tokens"):
        run([Work.read(session, old), Work.verify(other, [3], [-1], sampling.native, masks=mask)])
    prefill(session, new)
    assert session.rewind(100) == 100
    assert_goes_on_plainly(session, plain)


def test_chains_alone(path_of: Callable[..., Path]) -> None:
    model = on_device(path_of("lfm2"))
    session = Session(model)
    assert (model.is_chained, model.most_pending) == (True, 8)
    with pytest.raises(ValueError, match="evaluates chains of a model with recurrent layers: row 2 has parent 0"):
        evaluate(session, [1, 2, 3], [-1, 0, 0])
    with pytest.raises(ValueError, match="has 8 pending rows at most"):
        evaluate(session, range(9), range(-1, 8))
    assert session.num_pending == 0


def test_memory_of_states(path_of: Callable[..., Path]) -> None:
    """A state for every row that is taken back, and one more; a few bytes more than on the CPU."""
    path = path_of("lfm2")
    model, layers, taps, width = on_device(path), 2, 3, 64
    assert Model(path).kept_state_bytes == layers * (taps - 1) * width * 4
    assert 0 <= model.kept_state_bytes - Model(path).kept_state_bytes < 200
    assert model.state_bytes == 8 * model.kept_state_bytes
    session = Session(model)
    session.keep_states([5], 1)
    prefill(session, range(9))
    assert session.num_bytes == 9 * model.cell_bytes + model.state_bytes + model.kept_state_bytes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_staged_decoding_is_the_models_own(path_of: Callable[..., Path], name: str, temperature: float) -> None:
    """Of several texts at once, and behind one that is cancelled; a later prompt goes on from a kept state."""
    prompt = [*range(40, 60)] * 4
    options = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    with load(path_of(name), device=DEVICE, policy=FixedPolicy(4, 5, 12)) as engine:
        plain = engine.generate(prompt, speculate=False, **options)
        results = engine.generate(prompt, n=3, prediction=plain.tokens, **options)
        with engine.stream(prompt, **options) as cancelled:
            next(iter(cancelled))
        results.append(engine.generate(prompt, **options | {"seed": 4}))
        assert engine.generate([*prompt, 8], max_tokens=1).stats.reused_tokens > 0
        assert (sum(result.stats.accepted for result in results) > 0) == (GO_BACK[name] > 0)
        session = Session(engine.model)
        for result in results:
            assert len(result.tokens) > 20
            sampling = SamplingConfig(temperature, seed=result.seed)
            assert gap_alone(session, np.array(prompt, np.int32), result.tokens, sampling) < 2 * TOLERANCE


@pytest.mark.parametrize("name", ["lfm2", "granitehybrid"])
def test_a_text_is_scored_in_the_pieces_that_fit(path_of: Callable[..., Path], name: str) -> None:
    prompt = np.random.default_rng(3).integers(0, 257, 30).tolist()
    with load(path_of(name), device=DEVICE) as engine, load(path_of(name)) as exact:
        found, expected = engine.score(prompt).logprobs, exact.score(prompt).logprobs
    assert np.abs(found[1:] - expected[1:]).max() <= TOLERANCE


def test_a_draft_on_a_device(path_of: Callable[..., Path]) -> None:
    """It drafts chains, too, for a target that takes trees."""
    path = path_of("qwen35")
    options = {"max_tokens": 30, "ignore_eos": True}
    with load(path) as engine:
        expected = engine.generate([5, 6, 7], **options).tokens
    with load(path, draft=path, draft_device=DEVICE, policy=FixedPolicy(4, 5, 12)) as engine:
        result = engine.generate([5, 6, 7], **options)
    assert result.tokens == expected
    assert result.stats.accepted > 20


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.7, seed=3)], ids=["greedy", "sampled"])
def test_a_recurrent_draft_on_a_device_drafts_chains_beside_n_grams(
    path_of: Callable[..., Path], sampling: SamplingConfig
) -> None:
    target, draft = Model(path_of("lfm2"), num_threads=1), on_device(path_of("lfm2"))
    of_target, of_draft = reckoned(10)
    proposers = [*lookups(recycled=RecycledCandidates()), ModelProposer(Session(draft, 200), of_draft)]
    drafter = TreeDrafter(proposers, GainPolicy(of_target), target.vocab_size, chains=True)
    prompt = np.arange(10, dtype=np.int32)
    plain = continuation(Context(Session(target, 200)), prompt, sampling, 100)
    assert continuation(Context(Session(target, 200), drafter), prompt, sampling, 100) == plain
    assert drafter.work()["draft"].passes > 10
