"""The logits are GPT-2's: against plain numpy on random models, against llama.cpp on the bundled target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.family_reference import FamilyReference
from support.logits import engine_logits, llama_logits, trained_tokens

from pystaged import _core
from pystaged.bench.prompts import load_questions
from pystaged.loading import names
from pystaged.loading.quantize import quantize

NUM_WINDOWS, WINDOW = 1, 160


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie": False},
        {"width": 33, "heads": 3, "layers": 1, "vocab_size": 257},
        {"width": 40, "heads": 5, "tie": False, "vocab_size": 270},
        {"width": 96, "heads": 1, "layers": 5},
        {"width": 320, "heads": 5, "layers": 3, "tie": False},
    ],
    ids=["tied", "separate", "odd-width", "heads-of-8", "one-head", "heads-of-64"],
)
def test_random_models_against_numpy(random_gguf: Callable[..., Path], shape: dict[str, Any]) -> None:
    path = random_gguf("F32", **shape)
    tokens = np.random.default_rng(0).integers(0, 257, 96).tolist()
    expected = FamilyReference(path, half=False).logits(tokens)
    assert expected.std() > 0.1
    assert np.abs(engine_logits(path, tokens) - expected).max() <= 1e-3


@pytest.fixture(scope="module")
def windows(bundled_target: Path) -> list[list[int]]:
    """Stretches of real code."""
    text = "\n".join(question.text for question in load_questions(names.bundled_file(names.BUNDLED_PROMPTS)))
    tokens = _core.Tokenizer(str(bundled_target)).encode(text).tolist()
    return [tokens[start : start + WINDOW] for start in range(0, NUM_WINDOWS * WINDOW, WINDOW)]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["F32", "Q4_0"])
def test_bundled_target_against_llama_cpp(
    bundled_target: Path,
    tmp_path: Path,
    windows: list[list[int]],
    quantization: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "llama-cpp-python")
    path = tmp_path / "target.gguf"
    quantize(bundled_target, path, quantization, allow_requantize=True)
    tokens = trained_tokens(bundled_target)
    actual = np.concatenate([engine_logits(path, window) for window in windows])[:, tokens]
    expected = np.concatenate(llama_logits(path, windows))[:, tokens]
    assert np.abs(actual - expected).mean() <= 0.05
    same = actual.argmax(axis=1) == expected.argmax(axis=1)
    if quantization == "F32":
        assert same.mean() >= 0.99
        return
    # Both engines round activations to int8, and each lands as far from the exact logits as the other; so they may
    # choose differently where the two best tokens are closer than that, about one position in eighty on this model.
    exact = np.concatenate([FamilyReference(path, half=False).logits(window) for window in windows])[:, tokens]
    assert np.abs(actual - exact).mean() <= 1.05 * np.abs(expected - exact).mean()
    second, first = np.sort(exact, axis=1)[:, -2:].T
    clear = first - second > 0.2
    assert clear.mean() > 0.8
    assert same[clear].mean() >= 0.99
