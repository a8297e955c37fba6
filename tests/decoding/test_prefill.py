"""How a text begins: scores of its prompt, a cold start, a prediction. None of it changes the text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pystaged
from pystaged.decoding.policy import FixedPolicy
from pystaged.decoding.requests import Logprobs
from pystaged.engine import Engine
from pystaged.options.config import GenerationConfig

PROMPTS = ["the tree then " * 12, "a", "0123456789" * 30, "the tree then " * 11 + "or"]


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with pystaged.load(path, policy=FixedPolicy(1, 8, 8)) as engine:
        yield engine


@pytest.mark.parametrize("prompt", PROMPTS)
def test_scores_of_a_prompt_are_those_of_score(engine: Engine, prompt: str) -> None:
    plain = engine.generate(prompt, max_tokens=8, logprobs=2)
    result = engine.generate(prompt, max_tokens=8, logprobs=2, prompt_logprobs=3)
    score = engine.score(prompt)
    assert result.prompt_logprobs is not None
    assert [each.token for each in result.prompt_logprobs] == score.tokens[1:]
    assert [each.logprob for each in result.prompt_logprobs] == pytest.approx(score.logprobs[1:], abs=2e-6)
    assert (result.tokens, result.logprobs) == (plain.tokens, plain.logprobs)
    assert plain.prompt_logprobs is None


def test_the_likeliest_tokens_of_a_prompts_places_are_the_models_own(engine: Engine) -> None:
    """In each place those that the model would have gone on with, with the very same numbers."""
    whole = engine.generate("the tree", max_tokens=16, logprobs=4)
    tokens = engine.encode("the tree").tolist()
    again = engine.generate([*tokens, *whole.tokens], max_tokens=1, prompt_logprobs=4)
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs[len(tokens) - 1 :] == whole.logprobs
    for each in again.prompt_logprobs[len(tokens) - 1 :]:
        assert each.top[0].logprob == each.logprob  # greedy: equal floats, not close ones


@pytest.mark.parametrize("start", [0, 1, 2, 69, 70, 71, 79, 80, 90])
def test_tokens_before_the_first_score_are_reused(engine: Engine, start: int) -> None:
    prompt = [*range(100, 170), *range(200, 210)]
    whole = engine.generate(prompt, max_tokens=2, prompt_logprobs=2)
    again = engine.generate(prompt, max_tokens=2, prompt_logprobs=2, prompt_logprobs_start=start)
    assert whole.prompt_logprobs is not None
    assert again.prompt_logprobs == whole.prompt_logprobs[max(0, start - 1) :]
    assert (whole.stats.reused_tokens, again.stats.reused_tokens) == (0, max(0, min(start, 80) - 1))
    cold = engine.generate(prompt, max_tokens=2, prompt_logprobs=2, prompt_logprobs_start=start, reuse=False)
    assert (cold.prompt_logprobs, cold.stats.reused_tokens) == (again.prompt_logprobs, 0)
    assert again.tokens == cold.tokens == whole.tokens


def test_scores_are_the_same_in_a_crowd(engine: Engine) -> None:
    alone = [engine.generate(prompt, max_tokens=4, prompt_logprobs=2) for prompt in PROMPTS]
    together = engine.generate(PROMPTS, max_tokens=4, prompt_logprobs=2)
    assert [each.prompt_logprobs for each in together] == [each.prompt_logprobs for each in alone]
    assert [each.tokens for each in together] == [each.tokens for each in alone]


def test_no_more_is_predicted_than_a_text_can_have(engine: Engine) -> None:
    config = GenerationConfig(prediction="the tree then " * 500)
    assert len(engine.start("a", config).prediction) == engine.n_ctx
    ids = GenerationConfig(prediction=[5] * 2000)
    assert engine.start("a", ids).prediction == [5] * engine.n_ctx


def test_scores_so_far_while_another_thread_reads_the_prompt(engine: Engine) -> None:
    class Growing(list[Logprobs]):
        """Has one more whenever it is looked through."""

        def __iter__(self) -> Iterator[Logprobs]:
            self.append(self[0])
            return super().__iter__()

    sequence = engine.start([5] * 8, GenerationConfig(prompt_logprobs=0))
    sequence._prompt_logprobs = Growing([(-1.0, [], [])])
    scores = sequence.result().prompt_logprobs
    assert scores is not None
    assert len(scores) == 2


@pytest.mark.parametrize("options", [{"repeat_penalty": 1.5}, {"temperature": 1.0, "seed": 5}])
def test_a_right_prediction_saves_steps(engine: Engine, options: dict[str, float]) -> None:
    prompt = "a story: "
    plain = engine.generate(prompt, max_tokens=48, speculate=False, **options)  # type: ignore[arg-type]
    told = engine.generate(prompt, max_tokens=48, prediction=plain.tokens, **options)  # type: ignore[arg-type]
    assert told.tokens == plain.tokens
    assert told.stats.steps < plain.stats.steps
    assert told.stats.steps <= 16


def test_a_wrong_prediction_changes_nothing(engine: Engine) -> None:
    plain = engine.generate("a story: ", max_tokens=24)
    for prediction in ("quite something else", np.arange(40).tolist(), ""):
        assert engine.generate("a story: ", max_tokens=24, prediction=prediction).tokens == plain.tokens


def test_what_cannot_be_predicted_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        engine.generate("a", prediction=[10**6])
    with pytest.raises(TypeError, match="prediction must be text or token ids"):
        engine.generate("a", prediction=b"text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prediction is not valid Unicode"):
        engine.generate("a", prediction="\ud800")
    with pytest.raises(ValueError, match="prompt_logprobs must be between 0 and"):
        engine.generate("a", prompt_logprobs=-1)
