"""Files as people have them, which other programs read wrongly or not at all: single types, odd metadata, odd parts."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.gguf_parts import ARRAY, BOOL, I32, STRING, U32, Entry, Gguf, Tensor, array, assemble, text
from support.logits import llama_logits, model_logits
from support.random_models import RandomModel, write

import pystaged
from pystaged._core import Model, ModelError, Tokenizer

LLAMA = RandomModel("llama")
GEMMA = RandomModel("gemma3", layers=6)
TOKENS = list(range(5, 60))
LAST = "blk.1.ffn_down"

# Types and shapes.
MODELS: dict[str, RandomModel] = {
    "Q4_0 with one Q4_1": replace(LLAMA, quantization="Q4_0", types={LAST: "Q4_1"}),
    "Q4_0 with a tied embedding in Q4_1": replace(LLAMA, quantization="Q4_0", types={"token_embd": "Q4_1"}),
    "single layers in Q5_1 and Q8_0": replace(LLAMA, quantization="Q4_0", types={LAST: "Q5_1", "blk.0.ffn_up": "Q8_0"}),
    "MXFP4": replace(LLAMA, quantization="Q8_0", types={"ffn_down": "MXFP4"}),
    "factors of angles": replace(LLAMA, vectors={"rope_freqs.weight": np.linspace(1, 4, 8, dtype=np.float32)}),
    "Llama without a head": LLAMA,
    "a head beside the embedding": replace(LLAMA, tie=False),
    "YaRN without a factor": replace(LLAMA, metadata={"rope.scaling.type": "yarn"}),
    "LongRoPE without a factor": replace(LLAMA, metadata={"rope.scaling.type": "longrope"}),
    "an old name of the factor": replace(LLAMA, metadata={"rope.scale_linear": 2.0}),
    "Gemma 3 with a factor, but not in windows": replace(
        GEMMA, metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.sliding_window": 16}
    ),
    "Gemma 3 without the base in windows": replace(GEMMA, metadata={"attention.sliding_window": 16}),
}


@pytest.mark.parametrize("case", MODELS)
def test_as_libllama_reads_it(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / "model.gguf", MODELS[case])
    ours, theirs = model_logits(Model(str(path)), TOKENS), llama_logits(path, [TOKENS])[0]
    assert np.abs(ours - theirs).max() <= 0.15 * theirs.std()  # both round to int8
    with pystaged.load(path, draft=None, report=lambda _: None) as engine:
        plain = engine.generate("the the", max_tokens=24, seed=3, speculate=False).tokens
        assert engine.generate("the the", max_tokens=24, seed=3).tokens == plain


Change = Callable[[list[Entry], list[Tensor]], object]


def put(key: str, kind: int, value: bytes) -> Change:
    def change(entries: list[Entry], _: list[Tensor]) -> None:
        entries[:] = [entry for entry in entries if entry.key != key.encode()] + [Entry(key.encode(), kind, value)]

    return change


def drop(*words: str) -> Change:
    def change(entries: list[Entry], _: list[Tensor]) -> None:
        entries[:] = [entry for entry in entries if not any(word.encode() in entry.key for word in words)]

    return change


# Metadata that changes nothing.
HARMLESS: dict[str, Change] = {
    "no end": drop("eos_token_id"),
    "neither beginning nor end": drop("os_token_id", "add_bos"),
    "an id of another time": put("tokenizer.ggml.seperator_token_id", U32, struct.pack("<I", 2**32 - 1)),
    "a padding token beyond": put("tokenizer.ggml.padding_token_id", U32, struct.pack("<I", 2**32 - 1)),
    "no type of file": drop("general.file_type", "general.quantization_version"),
    "precision of tensors": put("general.tensor_extra.prec_a4", BOOL, b"\1"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "model.gguf", LLAMA)


def changed(small: Path, path: Path, change: Change) -> Path:
    parts = Gguf(small.read_bytes())
    entries, tensors = list(parts.entries), list(parts.tensors)
    change(entries, tensors)
    path.write_bytes(assemble(entries, tensors))
    return path


@pytest.mark.parametrize("case", HARMLESS)
def test_metadata_that_changes_nothing(small: Path, tmp_path: Path, case: str) -> None:
    path = changed(small, tmp_path / "model.gguf", HARMLESS[case])
    assert (model_logits(Model(str(path)), TOKENS) == model_logits(Model(str(small)), TOKENS)).all()
    whole, other = Tokenizer(small), Tokenizer(path)
    assert other.encode("the the", False).tolist() == whole.encode("the the", False).tolist()
    # What no file names, libllama takes to be token 11; it is not put before texts.
    assert other.adds_bos == whole.adds_bos


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_tokens_are_never_chosen(small: Path, tmp_path: Path, temperature: float) -> None:
    def generated(path: Path) -> list[int]:
        with pystaged.load(path, draft=None, report=lambda _: None) as engine:
            options = {"max_tokens": 24, "seed": 3, "temperature": temperature, "ignore_eos": True}
            plain = engine.generate("the the", **options, speculate=False).tokens
            assert engine.generate("the the", **options).tokens == plain
            return plain

    usual = generated(small)
    banned = sorted(set(usual))
    ids = array(I32, [struct.pack("<i", token) for token in [*banned, 10**6]])
    path = changed(small, tmp_path / "model.gguf", put("tokenizer.ggml.suppress_tokens", ARRAY, ids))
    assert Tokenizer(path).suppressed == banned
    assert not set(generated(path)) & set(banned)


# Types that no kernel of ours reads, and types that ggml has given up.
UNREAD = {18: "iq3_xxs", 17: "iq2_xs", 21: "iq3_s", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 40: "nvfp4"}


@pytest.mark.parametrize("kind", UNREAD)
def test_types_are_refused_by_name(tmp_path: Path, kind: int) -> None:
    wide = write(tmp_path / "wide.gguf", replace(LLAMA, width=256, ffn_width=256))

    def change(_: list[Entry], tensors: list[Tensor]) -> None:
        i = next(i for i, tensor in enumerate(tensors) if tensor.name == f"{LAST}.weight".encode())
        tensors[i] = replace(tensors[i], kind=kind, data=bytes(256 * 256))

    path = changed(wide, tmp_path / "model.gguf", change)
    with pytest.raises(ModelError, match=rf"'{LAST}\.weight': weights of type {UNREAD[kind]} are not supported; use"):
        Model(str(path))


def test_a_type_that_was_given_up(small: Path, tmp_path: Path) -> None:
    def change(_: list[Entry], tensors: list[Tensor]) -> None:
        tensors[-1] = replace(tensors[-1], kind=36)

    with pytest.raises(ModelError, match=re.escape("model.gguf")):
        Model(str(changed(small, tmp_path / "model.gguf", change)))


def test_a_pre_tokenizer_without_a_name(small: Path, tmp_path: Path) -> None:
    path = changed(small, tmp_path / "model.gguf", put("tokenizer.ggml.pre", STRING, text("of-next-year")))
    with pytest.raises(ModelError, match="of-next-year"):
        Tokenizer(path)
