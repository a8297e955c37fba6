"""SmolLM2, a trained model: our numbers beside llama.cpp's and exact ones, and staged decoding beside plain."""

from __future__ import annotations

import numpy as np
import pytest
from support import paths
from support.family_reference import FamilyReference, log_softmax
from support.logits import llama_logits, model_logits

import pystaged
from pystaged._core import Model, Session, Tokenizer
from pystaged.bench.pairs import continuation
from pystaged.decoding.context import Context
from pystaged.options.config import SamplingConfig

QUESTIONS = [
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "Why do cats purr?",
    "How does a bicycle stay upright?",
    "Translate 'good morning' into Spanish.",
]
PROMPTS = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
ANSWER = 4  # tokens that are judged with each prompt


@pytest.mark.slow
def test_beside_exact_logits() -> None:
    """As near to doubles as llama.cpp, and the same choice where these are sure."""
    path = paths.smollm2()
    model, tokenizer, texts = Model(path), Tokenizer(path), list[list[int]]()
    decoder = Context(Session(model, 256))
    for prompt in PROMPTS:  # each with the beginning of the model's own answer
        tokens = tokenizer.encode(prompt)
        texts.append([*tokens.tolist(), *continuation(decoder, tokens, SamplingConfig(), ANSWER)])
    exact_model = FamilyReference(path)
    our_error, their_error, same, clear = list[float](), list[float](), 0, 0
    for text, theirs in zip(texts, llama_logits(path, texts), strict=True):
        exact = log_softmax(exact_model.logits(text))
        ours = log_softmax(model_logits(model, text))
        reference = log_softmax(theirs)
        likely = exact > np.log(1e-3)
        our_error += np.abs(ours - exact)[likely].tolist()
        their_error += np.abs(reference - exact)[likely].tolist()
        sure = np.ptp(np.partition(exact, -2)[:, -2:], axis=-1) > 0.2  # of the likeliest two
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
