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
from support.families import CASES, models
from support.family_reference import FAMILIES, FamilyReference
from support.libraries import LLAMA_TOLERANCE
from support.logits import llama_context, llama_pass, model_logits
from support.paths import table
from support.random_models import RandomModel, dequantized, quantize, split, write
from support.steps import evaluate, path_to, prefill, verify

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


def llama_logits(
    path: Path, tokens: list[int], gpu_layers: int = 0, rows: int = ROWS, *, exact: bool = False
) -> Floats:
    """Logits after each token, in passes of so many rows."""
    with llama_context(path, gpu_layers, n_ctx=512, rows=ROWS, num_threads=1, exact=exact) as context:
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


def is_in_numpy(model: RandomModel) -> bool:
    scaling = model.metadata.get("rope.scaling.type", "longrope")
    return model.family in FAMILIES and scaling == "longrope" and not (model.head_bias or model.experts[3])


@pytest.mark.parametrize("case", CASES)
def test_kernels_against_numpy_and_llama_cpp(written: Callable[[str], Path], case: str) -> None:
    path, tokens = written(case), text(CASES[case].vocab_size)
    found = model_logits(Model(str(path)), tokens)
    if is_in_numpy(CASES[case]):
        # A few keys and values round to the next float16: that shows in single logits, not in the mean.
        error = np.abs(found - FamilyReference(path).logits(tokens))
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
            prefill(session, tokens)
            evaluate(session, branches, parents)
            found = np.stack([session.logits(row) for row in range(24)])
            if expected is None:
                expected = found
                for leaf in (23, 20, 11):
                    alone = Session(model)
                    prefill(alone, tokens[:60])
                    for token in [*tokens[60:], *(branches[row] for row in path_to(leaf, parents))]:
                        evaluate(alone, [token], [-1])
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
    exact = llama_logits(dequantized(path, tmp_path / "exact.gguf"), tokens, exact=True)
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
    expected = llama_logits(path, tokens, exact=True)
    # So many layers let rounding grow, most where ggml rounds attention to float16; another scale is off by 0.1.
    for device in ("cpu", "ggml-cpu"):
        assert np.abs(model_logits(Model(str(path), device=device), tokens) - expected).max() <= 0.05


# Wide enough for blocks of 256, with queries, keys and values of several types in the mixtures.
WIDE = RandomModel("llama", width=256, layers=4, heads=8, kv_heads=2, head_dim=32, ffn_width=512)
WIDE_EXPERTS = replace(WIDE, experts=(4, 2, 512, 0), seed=1)
NO_BLOCKS = replace(WIDE, family="gpt2", width=320, heads=5, kv_heads=5, head_dim=0, ffn_width=1280)  # falls back
FILE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")
SINGLE_TYPES = models("single_types")


def assert_as_close_as_llama_cpp(path: Path) -> None:
    """Both round activations to int8, and each lands as far from the exact logits as the other."""
    tokens = text(300, 128)
    exact = llama_logits(dequantized(path, path.with_name("exact.gguf")), tokens, exact=True)
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
        verify(session, np.arange(8, dtype=np.int32), np.arange(-1, 7, dtype=np.int32), Sampling())


def test_drafts_are_not_among_the_supported_architectures(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", RandomModel("mpt"))
    with pytest.raises(ModelError, match=r"qwen3next$"):
        Model(path)


LLAMA, QWEN35, DEEPSEEK = CASES["llama"], CASES["qwen35"], CASES["deepseek2"]


@pytest.mark.parametrize("record", table("refused_families"), ids=lambda record: record["name"])
def test_refused_files(tmp_path: Path, record: dict[str, Any]) -> None:
    """What is damaged is refused on other devices, too; what is unknown here, libllama may know.

    A row changes a case, or a family's usual model: fields, keys of metadata, and a tensor, which is left out, put
    there, or holds a number that is not finite.
    """
    left = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    message = re.escape(left.pop("says"))
    model = CASES[left.pop("case")] if "case" in left else RandomModel(left.pop("family"))

    def change(tensors: dict[str, Floats]) -> None:
        if "drop" in record:
            del tensors[record["drop"]]
        for how, number in (("put", 1), ("zero", 0)):
            for name, *shape in [record[how]] if how in record else []:
                tensors[name] = np.full(shape, number, np.float32)
        if "poison" in record:
            tensors[record["poison"]].flat[3] = np.nan

    metadata = model.metadata | left.pop("metadata", {})
    fields = {name: value for name, value in left.items() if name not in ("name", "drop", "put", "zero", "poison")}
    path = write(tmp_path / "bad.gguf", replace(model, metadata=metadata, **fields), change)
    with pytest.raises(ModelError, match=message) as caught:
        Session(Model(str(path)))
    assert str(path) in str(caught.value)
    if not isinstance(caught.value, UnsupportedModelError):
        with pytest.raises(ModelError, match=f"{message}|invalid data"):
            Session(Model(str(path), device="ggml-cpu"))


def test_short_factors(written: Callable[[str], Path]) -> None:
    """A session within the original context takes the short factors, as llama.cpp's contexts do."""
    path, tokens = written("phi3-long"), text(300, 60)
    model = Model(str(path))
    found = []
    for n_ctx in (64, 65):
        session = Session(model, n_ctx)
        evaluate(session, tokens, range(-1, 59))
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
