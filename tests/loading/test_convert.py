"""Converted checkpoints say what transformers says, llama.cpp loads them, and nothing malformed gets through."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from support.checkpoints import NUM_TOKENS, config, weights, write_checkpoint, write_tokenizer_json, write_weights
from support.convert import change_json, convert, gpt2_vocabulary, llama_tokens, needed_transformers, write_bfloat16
from support.family_reference import FamilyReference
from support.logits import engine_logits, llama_logits
from support.paths import table
from support.random_models import END_OF_TEXT

from pystaged import _core
from pystaged.loading.metadata import About
from pystaged.loading.quantize import quantize_checkpoint

pytestmark = pytest.mark.oracle

Floats = npt.NDArray[np.float32]

TOKENS = np.random.default_rng(0).integers(0, 256, 60).tolist()
PAGE = (
    "def f(x):\n\n\treturn [i ** 2 for i in range(1_000)]  # 3.14e-10\r\n    if not x:  \n"
    "I'm we've they'll don't 'S 'RE ''s   trailing   \n"
    "\U0001f999\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f3fd \u2764\ufe0f \U0010ffff\n"
    "\u4e2d\u6587\u5b57\u7b26 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 e\u0301 \u0645\u0631\u062d\u0628\u0627\n"
    "\x00\x01\x02\t\x0b\x0c\x1b\x7f\x85\xa0\u2028\ufeff\ufffd\r\r\n\n\n   \n"
    "1234567890 \u0664\u0665 \u00bd\u2168 <|endoftext|> and <|endoftext> on\n"
)


# ---- Against transformers ----


@pytest.mark.slow
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """With tokens added to GPT-2's: special ones, others, and rows that no token has."""
    transformers, (tokens, merges) = needed_transformers(), gpt2_vocabulary()
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = transformers.GPT2Tokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    tokenizer.add_special_tokens({"pad_token": "<|pad|>", "additional_special_tokens": ["<|user|>"]})
    tokenizer.add_tokens(["\u732b\u732b", "frobnicate"])
    folder = tmp_path / "saved"
    tokenizer.save_pretrained(folder)
    num_rows = len(tokenizer) + 7
    shape = config(n_embd=8, n_layer=1, n_positions=8, vocab_size=num_rows)
    (folder / "config.json").write_text(json.dumps(shape))
    write_weights(folder, weights(shape, num_rows=num_rows))
    convert(folder, tmp_path / "model.gguf")
    page = PAGE + "<|user|>\u732b\u732b\u732b frobnicate unfrobnicated<|pad|>\n"
    expected = tokenizer.encode(page)
    assert {len(tokens), len(tokens) + 1, len(tokens) + 2, len(tokens) + 3} <= set(expected)
    assert _core.Tokenizer(str(tmp_path / "model.gguf")).encode(page).tolist() == expected
    assert llama_tokens(tmp_path / "model.gguf", page) == expected
    assert _core.Tokenizer(str(tmp_path / "model.gguf")).num_tokens == num_rows


# ---- Forms of checkpoints ----


def pickled(folder: Path, found: object) -> None:
    import torch  # noqa: PLC0415

    (folder / "model.safetensors").unlink()
    torch.save(found, folder / "pytorch_model.bin")


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_pytorch_model_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Torch reads it; without torch an error says how to convert it, and that works."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    folder = write_checkpoint(tmp_path / "checkpoint")
    exact = {name: (array.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, array in weights(config()).items()}
    write_bfloat16(folder / "model.safetensors", exact) if kind == "bfloat16" else write_weights(folder, exact)
    expected, found = tmp_path / "expected.gguf", tmp_path / "found.gguf"
    quantize_checkpoint(folder, expected, "f32")
    tensors = {name: torch.tensor(array).t().contiguous().t() for name, array in exact.items()}
    pickled(folder, {name: tensor.to(getattr(torch, kind)) for name, tensor in tensors.items()})
    quantize_checkpoint(folder, found, "f32")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", None)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin needs torch, which is not installed") as error:
            quantize_checkpoint(folder, tmp_path / "none.gguf", "f32")
    monkeypatch.chdir(folder)
    exec("\n".join(str(error.value).splitlines()[1:]), {})
    (folder / "pytorch_model.bin").unlink()
    quantize_checkpoint(folder, tmp_path / "again.gguf", "f32")
    assert found.read_bytes() == (tmp_path / "again.gguf").read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("case", ["a command", "half a file", "no tensors"])
def test_a_malformed_pytorch_model_bin(tmp_path: Path, case: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    folder = write_checkpoint(tmp_path / "checkpoint")
    pickled(folder, {"a command": Touched(tmp_path / "touched"), "no tensors": [1]}.get(case, {"w": torch.ones(9)}))
    path = folder / "pytorch_model.bin"
    if case == "half a file":
        path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read \(.*\); save its tensors as safetensors"):
        convert(folder, tmp_path / "model.gguf")
    assert not (tmp_path / "touched").exists()


class Touched:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._path),))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Floats:
    """Logits of the usual checkpoint."""
    folder = write_checkpoint(tmp_path_factory.mktemp("usual"))
    convert(folder, folder / "model.gguf")
    return FamilyReference(folder / "model.gguf", half=False).logits(TOKENS)


def with_old_buffers(folder: Path) -> None:
    arrays = weights(config(), prefix="")
    arrays["h.0.attn.bias"] = np.tril(np.ones((1, 1, 96, 96), np.float32))
    arrays["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    write_weights(folder, arrays)


def with_a_saved_tied_head(folder: Path) -> None:
    arrays = weights(config())
    write_weights(folder, arrays | {"lm_head.weight": arrays["transformer.wte.weight"].copy()})


@pytest.mark.parametrize(
    "change",
    [
        with_old_buffers,
        with_a_saved_tied_head,
        lambda folder: write_weights(folder, weights(config()), shards=3),
        lambda folder: write_weights(folder, {k: v.astype(np.float64) for k, v in weights(config()).items()}),
    ],
    ids=["no-prefix-and-buffers", "saved-head", "shards", "f64"],
)
def test_other_forms(tmp_path: Path, expected: Floats, change: Callable[[Path], None]) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    change(folder)
    convert(folder, tmp_path / "model.gguf")
    np.testing.assert_array_equal(FamilyReference(tmp_path / "model.gguf", half=False).logits(TOKENS), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [("F16", 0.02), ("BF16", 0.2)])
def test_half_precision_checkpoints(tmp_path: Path, expected: Floats, dtype: str, tolerance: float) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    arrays = weights(config())
    if dtype == "F16":
        write_weights(folder, {name: array.astype(np.float16) for name, array in arrays.items()})
    else:
        write_bfloat16(folder / "model.safetensors", arrays)
    convert(folder, tmp_path / "model.gguf")
    found = FamilyReference(tmp_path / "model.gguf", half=False).logits(TOKENS)
    assert 0 < np.abs(found - expected).max() <= tolerance


@pytest.mark.parametrize(("kind", "tied"), [("F32", True), ("F16", False), ("BF16", True)])
def test_every_float_type_loads_everywhere(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=tied)
    out = tmp_path / "model.gguf"
    convert(folder, out, quantization=kind, about=About("tiny", "mit", "https://example.org/tiny"))
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out).tensors}
    assert types["blk.1.attn_qkv.weight"] == types["token_embd.weight"] == kind
    assert ("output.weight" in types) != tied
    assert types["position_embd.weight"] == types["blk.0.ffn_up.bias"] == "F32"
    expected, tolerance = FamilyReference(out, half=False).logits(TOKENS), 1e-3 if kind == "F32" else 0.05
    assert expected.std() > 0.1
    # llama.cpp keeps keys and values, and what GELU is given, in F16.
    assert np.abs(llama_logits(out, [TOKENS])[0] - expected).max() <= tolerance + 0.01
    assert np.abs(engine_logits(out, TOKENS) - expected).max() <= tolerance
    assert llama_tokens(out, PAGE) == _core.Tokenizer(str(out)).encode(PAGE).tolist()
    fields = GGUFReader(out).fields
    for key, value in {"name": "tiny", "license": "mit", "source.url": "https://example.org/tiny"}.items():
        assert fields[f"general.{key}"].contents() == value
    assert set(tmp_path.iterdir()) == {folder, out}


# ---- Malformed ones ----


def change_weights(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        arrays = weights(config())
        edit(arrays)
        write_weights(folder, arrays)

    return change


def set_weight(name: str, value: object) -> Callable[[Path], None]:
    return change_weights(lambda arrays: arrays.update({name: value}))


def spoil_number(value: float) -> Callable[[Path], None]:
    def edit(arrays: dict[str, Any]) -> None:
        arrays["transformer.h.1.mlp.c_fc.weight"][5, 7] = value

    return change_weights(edit)


def truncated_shard(folder: Path) -> None:
    write_weights(folder, weights(config()), shards=3)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def tensor_twice(folder: Path) -> None:
    write_weights(folder, weights(config()), shards=2)
    (folder / "model-00002-of-00002.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )


def index_of(*names: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(found))

    return change


def header(size: int, text: bytes = b"{}") -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + text) and None


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def change_tokenizer(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the model in tokenizer.json."""

    def change(folder: Path) -> None:
        found = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        edit(found["model"])
        (folder / "tokenizer.json").write_text(json.dumps(found), "utf-8")

    return change


def more_tokens(**ids: object) -> Callable[[Path], None]:
    return change_tokenizer(lambda model: model["vocab"].update(ids))


def merges(*found: object) -> Callable[[Path], None]:
    return change_tokenizer(lambda model: model.update(merges=found))


def no_end_of_text(folder: Path) -> None:
    change_json("tokenizer.json", added_tokens=[])(folder)
    change_tokenizer(lambda model: model["vocab"].update({"x": model["vocab"].pop(END_OF_TEXT)}))(folder)
    change_json("config.json", bos_token_id=None, eos_token_id=None)(folder)


MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    **{name: (change_json(file, **changes), says) for name, file, changes, says in table("malformed_checkpoints")},
    "missing-tensor": (
        change_weights(lambda arrays: arrays.pop("transformer.h.1.ln_2.bias")),
        r"tensor 'transformer\.h\.1\.ln_2\.bias' is missing",
    ),
    "wrong-shape": (
        set_weight("transformer.h.0.mlp.c_fc.weight", np.zeros((256, 64), np.float32)),
        r"tensor 'transformer\.h\.0\.mlp\.c_fc\.weight' has shape \[256, 64\], not \[64, 256\]",
    ),
    "scalar": (set_weight("transformer.wte.weight", np.array(1, np.float32)), r"wte\.weight' has shape \[\]"),
    "nothing-in-it": (set_weight("transformer.wte.weight", np.zeros((0, 64), np.float32)), "has the id 0, but the"),
    "unknown-tensor": (set_weight("score.weight", np.zeros((2, 64), np.float32)), "'score.weight' is unknown in gpt2"),
    "integers": (set_weight("transformer.ln_f.bias", np.zeros(64, np.int8)), r"ln_f\.bias' is of type I8"),
    "nan": (spoil_number(np.nan), r"tensor 'transformer\.h\.1\.mlp\.c_fc\.weight' holds numbers that are not finite"),
    "infinity": (spoil_number(np.inf), "not finite"),
    "truncated-shard": (truncated_shard, r"model-00002-of-00003\.safetensors is damaged: .*; get it again"),
    "tensor-twice": (tensor_twice, r"tensor '.*' is in both model-00001-of-00002\.safetensors and model-00002"),
    "empty-file": (lambda folder: (folder / "model.safetensors").write_bytes(b"") and None, "damaged"),
    "huge-header": (header(2**63), r"model\.safetensors is damaged: .*header too large"),
    "no-json-header": (header(4, b"\xff\xff\xff\xff"), "damaged"),
    "missing-shard": (index_of("model-1.safetensors"), r"has no model-1\.safetensors"),
    "index-outside": (index_of("../secret.safetensors"), r"names the file '\.\./secret\.safetensors', which is no"),
    "index-absolute": (index_of("/etc/passwd"), "'/etc/passwd'"),
    "index-drive": (index_of("c:x.safetensors"), "'c:x.safetensors'"),
    "index-numbers": (index_of(3), "has no weight_map"),
    "no-index": (lambda folder: (folder / "model.safetensors.index.json").write_text("[]") and None, "no JSON object"),
    "no-weights": (remove("model.safetensors"), "has neither model.safetensors nor pytorch_model.bin"),
    "no-config": (remove("config.json"), r"holds no checkpoint: it has no config\.json"),
    "config-no-json": (lambda folder: (folder / "config.json").write_text("{") and None, r"config\.json is damaged"),
    "config-deep": (lambda folder: (folder / "config.json").write_text("[" * 10**6) and None, "is damaged"),
    "no-tokenizer": (remove("tokenizer.json"), r"has no tokenizer\.json; in its folder, transformers writes one"),
    "no-merges": (merges(), "has no merges"),
    "odd-merge": (merges("a b c"), "the merge 'a b c' names"),
    "merge-with-a-number": (merges(["a", 1]), "is damaged: merges"),
    "unknown-merge": (merges("q \u00ff"), "the merge"),
    "token-without-row": (more_tokens(more=NUM_TOKENS), "'more' has the id 300, but the embedding has"),
    "token-negative": (more_tokens(more=-1), "'more' has the id -1"),
    "token-twice": (more_tokens(more=5), "have the same id 5"),
    "token-text": (more_tokens(more="x"), "'more' has the id 'x'"),
    "added-tokens": (lambda folder: write_tokenizer_json(folder, added_tokens=[5]), "is damaged: added_tokens"),
    "no-end": (no_end_of_text, "does not say which token ends a text"),
}


@pytest.mark.parametrize(("case", "kind"), [*((case, "f32") for case in MALFORMED), ("nan", "q8_0")])
def test_malformed_checkpoints(tmp_path: Path, case: str, kind: str) -> None:
    change, message = MALFORMED[case]
    folder = write_checkpoint(tmp_path / "checkpoint")
    change(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(folder, tmp_path / "model.gguf", kind)
    assert list(tmp_path.iterdir()) == [folder]
    assert sorted(folder.iterdir()) == before


def test_numbers_beyond_f16(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    spoil_number(1e6)(folder)
    with pytest.raises(ValueError, match="too large for F16; choose BF16 or F32"):
        convert(folder, tmp_path / "model.gguf", quantization="F16")
    assert list(tmp_path.iterdir()) == [folder]
    convert(folder, tmp_path / "model.gguf", quantization="BF16")
