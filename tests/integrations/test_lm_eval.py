"""The model for lm-evaluation-harness, without the harness; with it in server/test_suites.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pystaged

TEXTS = ["The tree stands", "over the river and out", "one"]


def windows(tokens: list[int], prefix: int, most: int, context: int) -> Iterator[tuple[list[int], list[int]]]:
    """lm_eval's, for windows that do not overlap."""
    assert context == 1
    tokens = [prefix, *tokens]
    for first in range(0, len(tokens) - 1, most):
        yield tokens[first : first + most], tokens[first + 1 : first + most + 1]


@pytest.fixture
def make(random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    parts: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.__main__": {"cli_evaluate": None},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": object},
        "lm_eval.api.registry": {"register_model": lambda _: lambda kind: kind},
    }
    disjoint = {"make_disjoint_window": lambda pair: (pair[0][:1], pair[1])}
    parts["lm_eval.utils"] = {"get_rolling_token_windows": windows, **disjoint}
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "pystaged.integrations.lm_eval", raising=False)
    kind = import_module("pystaged.integrations.lm_eval").LmEvalModel
    path = random_gguf("F32", context=96)
    yield lambda **options: kind(model=str(path), draft="none", recycle=False, report=lambda _: None, **options)
    sys.modules.pop("pystaged.integrations.lm_eval")


@pytest.fixture
def engine(random_gguf: Callable[..., Path]) -> Iterator[pystaged.Engine]:
    with pystaged.load(random_gguf("F32", context=96), draft=None, recycle=False, report=lambda _: None) as engine:
        yield engine


def asked(*arguments: Any) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


@pytest.mark.parametrize("batch_size", [1, 16, "auto"])
def test_log_probabilities_are_the_engines(
    make: Callable[..., Any], engine: pystaged.Engine, batch_size: int | str
) -> None:
    model = make(batch_size=batch_size)
    pairs = [(text, model.tok_encode(text), model.tok_encode(" the house")) for text in TEXTS]
    pairs.append(("cut", [5] * 90, [6] * 10))
    for (total, greedy), (_, context, more) in zip(model._loglikelihood_tokens(pairs), pairs, strict=True):
        tokens = [*context, *more][-96:]
        assert total == sum(engine.score(tokens).logprobs[-len(more) :].tolist())
        expected = engine.generate(tokens[: -len(more)], max_tokens=len(more), speculate=False).tokens
        assert greedy == (expected == more)
    best = engine.generate(TEXTS[0], max_tokens=3).tokens
    assert model._loglikelihood_tokens([("", model.tok_encode(TEXTS[0]), best)])[0][1]
    (found,) = model.loglikelihood_rolling([asked("A long text. " * 30)])
    tokens = model.tok_encode("A long text. " * 30)
    parts = windows(tokens, model.prefix_token_id, 95, 1)
    assert found == sum(sum(engine.score([a[0], *b]).logprobs[1:].tolist()) for a, b in parts)


def test_a_question_is_read_once(make: Callable[..., Any]) -> None:
    model = make(batch_size=16)
    question = [5, *range(100, 175)]
    engine, answers = model._engine, [[200, 201, i] for i in range(8)]
    model._loglikelihood_tokens([("", question, answer) for answer in answers])
    # Rows: the question and the rest of each answer, whose last token begins the next step.
    assert engine.passes.rows <= len(question) + 8 * 4
    assert engine.passes.rows >= len(question) + 8 * 2


def test_texts_and_the_hash_of_all_results(make: Callable[..., Any], engine: pystaged.Engine) -> None:
    stop = engine.generate(TEXTS[1], max_tokens=20).text[6:8]
    kwargs: list[dict[str, Any]] = [
        {"until": [], "max_gen_toks": 9},
        {"until": stop, "max_gen_toks": 20},
        {"max_gen_toks": 9, "until": [], "do_sample": True, "temperature": 0.7},
    ]
    requests = [asked(*pair) for pair in zip(TEXTS, kwargs, strict=True)]
    first, second = make(batch_size=1), make(batch_size=16)
    expected = [
        engine.generate(TEXTS[0], max_tokens=9).text,
        engine.generate(TEXTS[1], max_tokens=20, stop=[stop]).text,
        engine.generate(TEXTS[2], max_tokens=9, temperature=0.7, seed=0).text,
    ]
    assert first.generate_until(requests) == expected
    assert second.generate_until(requests[::-1]) == expected[::-1]
    assert first.get_model_info() == second.get_model_info()
    first.generate_until(requests[:1])
    assert first.get_model_info()["results_sha256"] != second.get_model_info()["results_sha256"]


def test_a_template_that_writes_the_first_token(make: Callable[..., Any]) -> None:
    model = make()
    tokenizer = SimpleNamespace(adds_bos=True, bos=7, encode=lambda _, special: np.array([7] * special + [7, 8]))
    model._engine = SimpleNamespace(tokenizer=tokenizer)
    assert model.tok_encode("<s>a") == model.tok_encode("<s>a", False) == [7, 8]
    assert model.tok_encode("<s>a", True) == [7, 7, 8]


def test_answers_that_fill_the_context(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="answers of 96 tokens leave no room for prompts in a context of 96"):
        make().generate_until([asked("a", {"max_gen_toks": 96})])


def test_batch_sizes_out_of_range(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="batch_size must be 1 to 64, or auto, not 65"):
        make(batch_size=65)
