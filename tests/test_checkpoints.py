"""Checkpoints of every family: as GGUF files they say what transformers says, to llama.cpp and to us."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import NUM_TOKENS, write_tokenizer_json
from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
from test_reference import engine_logits, llama_pass


from pystaged.loading.convert import convert
from pystaged.loading.families import FAMILIES
from pystaged.loading.quantize import quantize_checkpoint

Floats = npt.NDArray[np.float32]

TOKENS = np.random.default_rng(0).integers(0, 256, 120).tolist()
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "vocab_size": NUM_TOKENS,
    "bos_token_id": NUM_TOKENS - 1,
    "eos_token_id": NUM_TOKENS - 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": np.linspace(1, 2, 6).tolist(),
    "long_factor": np.linspace(1, 30, 6).tolist(),
    "partial_rotary_factor": 0.75,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-wide-heads": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-yarn": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "granite": ("granite", GRANITE),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-long": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64, "tie_word_embeddings": True},
    ),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return pytest.importorskip("transformers", reason="transformers is not installed")


def save(transformers: Any, folder: Path, case: str, **options: Any) -> Any:
    """A random checkpoint; returns its model."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    kind, changes = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **SMALL | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases do not show mistakes otherwise
            parameter.add_((0.3 if "norm" in name else 0.1) * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    write_tokenizer_json(folder)
    return model


def expected_logits(model: Any) -> Floats:
    import torch  # noqa: PLC0415

    with torch.no_grad():
        logits: Floats = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    assert logits.std() > 0.1
    return logits


@contextmanager
def exact_llama(path: Path) -> Iterator[Any]:
    """A context of llama.cpp with keys and values in F32."""
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts, params.n_gpu_layers = False, 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.n_threads = options.n_threads_batch = 2
    context = llama_cpp.llama_init_from_model(model, options)
    try:
        yield context
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(transformers: Any, tmp_path: Path, case: str) -> None:
    expected = expected_logits(save(transformers, tmp_path / "saved", case))
    path = tmp_path / "model.gguf"
    convert(tmp_path / "saved", path)
    with exact_llama(path) as context:
        tolerance = 1e-2 if "gemma" in case else 1e-3  # its GELU is a table of F16 numbers
        assert np.abs(llama_pass(context, TOKENS, 0) - expected).max() <= tolerance
    # Our keys and values are F16.
    assert np.abs(engine_logits(path, TOKENS) - expected).max() <= 1e-2
