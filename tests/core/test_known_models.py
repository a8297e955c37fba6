"""Skeletons of popular models: each loads, generates the same staged and plain, and is computed as libllama does.

Of each, data/known_models.jsonl has the true flags, ratios and special tokens: the architecture, the period of layers,
heads and their width, RoPE, windows, scales, how many experts there are and how they are chosen, the tied head, the
pre-tokenizer, and how texts begin and end; where its numbers are published ("load log" is what llama.cpp prints of a
file), and what no source told. Made up are: the width of layers, of feed-forward networks and of experts, how often
layers repeat, the words, and all weights. Of heads whose number the width of layers gives, and of Mamba-2's, the ratios
to their groups are true.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.known_models import MODELS, SIZE
from support.libraries import LLAMA_TOLERANCE
from support.logits import llama_context, llama_pass, model_logits
from support.plain import staged_as_plain
from support.random_models import write

from pystaged._core import Model, Tokenizer

TOKENS = np.random.default_rng(5).integers(3, 250, 80).tolist()
GELU = 20  # times the tolerance: ggml looks it up in a table of float16


@pytest.mark.parametrize("name", MODELS)
def test_a_skeleton(tmp_path: Path, name: str) -> None:
    known = MODELS[name]
    path = write(tmp_path / "model.gguf", known.written)
    tokenizer = Tokenizer(path)
    marks = [tokenizer.encode(mark, True)[-1] for mark in (known.begins, known.ends)]
    assert [tokenizer.bos, tokenizer.eos] == marks
    assert tokenizer.adds_bos == known.adds
    ours = model_logits(Model(str(path)), TOKENS)
    assert ours.shape == (len(TOKENS), SIZE)
    with llama_context(path, n_ctx=8192, num_threads=1) as context:
        error = np.abs(ours - llama_pass(context, TOKENS, 0))
    tolerance = LLAMA_TOLERANCE * (GELU if "gemma" in known.model["family"] else 1)
    # Where two experts nearly tie, that table may decide between them: in one row here, on AVX2 alone.
    ties = 1 if "gemma" in known.model["family"] and known.model.get("experts") else 0
    assert np.count_nonzero(error.max(axis=1) > tolerance) <= ties
    assert error.mean() <= tolerance / 10
    for temperature in (0.0, 1.0):
        staged_as_plain(path, temperature=temperature, ignore_eos=True)
