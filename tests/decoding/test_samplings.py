"""Every option of a sampling: staged is plain, whatever drafts and whoever else is in the pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding import generate, table_of
from support.family_reference import log_softmax
from support.sampling import samplings
from support.steps import evaluate

import pystaged
from pystaged import Engine, FixedPolicy, GenerationResult, SamplingConfig
from pystaged._core import Model, Session, Tokenizer
from pystaged.bench.pairs import continuation, drafters
from pystaged.decoding.context import Context
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.model import ModelProposer
from pystaged.sampling.binding import bind
from pystaged.stats import GenerationStats

OPTIONS: dict[str, dict[str, Any]] = samplings("options")
TEMPERATURES = [0.0, 0.9]
PROMPTS = ["the tree then the tree ", "her hat ", "the tree then and there the tree", "o"]

every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(scope="module")
def target(path: Path) -> Model:
    return Model(str(path))


@pytest.fixture(scope="module")
def draft(random_gguf: Callable[..., Path]) -> Model:
    return Model(str(random_gguf(vocab_size=300, context=512, width=32, layers=1)))


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(str(path))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[NDArray[np.int32]]:
    return [tokenizer.encode(text) for text in PROMPTS]


def bound_runs(
    options: dict[str, Any], prompts: list[NDArray[np.int32]], tokenizer: Tokenizer
) -> list[tuple[NDArray[np.int32], SamplingConfig]]:
    """Each prompt with a seed of its own, greedy or not by turns."""
    return [
        (prompt, bind(SamplingConfig(TEMPERATURES[i % 2], seed=i, **options), tokenizer, len(prompt), logprobs=2))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
@every_option
def test_no_drafter_changes_the_text(
    options: dict[str, Any], target: Model, draft: Model, prompts: list[NDArray[np.int32]], tokenizer: Tokenizer
) -> None:
    session = Session(target)
    plain = Context(session)
    runs = bound_runs(options, prompts[1:3], tokenizer)
    expected = [continuation(plain, prompt, sampling, 16) for prompt, sampling in runs]
    ways = drafters(target, draft, table_of(prompts, tokenizer))
    for name, drafter in ways.items():
        decoder = Context(session, drafter)
        assert [continuation(decoder, prompt, sampling, 16) for prompt, sampling in runs] == expected, name


@every_option
def test_the_target_as_its_own_draft_accepts_everything(
    options: dict[str, Any], target: Model, prompts: list[NDArray[np.int32]], tokenizer: Tokenizer
) -> None:
    """A draft ranks under the same rules, with the text along its own nodes."""
    drafter = TreeDrafter([ModelProposer(Session(target))], FixedPolicy(1, 6, 6, 1), target.vocab_size)
    decoder, stats = Context(Session(target), drafter), GenerationStats()
    for prompt, sampling in bound_runs(options, prompts, tokenizer):
        for _ in generate(decoder, prompt, sampling, 24, stats=stats):
            pass
    assert stats.drafted == stats.accepted > 0
    assert stats.tokens_per_step > 4
    assert stats.acceptance_at_depth == [1.0] * len(stats.acceptance_at_depth)


@pytest.fixture(scope="module", params=["n-grams", "draft", "itself"])
def engine(request: pytest.FixtureRequest, path: Path, random_gguf: Callable[..., Path]) -> Iterator[Engine]:
    """Drafts whatever it gains."""
    small = random_gguf(vocab_size=300, context=512, width=32, layers=1)
    found = {"n-grams": None, "draft": small, "itself": path}[request.param]
    with pystaged.load(path, draft=found, policy=FixedPolicy(3, 4, 9)) as engine:
        yield engine


def told(result: GenerationResult) -> tuple[Any, ...]:
    return result.text, result.tokens, result.finish_reason, result.logprobs


@pytest.mark.slow
@every_option
def test_a_text_in_a_crowd_is_the_same(engine: Engine, options: dict[str, Any]) -> None:
    """With its log-probabilities, bit for bit."""
    sampling = SamplingConfig(0.9, seed=2, **options)
    one: dict[str, Any] = {"max_tokens": 16, "sampling": sampling, "logprobs": 3}
    alone = [engine.generate(prompt, speculate=False, **one) for prompt in PROMPTS]
    batch = engine.generate(PROMPTS, **one)
    staged = [engine.generate(prompt, **one) for prompt in PROMPTS]
    assert [told(each) for each in batch] == [told(each) for each in alone] == [told(each) for each in staged]


@pytest.mark.slow
def test_an_option_changes_the_text(engine: Engine) -> None:
    def written(**options: Any) -> list[list[str]]:
        texts = (engine.generate(PROMPTS, max_tokens=24, temperature=t, seed=2, **options) for t in TEMPERATURES)
        return [[each.text for each in several] for several in texts]

    plain = written()
    for name, options in OPTIONS.items():
        assert written(**options) != plain, name


# ---- What single options promise ----


def test_penalties_reach_into_the_prompt_and_no_further(engine: Engine) -> None:
    """An enormous penalty forbids repeating, as far as it looks back."""
    begun = engine.encode(PROMPTS[0]).tolist()
    for last_n in (4, 12):
        result = engine.generate(begun, max_tokens=30, frequency_penalty=1000.0, repeat_last_n=last_n)
        text = [*begun, *result.tokens]
        for i in range(len(begun), len(text)):
            assert text[i] not in text[max(0, i - last_n) : i]
    everywhere = engine.generate(begun, max_tokens=60, presence_penalty=1000.0, repeat_last_n=-1).tokens
    assert len({*begun, *everywhere}) == len(set(begun)) + len(everywhere)


def test_min_tokens_and_ignore_eos_keep_a_text_going(engine: Engine) -> None:
    (end,) = engine.tokenizer.end_tokens.tolist()
    eager: dict[str, Any] = {"logit_bias": {end: 1000.0}, "max_tokens": 12}
    for speculate in (False, True):
        assert engine.generate("the", speculate=speculate, **eager).tokens == []
        for least in (1, 5, 12):
            result = engine.generate("the", speculate=speculate, min_tokens=least, **eager)
            assert len(result.tokens) == least
            assert result.finish_reason == ("stop" if least < 12 else "length")
        result = engine.generate("the", speculate=speculate, ignore_eos=True, **eager)
        assert (len(result.tokens), result.finish_reason) == (12, "length")
        stopped = engine.generate("the", speculate=speculate, min_tokens=8, stop=result.text[2], **eager)
        assert stopped.finish_reason == "stop"
        assert len(stopped.tokens) < 8


def test_a_word_that_is_biased_is_written(engine: Engine) -> None:
    for key in ("e", engine.encode("e").tolist()[0], np.int64(engine.encode("e")[0])):
        assert engine.generate("the", max_tokens=5, logit_bias={key: 1000.0}).text == "eeeee"
    banned = engine.generate("the", max_tokens=30).tokens[0]
    assert banned not in engine.generate("the", max_tokens=30, logit_bias={banned: -math.inf}).tokens


# ---- Log-probabilities ----


def test_logprobs_of_pieces_and_result(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[0], max_tokens=20, temperature=0.9, logprobs=4, stop="z")
    pieces = list(stream)
    result = stream.result
    assert result.logprobs is not None
    assert [each for piece in pieces for each in piece.logprobs or ()] == result.logprobs
    assert [each.token for each in result.logprobs] == result.tokens
    session = Session(engine.model)
    begun = engine.encode(PROMPTS[0]).tolist()
    text = [*begun, *result.tokens]
    evaluate(session, text, range(-1, len(text) - 1))
    for i, each in enumerate(result.logprobs):
        logits = session.logits(len(begun) - 1 + i)
        logprobs = log_softmax(logits)
        assert each.logprob == pytest.approx(logprobs[each.token], abs=1e-5)
        assert [other.token for other in each.top] == np.argsort(-logits, kind="stable")[:4].tolist()
        assert [other.logprob for other in each.top] == pytest.approx(np.sort(logprobs)[::-1][:4], abs=1e-5)
        assert each.text == engine.tokenizer.token_bytes(each.token, True).decode("utf-8", "replace")
    assert engine.generate("the", max_tokens=3).logprobs is None
    only = engine.generate("the", max_tokens=3, logprobs=0).logprobs
    assert only is not None
    assert [each.top for each in only] == [[], [], []]
