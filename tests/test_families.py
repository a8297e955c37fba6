"""Every family against llama.cpp in the same passes, on our kernels and on ggml's operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from family_reference import FamilyReference
from random_models import RandomModel, write

from pystaged._core import Model, Session, kernels, rotation
from pystaged.bench.passes import decode

Floats = npt.NDArray[np.float32]

ROWS = 64  # of a pass
GELU = {"gpt2", "starcoder2", "gemma2", "gemma3"}
LENGTH = 320

ROPE_FACTORS = np.linspace(1, 8, 16, dtype=np.float32)
LONG_ROPE = {
    "rope_factors_long.weight": np.linspace(1, 30, 8, dtype=np.float32),
    "rope_factors_short.weight": np.linspace(1, 2, 8, dtype=np.float32),
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
GRANITE = {"logit_scale": 2.0, "residual_scale": 0.8, "embedding_scale": 3.0, "attention.scale": 0.1}

CASES: dict[str, RandomModel] = {
    "gpt2": RandomModel("gpt2", kv_heads=4),
    "llama": RandomModel("llama", head_dim=32),
    "llama-untied": RandomModel("llama", tie=False, width=96, heads=6, kv_heads=3),
    "llama-biases": RandomModel("llama", biases=True),
    "llama-fused": RandomModel("llama", fused=True, biases=True, kv_heads=1),
    "llama-factors": RandomModel("llama", head_dim=32, vectors={"rope_freqs.weight": ROPE_FACTORS}),
    "llama-linear": RandomModel("llama", metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama-yarn": RandomModel("llama", head_dim=32, metadata=YARN | {"rope.freq_base": 5e4}),
    "llama-odd": RandomModel("llama", width=50, heads=5, kv_heads=1, ffn_width=70, vocab_size=301),
    "llama-no-groups": RandomModel("llama", kv_heads=4),
    "qwen2": RandomModel("qwen2", biases=True, metadata={"rope.freq_base": 1e6}),
    "qwen2-yarn": RandomModel("qwen2", biases=True, head_bias=True, tie=False, metadata=YARN),
    "qwen3": RandomModel("qwen3", head_dim=32),
    "qwen3-untied": RandomModel("qwen3", head_dim=16, tie=False, fused=True),
    "smollm3": RandomModel("smollm3", layers=5),
    "granite": RandomModel("granite", metadata=GRANITE),
    "granite-no-rope": RandomModel(
        "granite", metadata={"rope.scaling.finetuned": False, "logit_scale": 0.5}, biases=True
    ),
    "mistral3": RandomModel("mistral3", head_dim=32),
    "mistral3-yarn": RandomModel(
        "mistral3",
        metadata=YARN
        | {
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_log_multiplier": 0.5,
            "attention.temperature_scale": 0.1,
        },
    ),
    "phi3": RandomModel("phi3", fused=True),
    "phi3-long": RandomModel(
        "phi3",
        fused=True,
        tie=False,
        kv_heads=4,
        vectors=LONG_ROPE,
        metadata={
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.2,
            "attention.sliding_window": 40,
        },
    ),
    "phi3-partial": RandomModel("phi3", fused=True, rotary=8, ffn_width=70),
    "starcoder2": RandomModel("starcoder2"),
    "starcoder2-biases": RandomModel("starcoder2", biases=True, tie=False),
    "stablelm": RandomModel("stablelm", rotary=4, tie=False),
    "stablelm-parallel": RandomModel("stablelm", rotary=4, tie=False, parallel=True, own_head_norms=True, biases=True),
    "olmo2": RandomModel("olmo2", tie=False),
    "olmo2-windows": RandomModel(
        "olmo2", tie=False, layers=4, seed=1, metadata=YARN | {"attention.sliding_window": 50}
    ),
    "gemma2": RandomModel("gemma2", head_dim=32, layers=4, metadata={"attention.sliding_window": 50}),
    "gemma2-no-window": RandomModel("gemma2", metadata={"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": RandomModel("gemma3", head_dim=32, kv_heads=1, layers=7, metadata={"attention.sliding_window": 50}),
    "gemma3-linear": RandomModel(
        "gemma3",
        layers=4,
        tie=False,
        metadata={
            "attention.sliding_window": 33,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3-no-window": RandomModel("gemma3"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the file of a case."""
    folder = tmp_path_factory.mktemp("families")

    def make(case: str) -> Path:
        path = folder / f"{case}.gguf"
        return path if path.exists() else write(path, CASES[case])

    return make


@contextmanager
def llama_context(path: Path) -> Iterator[Any]:
    """A context of llama.cpp without repacked weights, of as many positions as ours."""
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, path
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 512, ROWS, ROWS
    params.swa_full = True
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, params)
    try:
        yield context
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def llama_logits(path: Path, tokens: list[int]) -> Floats:
    """Logits after each token, in passes of ROWS."""
    found = []
    with llama_context(path) as context:
        vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context))
        size = llama_cpp.llama_vocab_n_tokens(vocab)
        for first in range(0, len(tokens), ROWS):
            part = tokens[first : first + ROWS]
            decode(context, part, first)
            pointer = llama_cpp.llama_get_logits(context)
            found.append(np.ctypeslib.as_array(pointer, (len(part), size)).copy())
    return np.concatenate(found)


def our_logits(model: Model, tokens: list[int]) -> Floats:
    session = Session(model)
    session.evaluate(tokens, range(-1, len(tokens) - 1))
    return np.stack([session.logits(row) for row in range(len(tokens))])


def text(vocab_size: int, length: int = LENGTH) -> list[int]:
    tokens: list[int] = np.random.default_rng(5).integers(0, min(vocab_size, 257), length).tolist()
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_devices_against_llama_cpp(written: Callable[[str], Path], case: str) -> None:
    path, tokens = written(case), text(CASES[case].vocab_size)
    expected = llama_logits(path, tokens)
    assert expected.std() > 0.1
    found = our_logits(Model(str(path), device="ggml-cpu"), tokens)
    assert np.abs(found - expected).max() <= 1e-3


@pytest.mark.parametrize("case", CASES)
def test_kernels_against_numpy_and_llama_cpp(written: Callable[[str], Path], case: str) -> None:
    path, tokens = written(case), text(CASES[case].vocab_size)
    exact = FamilyReference(path).logits(tokens)
    found = our_logits(Model(str(path)), tokens)
    assert np.abs(found - exact).max() <= 1e-3
    # ggml looks GELU up in a table of float16, our kernels compute it.
    tolerance = 4e-3 if CASES[case].family in GELU else 1e-3
    assert np.abs(found - llama_logits(path, tokens)).max() <= tolerance


@pytest.mark.parametrize("case", CASES)
def test_trees_are_chains_on_every_kernel(written: Callable[[str], Path], case: str) -> None:
    """The same bits whatever a row is batched with, for every kernel and number of threads."""
    path, tokens = written(case), text(CASES[case].vocab_size, 80)
    rng = np.random.default_rng(1)
    parents = [-1, *(int(rng.integers(max(-1, i - 4), i)) for i in range(1, 24))]
    branches = rng.integers(0, 257, 24).tolist()
    expected: Floats | None = None
    for kernel in kernels():
        for threads in (1, 2, 3):
            model = Model(str(path), kernel, threads)
            session = Session(model)
            session.prefill(tokens)
            session.evaluate(branches, parents)
            found = np.stack([session.logits(row) for row in range(24)])
            if expected is None:
                expected = found
                for leaf in (23, 20, 11):
                    chain, node = [], leaf
                    while node >= 0:
                        chain.insert(0, branches[node])
                        node = parents[node]
                    alone = Session(model)
                    for token in [*tokens, *chain]:
                        alone.evaluate([token], [-1])
                        last = alone.logits(0)
                        alone.commit([0])
                    assert (last == found[leaf]).all()
            assert (found == expected).all()


@pytest.mark.parametrize("position", [0, 1, 511, 8191, 131071, 1048575])
@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6])
def test_angles(position: int, base: float) -> None:
    cosines, sines = rotation(position, 128, base)
    angles = [position * base ** (-2 * i / 128) for i in range(64)]
    # Doubles of such angles are right to 1e-10, floats of their sines to 6e-8.
    assert np.abs(cosines - [math.cos(angle) for angle in angles]).max() <= 7e-8
    assert np.abs(sines - [math.sin(angle) for angle in angles]).max() <= 7e-8
