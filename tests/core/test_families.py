"""Every family against llama.cpp in the same passes, on our kernels and by LlamaPass."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from support.device import DEVICE, GPU_LAYERS
from support.families import CASES
from support.family_reference import FamilyReference
from support.libraries import LLAMA_TOLERANCE
from support.logits import llama_context, llama_pass, model_logits
from support.random_models import Change, RandomModel, quantize, split, write

from pystaged._core import Model, ModelError, Sampling, Session, Tokenizer, UnsupportedModelError, kernels

Floats = npt.NDArray[np.float32]

ROWS = 64  # of a pass
GELU = {"gpt2", "starcoder2", "gemma2", "gemma3", "gemma4"}
LENGTH = 192


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the file of a case."""
    folder = tmp_path_factory.mktemp("families")

    def make(case: str) -> Path:
        path = folder / f"{case}.gguf"
        return path if path.exists() else write(path, CASES[case])

    return make


def llama_logits(path: Path, tokens: list[int], gpu_layers: int = 0, rows: int = ROWS) -> Floats:
    """Logits after each token, in passes of so many rows."""
    with llama_context(path, gpu_layers, n_ctx=512, rows=ROWS, num_threads=1) as context:
        return np.concatenate(
            [llama_pass(context, tokens[first : first + rows], first) for first in range(0, len(tokens), rows)]
        )


def text(vocab_size: int, length: int = LENGTH) -> list[int]:
    tokens: list[int] = np.random.default_rng(5).integers(0, min(vocab_size, 257), length).tolist()
    return tokens


# Of each architecture the plainest; the others are slow.
OF_DEVICES = [each if "-" not in each else pytest.param(each, marks=pytest.mark.slow) for each in CASES]


@pytest.mark.parametrize("case", OF_DEVICES)
def test_devices_against_llama_cpp(written: Callable[[str], Path], case: str) -> None:
    path, tokens = written(case), text(CASES[case].vocab_size, 64)
    model = Model(str(path), num_threads=1, device=DEVICE)
    expected = llama_logits(path, tokens, GPU_LAYERS, min(ROWS, model.most_pending))
    assert expected.std() > 0.1
    found = model_logits(model, tokens)
    assert np.abs(found - expected).max() <= LLAMA_TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_kernels_against_numpy_and_llama_cpp(written: Callable[[str], Path], case: str) -> None:
    path, tokens = written(case), text(CASES[case].vocab_size)
    exact = FamilyReference(path).logits(tokens)
    found = model_logits(Model(str(path)), tokens)
    # A few keys and values round to the next float16: that shows in single logits, not in the mean.
    error = np.abs(found - exact)
    assert error.max() <= 1e-3
    assert error.mean() <= 5e-5
    # ggml looks GELU up in a table of float16, our kernels compute it.
    tolerance = 5e-3 if CASES[case].family in GELU else 1e-3
    error = np.abs(found - llama_logits(path, tokens))
    assert error.max() <= tolerance
    assert error.mean() <= tolerance / 10


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_trees_are_chains_on_every_kernel(written: Callable[[str], Path], case: str) -> None:
    """The same bits whatever a row is batched with, for every kernel and number of threads."""
    path, tokens = written(case), text(CASES[case].vocab_size, 80)
    rng = np.random.default_rng(1)
    parents = [-1, *(int(rng.integers(max(-1, i - 4), i)) for i in range(1, 24))]
    branches = rng.integers(0, 257, 24).tolist()
    expected: Floats | None = None
    for kernel in kernels():
        for threads in (1, 3):
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
                    alone.prefill(tokens[:60])
                    for token in [*tokens[60:], *chain]:
                        alone.evaluate([token], [-1])
                        last = alone.logits(0)
                        alone.commit([0])
                    assert (last == found[leaf]).all()
            assert (found == expected).all()


NEXT = RandomModel("qwen3next", layers=4, recurrent=(0, 1, 2), rotary=8, tie=False, head_dim=16)


def test_qwen3next_with_experts_against_llama_cpp(tmp_path: Path) -> None:
    """Which has mixtures of this family alone; its dense layers are those of other families."""

    def separate(tensors: dict[str, Floats]) -> None:  # as in newer files
        key_heads, value_heads, size = NEXT.delta_heads
        for layer in NEXT.recurrent:
            heads = tensors.pop(f"blk.{layer}.ssm_in.weight").reshape(key_heads, -1, NEXT.width)
            values = value_heads // key_heads * size
            parts = np.split(heads, [size, 2 * size, 2 * size + values], axis=1)
            q, k, v, gate = (part.reshape(-1, NEXT.width) for part in parts)
            tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate([q, k, v])
            tensors[f"blk.{layer}.attn_gate.weight"] = gate

    model, tokens = replace(NEXT, experts=(8, 2, 32, 32)), text(300)
    older, newer = write(tmp_path / "older.gguf", model), write(tmp_path / "newer.gguf", model, separate)
    found = model_logits(Model(older), tokens)
    assert np.abs(found - llama_logits(older, tokens)).max() <= 1e-3
    assert (model_logits(Model(newer), tokens) == found).all()


def test_a_delta_net_reads_its_input_by_four_matrices_of_four_types(tmp_path: Path) -> None:
    types = {"attn_gate": "Q5_0", "ssm_beta": "Q8_0", "ssm_alpha": "MXFP4"}
    path = write(tmp_path / "model.gguf", replace(QWEN35, quantization="Q4_0", types=types))
    tokens = text(300, 64)
    exact = FamilyReference(path).logits(tokens)
    error = np.abs(model_logits(Model(path), tokens) - exact).mean()
    assert error <= 1.1 * np.abs(llama_logits(path, tokens) - exact).mean()


def test_cells_of_latent_rows_absorbed_or_expanded(tmp_path: Path) -> None:
    """The same model as newer and as older files have it."""
    newer, older = (write(tmp_path / f"{i}.gguf", replace(DEEPSEEK, absorbed=i == 0)) for i in range(2))
    assert Model(newer).cell_bytes == 3 * 2 * (80 + 64)
    assert Model(older).cell_bytes == 3 * 2 * 4 * (48 + 32)


def test_biases_of_fused_experts(tmp_path: Path) -> None:
    def fuse(tensors: dict[str, Floats]) -> None:  # the weights alone
        for layer in range(CASES["gpt-oss"].layers):
            parts = [tensors.pop(f"blk.{layer}.ffn_{name}_exps.weight") for name in ("gate", "up")]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)

    tokens = text(300, 16)
    found = [
        model_logits(Model(write(tmp_path / "model.gguf", CASES["gpt-oss"], change)), tokens) for change in (None, fuse)
    ]
    assert (found[0] == found[1]).all()


def test_of_equal_scores_the_first_experts_are_chosen(tmp_path: Path) -> None:
    def tie(tensors: dict[str, Floats]) -> None:
        for layer in range(2):
            router = tensors[f"blk.{layer}.ffn_gate_inp.weight"]
            router[1::2] = router[::2]
            router[6] = 0  # apart from its pair

    path, tokens = write(tmp_path / "model.gguf", replace(CASES["qwen3moe"], experts=(8, 3, 32, 0)), tie), text(300)
    assert np.abs(model_logits(Model(path), tokens) - FamilyReference(path).logits(tokens)).max() <= 1e-3


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_largest_gemmas(tmp_path: Path, family: str, layers: int) -> None:
    """They are scaled as if heads shared the model's width."""
    model = RandomModel(family, layers=layers, width=32, heads=2, kv_heads=1, head_dim=64, ffn_width=32)
    path, tokens = write(tmp_path / "model.gguf", model), text(300, 64)
    exact = FamilyReference(path).logits(tokens)
    # So many layers let rounding grow, most where ggml rounds attention to float16; another scale is off by 0.1.
    assert np.abs(model_logits(Model(str(path)), tokens) - exact).max() <= 0.01
    assert np.abs(model_logits(Model(str(path), device="ggml-cpu"), tokens) - exact).max() <= 0.05


# Wide enough for blocks of 256, with queries, keys and values of several types in the mixtures.
WIDE = RandomModel("llama", width=256, layers=4, heads=8, kv_heads=2, head_dim=32, ffn_width=512)
WIDE_EXPERTS = replace(WIDE, experts=(4, 2, 512, 0), seed=1)
NO_BLOCKS = replace(WIDE, family="gpt2", width=320, heads=5, kv_heads=5, head_dim=0, ffn_width=1280)  # falls back
FILE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")
SINGLE_TYPES = {
    "F16": RandomModel("llama", quantization="F16"),
    "BF16": RandomModel("qwen3", quantization="BF16"),
    "gate-and-up": RandomModel(
        "llama",
        width=96,
        heads=6,
        kv_heads=3,
        quantization="Q8_0",
        biases=True,
        types={"ffn_gate": "Q5_1", "attn_q": "Q4_1", "attn_v": "F16"},
    ),
    # Rows of heads are wider than the model, and no head is whole blocks wide.
    "wide-heads": RandomModel("qwen3", width=32, heads=16, kv_heads=4, head_dim=48, quantization="Q8_0"),
    "MXFP4": RandomModel("llama", quantization="MXFP4", tie=False),
    "gemma3": RandomModel("gemma3", quantization="Q8_0", types={"ffn_up": "Q4_0"}),
    "phi3": RandomModel("phi3", fused=True, quantization="Q5_0"),
    "olmo2": RandomModel("olmo2", tie=False, quantization="Q8_0"),
    "stablelm": RandomModel("stablelm", rotary=4, tie=False, quantization="Q5_1"),
    "nemotron_h": RandomModel("nemotron_h", layers=4, recurrent=(0,), feeding=(1, 3), quantization="Q8_0"),
    "falcon-h1": RandomModel("falcon-h1", quantization="Q5_0"),
    "experts": RandomModel("qwen3moe", experts=(8, 2, 64, 0), quantization="Q8_0"),
    "experts-apart": RandomModel(
        "qwen2moe",
        biases=True,
        tie=False,
        experts=(8, 2, 64, 64),
        quantization="Q4_0",
        types={"gate_exps": "Q5_1", "down_exps": "F16", "gate_shexp": "Q5_1"},
    ),
    "latents": replace(
        CASES["deepseek2"],
        latent=(64, 32, 32, 16, 64),
        quantization="Q8_0",
        types={"attn_k_b": "Q4_0", "attn_v_b": "Q5_1"},
    ),
    "latents-apart": replace(
        CASES["deepseek2"],
        seed=4,
        quantization="Q4_1",
        types={"attn_q_a": "Q8_0", "attn_k_b": "F16", "attn_v_b": "BF16"},
    ),
    "latents-expanded": replace(CASES["deepseek2-expanded"], latent=(64, 32, 20, 12, 32), quantization="Q8_0"),
    "experts-MXFP4": RandomModel(
        "qwen3moe", experts=(8, 2, 64, 0), quantization="Q8_0", types={"exps": "MXFP4"}, tie=False
    ),
    "gemma4-experts": replace(CASES["gemma4-experts"], quantization="Q8_0", types={"exps": "Q4_0"}),
    "gpt-oss": replace(
        CASES["gpt-oss"],
        seed=0,
        experts=(8, 3, 64, 0),
        quantization="Q8_0",
        types={"gate_exps": "Q8_0", "exps": "MXFP4"},
    ),
    "gemma4": replace(
        CASES["gemma4"],
        quantization="Q8_0",
        types={"ffn_up": "Q4_0"},
        metadata=CASES["gemma4"].metadata | {"embedding_length_per_layer_input": 32},
    ),
}


def assert_as_close_as_llama_cpp(path: Path) -> None:
    """Both round activations to int8, and each lands as far from the exact logits as the other."""
    tokens = text(300, 128)
    exact = FamilyReference(path).logits(tokens)
    found = np.abs(model_logits(Model(str(path)), tokens) - exact).mean()
    theirs = np.abs(llama_logits(path, tokens) - exact).mean()
    assert found <= 1.1 * theirs
    assert found <= 0.05 * exact.std()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file_type", "model"),
    [
        *((kind, WIDE) for kind in FILE_TYPES),
        *((kind, WIDE_EXPERTS) for kind in ("Q4_0", "Q4_K_M", "Q8_0")),
        *((kind, NO_BLOCKS) for kind in ("Q2_K", "Q4_K_M", "Q6_K", "IQ4_XS")),
    ],
)
def test_quantized_mixtures(tmp_path: Path, file_type: str, model: RandomModel) -> None:
    source = write(tmp_path / "source.gguf", model)
    assert_as_close_as_llama_cpp(quantize(source, tmp_path / "quantized.gguf", f"MOSTLY_{file_type}"))


@pytest.mark.parametrize("case", SINGLE_TYPES)
def test_single_types(tmp_path: Path, case: str) -> None:
    assert_as_close_as_llama_cpp(write(tmp_path / "model.gguf", SINGLE_TYPES[case]))


# Where a tensor has numbers of its own, or a block its F16 scales.
SCALES = {"F32": (0,), "F16": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "MXFP4": (0,)}
SCALES |= {"IQ4_NL": (0,), "IQ4_XS": (0,), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}


@pytest.mark.parametrize("kind", SCALES)
def test_scales_that_are_not_finite(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    if kind.startswith("IQ") or kind.endswith("K"):
        source = write(tmp_path / "source.gguf", WIDE)
        quantize(source, path, f"MOSTLY_{kind.replace('Q3_K', 'Q3_K_S')}")
    else:
        write(path, replace(WIDE, quantization=kind))
    tensor = next(t for t in GGUFReader(path).tensors if t.tensor_type.name == kind and "norm" not in t.name)
    whole = path.read_bytes()
    number = np.float32 if kind == "F32" else np.float16
    # An exponent of 255 stands for no number.
    bad = [b"\xff"] if kind == "MXFP4" else [number(value).tobytes() for value in ("inf", "-inf", "nan")]
    for at in SCALES[kind]:
        for value in bad:
            start = tensor.data_offset + at
            path.write_bytes(whole[:start] + value + whole[start + len(value) :])
            with pytest.raises(ModelError, match=f"tensor '{tensor.name}' holds weights that are not finite"):
                Model(path)


@pytest.mark.parametrize("device", ["cpu", "ggml-cpu"])
def test_keys_beyond_f16_are_refused(tmp_path: Path, device: str) -> None:
    def enlarge(tensors: dict[str, Floats]) -> None:
        tensors["blk.0.attn_k.weight"][3] *= 1e6

    session = Session(Model(str(write(tmp_path / "model.gguf", LLAMA, enlarge)), device=device))
    with pytest.raises(ModelError, match="not finite"):
        session.verify(np.arange(8, dtype=np.int32), np.arange(-1, 7, dtype=np.int32), Sampling())


def test_drafts_are_not_among_the_supported_architectures(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", RandomModel("mpt"))
    with pytest.raises(ModelError, match=r"qwen3next$"):
        Model(path)


def drop(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


def poison(name: str) -> Change:
    def change(tensors: dict[str, Floats]) -> None:
        tensors[name].flat[3] = np.nan

    return change


QWEN3, LLAMA, LFM2, QWEN35 = CASES["qwen3"], CASES["llama"], CASES["lfm2"], CASES["qwen35"]
NEMOTRON, QWEN3MOE, DEEPSEEK = CASES["nemotron_h"], CASES["qwen3moe"], CASES["deepseek2"]
TEMPERATURE = "attention.temperature_length"
WINDOWS = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True]}
ABSURD = dict.fromkeys(
    ("embedding_length", "attention.head_count", "attention.key_length", "attention.value_length"), 1 << 16
)
LACKS = [
    line.split()
    for line in """\
qwen35moe blk.1.ffn_gate_inp_shexp.weight
deepseek2 blk.1.attn_k_b.weight
qwen35 blk.1.ssm_a
nemotron_h blk.0.ssm_norm.weight
falcon-h1 blk.1.attn_v.weight
lfm2 blk.0.shortconv.conv.weight
qwen3 blk.0.attn_q_norm.weight
llama blk.0.ffn_gate.weight
llama blk.1.attn_v.weight
olmo2 output.weight
gemma4-experts blk.1.pre_ffw_norm_2.weight
gpt-oss blk.0.attn_sinks.weight
gpt-oss blk.1.ffn_up_exps.bias
gemma4 blk.3.attn_k.weight
gemma4 per_layer_token_embd.weight
""".splitlines()
]
SAYS: dict[str, tuple[RandomModel, dict[str, Any], str]] = {
    "experts": (QWEN3, {"expert_count": 8}, "is known without experts, but metadata 'qwen3.expert_count' says"),
    "experts-used": (QWEN3MOE, {"expert_used_count": 9}, "metadata 'qwen3moe.expert_used_count' is 9, outside 1 to 8"),
    "experts-groups": (
        QWEN3MOE,
        {"expert_group_count": 3, "expert_group_used_count": 1},
        "8 experts in 3 groups (metadata 'qwen3moe.expert_group_count'), of which 1 are used, do not make 2 experts",
    ),
    "experts-few": (
        QWEN3MOE,
        {"expert_count": 16},
        "tensor 'blk.0.ffn_gate_inp.weight' has shape 64 x 8 x 1 x 1 where 64 x 16 x 1 x 1 is needed",
    ),
    "latents": (
        DEEPSEEK,
        {"attention.key_length": 81},
        "1 heads of keys of 81 and values of 64 numbers do not fit latent rows of 64, with 16 that are turned",
    ),
    "temperature": (CASES["deepseek2-yarn"], {TEMPERATURE: 32}, "is 32, but only the original context of 64"),
    "hybrid": (RandomModel("mamba2"), {"ssm.state_size": 128}, "is recurrent or hybrid"),
    "unequal-networks": (
        RandomModel("nemotron_h", layers=3, feeding=(1, 2)),
        {"feed_forward_length": [0, 96, 48]},
        "metadata 'nemotron_h.feed_forward_length' differs between layers",
    ),
    "real-widths": (
        RandomModel("nemotron_h"),
        {"feed_forward_length": [0.0, 96.0]},
        "is not an array of 32-bit integers or booleans",
    ),
    "text-widths": (
        RandomModel("nemotron_h"),
        {"feed_forward_length": "96"},
        "'nemotron_h.feed_forward_length' is not an array",
    ),
    "text-for-layers": (QWEN35, {"attention.recurrent_layers": "0,1,2"}, "recurrent_layers' is not an array"),
    "a-section": (QWEN35, {"rope.dimension_sections": 8}, "'qwen35.rope.dimension_sections' is not an array"),
    "sections": (QWEN35, {"rope.dimension_sections": [1, 1, 1, 0]}, "leaves pairs without a position"),
    "inner-size": (QWEN35, {"ssm.inner_size": 63}, "metadata 'qwen35.ssm.inner_size' is 63, outside 64 to 64"),
    "absurd-taps": (LFM2, {"shortconv.l_cache": 1}, "metadata 'lfm2.shortconv.l_cache' is 1, outside 2 to 32"),
    "other-kv-heads": (LLAMA, {"attention.head_count_kv": [2, 4]}, "head_count_kv' differs between layers"),
    "other-heads": (LLAMA, {"attention.head_count": [4, 2]}, "'llama.attention.head_count' differs between layers"),
    "other-widths": (LLAMA, {"feed_forward_length": [96, 48]}, "'llama.feed_forward_length' differs between layers"),
    "more-heads": (LLAMA, {"attention.head_count_kv": [2, 2, 2]}, "head_count_kv' has 3 entries for 2 layers"),
    "absurd-heads": (LLAMA, ABSURD, "65536 heads of 65536 numbers are absurdly many"),
    "rope": (LLAMA, {"rope.scaling.type": "su"}, "'su', which is unknown; there are: none,"),
    "base": (RandomModel("qwen2"), {"rope.freq_base": -1.0}, "'qwen2.rope.freq_base' is not above 0"),
    "logit-scale": (RandomModel("granite"), {"logit_scale": 0.0}, "metadata 'granite.logit_scale' is missing or 0"),
    "factor": (RandomModel("qwen2"), {"rope.scaling.factor": -2.0}, "which is no factor of a context"),
    "pattern": (RandomModel("gemma3"), WINDOWS, "has 3 entries for 2 layers"),
    "shared-cells": (CASES["gemma4"], {"attention.shared_kv_layers": 5}, "leaves layers without keys and values"),
    "window-heads": (CASES["gemma4"], {"attention.value_length_swa": 8}, "keys and values of different lengths"),
    "widths": (LLAMA, {"attention.value_length": 8}, "keys and values of different lengths"),
}
REFUSED: dict[str, tuple[RandomModel, Change | None, str]] = {
    **{f"{case} {name}": (CASES[case], drop(name), f"tensor '{name}' is missing") for case, name in LACKS},
    **{
        name: (replace(model, metadata=model.metadata | told), None, message)
        for name, (model, told, message) in SAYS.items()
    },
    "unknown": (
        RandomModel("mpt"),
        None,
        "architecture 'mpt' is not supported; choose a model of one of: gpt2, llama, mi",
    ),
    "experts-shared-beside-dense": (
        replace(CASES["gemma4-experts"], experts=(8, 2, 32, 32)),
        None,
        "_shexp.weight' is none of architecture 'gemma4'",
    ),
    "experts-bias": (
        CASES["glm4moe"],
        drop("blk.2.exp_probs_b.bias"),
        "tensor 'blk.2.exp_probs_b.bias' is missing, although 'blk.1.exp_probs_b.bias' is there",
    ),
    "odd-latents": (
        replace(DEEPSEEK, latent=(48, 32, 32, 16, 32)),
        None,
        "latent rows of 48 numbers and values of 32 must be multiples of 32",
    ),
    "latents-whole": (DEEPSEEK, put("blk.0.attn_kv_b.weight", 256, 64), "'blk.0.attn_kv_b.weight' is none of arch"),
    "no-query-rank": (
        replace(DEEPSEEK, latent=(64, 0, 32, 16, 32)),
        drop("blk.0.attn_q.weight"),
        "metadata 'deepseek2.attention.q_lora_rank' is missing",
    ),
    "no-rates": (NEXT, drop("blk.1.ssm_ba.weight"), "tensor 'blk.1.ssm_ba.weight' is missing"),
    "no-inputs": (NEXT, drop("blk.1.ssm_in.weight"), "tensor 'blk.1.attn_qkv.weight' is missing"),
    "nothing-mixes": (RandomModel("nemotron_h", feeding=(0, 1)), None, "leaves no layer that mixes rows"),
    "mixes-and-feeds": (NEMOTRON, put("blk.0.ffn_up.weight", 96, 64), "'blk.0.ffn_up.weight' is none of architecture"),
    "half-space-norms": (
        CASES["falcon-h1"],
        drop("blk.1.ssm_norm.weight"),
        "tensor 'blk.1.ssm_norm.weight' is missing, although 'blk.0.ssm_norm.weight' is there",
    ),
    "no-gates": (
        QWEN35,
        put("blk.3.attn_q.weight", 64, 64),
        "tensor 'blk.3.attn_q.weight' has shape 64 x 64 x 1 x 1 where 64 x 128 x 1 x 1",
    ),
    "state-size": (replace(QWEN35, delta_heads=(2, 4, 24)), None, "'qwen35.ssm.state_size' is no multiple of 16"),
    "delta-heads": (replace(QWEN35, delta_heads=(3, 4, 16)), None, "4 heads of values do not share 3 heads of keys"),
    "spaces": (
        RandomModel("granitehybrid", layers=3, recurrent=(0, 2), spaces=(8, 3, 32)),
        None,
        "metadata 'granitehybrid.ssm.*': 128 numbers in 8 heads of 3 groups with states of 32",
    ),
    "more-taps": (LFM2, put("blk.2.shortconv.conv.weight", 64, 4), "has shape 4 x 64 x 1 x 1 where 3 x 64 x 1 x 1"),
    "attends-and-convolves": (
        LFM2,
        put("blk.0.attn_q.weight", 64, 64),
        "'blk.0.attn_q.weight' is none of architecture",
    ),
    "half-biases": (
        CASES["llama-biases"],
        drop("blk.1.attn_k.bias"),
        "tensor 'blk.1.attn_k.bias' is missing, although 'blk.0.attn_q.bias' is there",
    ),
    "half-norms": (CASES["stablelm"], drop("blk.1.ffn_norm.weight"), "'blk.1.ffn_norm.weight' is missing, although"),
    "sinks": (LLAMA, put("blk.0.attn_sinks", 4), "tensor 'blk.0.attn_sinks' is none of architecture 'llama'"),
    "head": (CASES["gemma2"], put("output.weight", 300, 64), "'output.weight' is none of architecture 'gemma2'"),
    "scale": (LLAMA, put("blk.0.attn_q.scale", 1), "tensor 'blk.0.attn_q.scale' is none of architecture 'llama'"),
    "factors": (LLAMA, put("rope_freqs.weight", 7), "'rope_freqs.weight' has shape 7 x 1 x 1 x 1 where 16 x 1 x 1 x 1"),
    "zero-factors": (
        LLAMA,
        lambda tensors: tensors.update({"rope_freqs.weight": np.zeros(16, np.float32)}),
        "'rope_freqs.weight' holds factors that are not above 0",
    ),
    "norm": (LLAMA, poison("blk.1.ffn_norm.weight"), "'blk.1.ffn_norm.weight' holds weights that are not finite"),
    "matrix": (LLAMA, poison("blk.0.ffn_up.weight"), "tensor 'blk.0.ffn_up.weight' holds weights that are not finite"),
    "heads": (RandomModel("llama", heads=4, kv_heads=3, head_dim=16), None, "4 heads do not share 3 heads"),
    "no-heads": (RandomModel("llama", heads=0, kv_heads=1, head_dim=16), None, "head_count' is 0, outside 1 to 64"),
    "no-kv-heads": (RandomModel("llama", kv_heads=0), None, "'llama.attention.head_count_kv' is 0, outside 1 to 4"),
    "rotary": (RandomModel("llama", rotary=8), None, "'llama.rope.dimension_count' is 8 where heads are 16 wide"),
    "odd-rotary": (RandomModel("qwen2", rotary=7), None, "is odd, but rotary positions turn pairs"),
    "no-experts": (replace(CASES["gpt-oss"], experts=(0, 0, 0, 0)), None, "'gpt-oss.expert_used_count' is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_files(tmp_path: Path, case: str) -> None:
    """What is damaged is refused on other devices, too; what is unknown here, libllama may know."""
    model, change, message = REFUSED[case]
    path = write(tmp_path / "bad.gguf", model, change)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        Session(Model(str(path)))
    assert str(path) in str(caught.value)
    if not isinstance(caught.value, UnsupportedModelError):
        with pytest.raises(ModelError, match=f"{re.escape(message)}|invalid data"):
            Session(Model(str(path), device="ggml-cpu"))


def test_short_factors(written: Callable[[str], Path]) -> None:
    """A session within the original context takes the short factors, as llama.cpp's contexts do."""
    path, tokens = written("phi3-long"), text(300, 60)
    model = Model(str(path))
    found = []
    for n_ctx in (64, 65):
        session = Session(model, n_ctx)
        session.evaluate(tokens, range(-1, 59))
        found.append(np.stack([session.logits(row) for row in range(60)]))
    for logits, context in zip(found, (64, 65), strict=True):
        assert np.abs(logits - FamilyReference(path).logits(tokens, context)).max() <= 1e-3
    assert np.abs(found[0] - found[1]).max() > 0.1


@pytest.mark.parametrize("device", ["cpu", "ggml-cpu"])
def test_a_model_in_several_files(tmp_path: Path, device: str) -> None:
    whole = write(tmp_path / "whole.gguf", LLAMA)
    parts = split(whole, tmp_path, 3)
    tokens = text(300, 20)
    assert Tokenizer(parts[0]).fingerprint == Tokenizer(whole).fingerprint
    model = Model(str(parts[0]), device=device)
    assert (model_logits(model, tokens) == model_logits(Model(str(whole), device=device), tokens)).all()
    assert model.file_bytes == sum(part.stat().st_size for part in parts)
    with pytest.raises(ModelError, match=r"name the first, which ends in '-00001-of-00003\.gguf'"):
        Model(str(parts[1]))
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"-00003-of-00003\.gguf: .*No such file"):
        Model(str(parts[0]))


SPLITS: dict[str, tuple[dict[str, int], str]] = {
    "another-part": ({"split.no": 2}, r"-00002-of-00003\.gguf: metadata 'split.no' is 2, outside 1 to 1"),
    "of-another-model": ({"split.count": 4}, r"-00002-of-00003\.gguf: metadata 'split.count' is 4, outside 3 to 3"),
    "too-few": ({"split.tensors.count": 99}, "'split.tensors.count' is 99, outside 20 to 20"),
    "twice": ({}, "tensor '.*' stands in two of the model's files"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_files_that_do_not_belong_together(tmp_path: Path, case: str) -> None:
    changed, message = SPLITS[case]
    whole = write(tmp_path / "whole.gguf", LLAMA)
    parts = split(whole, tmp_path, 3)
    (tmp_path / "other").mkdir()
    other = split(whole, tmp_path / "other", 3, overlap=case == "twice", changed=changed)
    i = int(case != "too-few")
    other[i].replace(parts[i])
    with pytest.raises(ModelError, match=message):
        Model(str(parts[0]))


def test_default_context_and_shape(tmp_path: Path) -> None:
    model = Model(str(write(tmp_path / "long.gguf", RandomModel("llama", context=131072))))
    assert (Session(model).n_ctx, Session(model, 10000).n_ctx) == (8192, 10000)
    assert (model.max_context, model.cell_bytes) == (131072, 2 * 2 * 16 * 2 * 2)
    assert (model.architecture, model.num_kv_heads, model.head_dim, model.ffn_width) == ("llama", 2, 16, 96)
