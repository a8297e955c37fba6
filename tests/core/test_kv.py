"""Keys and values of eight bits: half the memory, nearly the same logits, the same exactness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.steps import evaluate, prefill

import pystaged
from pystaged import _core

CONTEXT = 600  # more than a chunk of positions
PROMPT = np.random.default_rng(0).integers(0, 300, 500, dtype=np.int32)


@pytest.fixture
def path(random_gguf: Callable[..., Path]) -> Path:
    return random_gguf("Q8_0", width=96, heads=3, context=CONTEXT)


def tree_logits(model: _core.Model, tokens: list[int], parents: list[int]) -> npt.NDArray[np.float32]:
    """Of the rows of a tree that straddles the border of a chunk."""
    session = _core.Session(model)
    prefill(session, PROMPT)
    evaluate(session, np.array(tokens, np.int32), np.array(parents, np.int32))
    return np.stack([session.logits(row) for row in range(len(tokens))])


TOKENS = list(range(20, 44))
PARENTS = [-1, *range(11), *range(3, 15)]  # a chain, and branches from its middle


def test_logits_are_nearly_those_of_f16_for_half_the_memory(path: Path) -> None:
    half, eight = _core.Model(str(path)), _core.Model(str(path), kv="q8_0")
    assert (half.kv, eight.kv) == ("f16", "q8_0")
    assert eight.cell_bytes < 0.57 * half.cell_bytes
    exact, near = tree_logits(half, TOKENS, PARENTS), tree_logits(eight, TOKENS, PARENTS)
    assert 0 < np.abs(exact - near).max() < 0.05 * exact.std()


def test_other_names_and_devices_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="f16 or q8_0, not q4_0"):
        pystaged.load(path, kv="q4_0")
    with pytest.raises(ValueError, match="for the device cpu, not ggml-cpu"):
        pystaged.load(path, kv="q8_0", device="ggml-cpu")
    with pytest.raises(ValueError, match="CPU's own kernels"):
        _core.Model(str(path), device="ggml-cpu", kv="q8_0")
