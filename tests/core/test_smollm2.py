"""SmolLM2, a trained model: our numbers beside llama.cpp's and exact ones, and staged decoding beside plain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from support import paths
from support.family_reference import FamilyReference, log_softmax
from support.logits import llama_context, llama_pass, model_logits

import pystaged
from pystaged._core import Model, Session, Tokenizer
from pystaged.bench.pairs import continuation
from pystaged.decoding.context import Context
from pystaged.options.config import SamplingConfig

Doubles = npt.NDArray[np.float64]

QUESTIONS = [
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "Why do cats purr?",
    "How does a bicycle stay upright?",
    "Translate 'good morning' into Spanish.",
]
PROMPTS = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
ANSWER = 4  # tokens that are judged with each prompt


@pytest.fixture(scope="module")
def path() -> Path:
    return paths.smollm2()


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return Model(str(path))


@pytest.fixture(scope="module")
def texts(path: Path, model: Model) -> list[list[int]]:
    """The prompts, each with the beginning of the model's own answer."""
    tokenizer, decoder = Tokenizer(str(path)), Context(Session(model, 256))
    found = []
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt)
        found.append([*tokens.tolist(), *continuation(decoder, tokens, SamplingConfig(), ANSWER)])
    return found


@pytest.fixture
def theirs(path: Path) -> Iterator[Any]:
    """A context of llama.cpp."""
    with llama_context(path, num_threads=1) as context:
        yield context


def clear_choices(log_probs: Doubles) -> npt.NDArray[np.bool_]:
    """Rows whose likeliest token is ahead of the second by more than 0.2."""
    top_two = np.sort(np.partition(log_probs, -2, axis=-1)[:, -2:])
    return top_two[:, 1] - top_two[:, 0] > 0.2


def their_logits(context: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    return llama_pass(context, tokens, 0)


@pytest.mark.slow
def test_beside_exact_logits(path: Path, model: Model, texts: list[list[int]], theirs: Any) -> None:
    """As near to doubles as llama.cpp, and the same choice where these are sure."""
    exact_model = FamilyReference(path)
    our_error, their_error, same, clear = list[float](), list[float](), 0, 0
    for tokens in texts:
        exact = log_softmax(exact_model.logits(tokens))
        ours = log_softmax(model_logits(model, tokens))
        reference = log_softmax(their_logits(theirs, tokens))
        likely = exact > np.log(1e-3)
        our_error += np.abs(ours - exact)[likely].tolist()
        their_error += np.abs(reference - exact)[likely].tolist()
        sure = clear_choices(exact)
        same += int((ours.argmax(axis=-1) == exact.argmax(axis=-1))[sure].sum())
        clear += int(sure.sum())
    assert clear > 50
    assert same >= 0.99 * clear
    assert np.mean(our_error) <= 1.2 * np.mean(their_error)


def test_by_name() -> None:
    with pystaged.load("smollm2", draft="smollm2", n_ctx=512) as engine:
        staged, plain = (engine.generate(PROMPTS[0], max_tokens=16, speculate=speculate) for speculate in (True, False))
        likely, unlikely = (engine.score(f"The capital of France is {city}.") for city in ("Paris", "Potato"))
    assert staged.text == plain.text
    assert "Paris" in plain.text
    assert plain.finish_reason == "stop"
    assert b"".join(likely.pieces) == b"The capital of France is Paris."
    assert likely.total > unlikely.total + 2
