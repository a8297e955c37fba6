"""Damaged files load or are refused with a message; `python -m tests.fuzz --target gguf` damages them at random."""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import run_python
from support.families import CASES
from support.gguf_parts import (
    ARRAY,
    F32,
    I32,
    STRING,
    U8,
    U32,
    U64,
    Change,
    Entry,
    Gguf,
    Tensor,
    alter,
    array,
    assemble,
    changed,
    drop,
    num_bytes,
    put,
    text,
)
from support.paths import table
from support.random_models import RandomModel
from support.random_models import write as write_random_model
from support.steps import evaluate, prefill, rank, verify

import pystaged
from pystaged import ModelError, _core


@pytest.fixture
def small(random_gguf: Callable[..., Path]) -> Gguf:
    return Gguf(random_gguf(width=32, layers=1, vocab_size=257, context=16).read_bytes())


def set_weights(name: str, at: int, value: bytes) -> Change:
    """Put bytes into a tensor."""

    def change(_: list[Entry], tensors: list[Tensor]) -> None:
        i = [tensor.name for tensor in tensors].index(name.encode())
        data = tensors[i].data
        tensors[i] = replace(tensors[i], data=data[:at] + value + data[at + len(value) :])

    return change


def reshape(name: str, shape: tuple[int, ...], kind: int = 0) -> Change:
    """Make a tensor of zeros in another shape or type."""
    return alter(name, shape=shape, kind=kind, data=bytes(num_bytes(shape, kind)))


def tokens_of(items: list[str]) -> Change:
    return put("tokenizer.ggml.tokens", ARRAY, array(STRING, [text(item) for item in items]))


def damaged(what: str) -> dict[str, tuple[Change, str]]:
    """Rows of data/damaged_gguf.jsonl: what is changed how, and what is said."""
    made: dict[str, Callable[..., Change]] = {"drop": drop, "reshape": reshape}
    made["text"] = lambda key, value: put(key, STRING, text(value.encode("latin-1")))
    made["number"] = lambda key, kind, value: put(
        key, kind, struct.pack({U32: "<I", U64: "<Q", F32: "<f"}[kind], value)
    )
    return {name: (made[how](*given), says) for of, name, how, *given, says in table("damaged_gguf") if of == what}


MODEL_CASES: dict[str, tuple[Change, str]] = {
    **damaged("model"),
    "double-tensor": (lambda _, tensors: tensors.append(tensors[-1]), "tensor"),
    "double-key": (lambda entries, _: entries.append(entries[-1]), "duplicate key 'tokenizer.ggml.eos_token_id'"),
}
TOKENIZER_CASES: dict[str, tuple[Change, str]] = {
    **damaged("tokenizer"),
    "empty": (tokens_of([]), "vocabulary 'tokenizer.ggml.tokens' is missing, empty"),
    "twice": (tokens_of(["a", "b", "a"]), "token 2 of the vocabulary stands there twice"),
    "token-kind": (
        put("tokenizer.ggml.tokens", ARRAY, array(U32, [bytes(4)] * 257)),
        "'tokenizer.ggml.tokens' is not an array of str",
    ),
    "few-types": (
        put("tokenizer.ggml.token_type", ARRAY, array(I32, [b"\1\0\0\0"])),
        "out of array bounds for toktypes",
    ),
}


def test_an_unchanged_file_loads(small: Gguf, tmp_path: Path) -> None:
    path = changed(small.data, tmp_path / "same.gguf")
    assert path.read_bytes() == small.data
    _core.Tokenizer(path)
    _core.Model(path)


def test_metadata_whose_keys_differ_behind_a_zero(small: Gguf, tmp_path: Path) -> None:
    def change(entries: list[Entry], _: list[Tensor]) -> None:
        entries += [Entry(b"a", STRING, text("one")), Entry(b"a\0b", U32, struct.pack("<I", 2))]

    path = changed(small.data, tmp_path / "zero.gguf", change)
    assert _core.metadata(path)["a"] in ("one", "2")
    _core.Tokenizer(path)


@pytest.mark.parametrize(("change", "message"), MODEL_CASES.values(), ids=MODEL_CASES)
def test_refused_models(small: Gguf, tmp_path: Path, change: Change, message: str) -> None:
    path = changed(small.data, tmp_path / "bad.gguf", change)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        _core.Model(path, "", 1)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("change", "message"), TOKENIZER_CASES.values(), ids=TOKENIZER_CASES)
def test_refused_tokenizers(small: Gguf, tmp_path: Path, change: Change, message: str) -> None:
    path = changed(small.data, tmp_path / "bad.gguf", change)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        _core.Tokenizer(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "the file is empty"), (b"not a model at all", "no GGUF file: it does not begin with the letters GGUF")],
    ids=["empty", "text"],
)
@pytest.mark.parametrize("load", [_core.Model, _core.Tokenizer, pystaged.load])
def test_not_gguf(tmp_path: Path, load: Callable[[str], object], data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=re.escape(f"{path}: ") + ".*" + message):
        load(str(path))


@pytest.mark.parametrize("end", [3, 20, 600, 5000, -20000, -1])
@pytest.mark.parametrize("load", [_core.Model, _core.Tokenizer])
def test_truncated(small: Gguf, tmp_path: Path, load: Callable[[str], object], end: int) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(small.data[:end])
    message = "no GGUF file" if end == 3 else "truncated or damaged"
    with pytest.raises(ModelError, match=message):
        load(str(path))


@pytest.mark.parametrize("device", ["cpu", "ggml-cpu"])
@pytest.mark.parametrize(("ffn_width", "vocab_size"), [(1 << 18, 257), (4, 1 << 20)], ids=["wide", "many-tokens"])
def test_memory_out_of_proportion(tmp_path: Path, ffn_width: int, vocab_size: int, device: str) -> None:
    shape = RandomModel("llama", 2, 1, heads=1, kv_heads=1, ffn_width=ffn_width, vocab_size=vocab_size)
    shape.vocabulary = lambda *_: None  # whose words are not needed
    path = write_random_model(tmp_path / "narrow.gguf", shape)
    with pytest.raises(
        ModelError, match=r"narrow.gguf: .* MiB of memory for a file of \d+; it is damaged or not a model"
    ):
        _core.Model(str(path), device=device)


def test_wide_queries_out_of_proportion(tmp_path: Path) -> None:
    narrow = {"width": 32, "layers": 1, "heads": 1, "kv_heads": 1, "ffn_width": 32, "quantization": "Q4_0"}
    shape = replace(CASES["deepseek2"], **narrow, experts=(0, 0, 0, 0), dense=0, latent=(32, 1 << 17, 32, 16, 32))
    with pytest.raises(ModelError, match=r"would take \d+ MiB of memory for a file of"):
        _core.Model(str(write_random_model(tmp_path / "model.gguf", shape)))


@pytest.mark.parametrize("load", [_core.Model, _core.Tokenizer])
def test_no_file(tmp_path: Path, load: Callable[[str], object]) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}/none.gguf: .*No such file"):
        load(f"{tmp_path}/none.gguf")
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        load(str(tmp_path))


@pytest.mark.parametrize("device", ["cpu", "ggml-cpu"])
@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_norm.bias", "position_embd.weight"])
def test_floats_that_are_not_finite(small: Gguf, tmp_path: Path, name: str, device: str) -> None:
    path = changed(small.data, tmp_path / "bad.gguf", set_weights(name, 4, struct.pack("<f", float("-inf"))))
    with pytest.raises(ModelError, match=f"tensor '{name}' (holds .* not finite|has invalid data)"):
        _core.Model(path, device=device)


@pytest.mark.parametrize("device", ["cpu", "ggml-cpu"])
@pytest.mark.parametrize("number", [3e38, -3e38])
def test_logits_that_are_not_finite(small: Gguf, tmp_path: Path, number: float, device: str) -> None:
    """Finite weights, infinite sums: one column of the embedding times a huge normed value."""
    shift = set_weights("output_norm.bias", 0, struct.pack("<f", number))
    path = changed(
        small.data, tmp_path / "bad.gguf", shift, set_weights("token_embd.weight", 0, struct.pack("<f", 1e6))
    )
    session = _core.Session(_core.Model(path, device=device))
    prefill(session, [1, 2, 3])
    with pytest.raises(ModelError, match="logits of a pass are not finite"):
        verify(session, [5, 6], [-1, 0], _core.Sampling())
    assert (session.tokens.tolist(), session.num_pending) == ([1, 2, 3], 0)
    evaluate(session, [5], [-1])
    with pytest.raises(ModelError, match="logits of a pass are not finite"):
        rank(session, [0], 2, _core.Sampling())


TRUNCATED_WHILE_READ = """
import os, sys
from pystaged import _core

try:
    _core.Model(sys.argv[1], device="ggml-cpu", progress=lambda: os.truncate(sys.argv[1], 4096))
except _core.ModelError as error:
    print(error)
"""


def test_truncated_while_it_is_read(random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(random_gguf("F16", width=256, layers=2, vocab_size=300).read_bytes())
    done = run_python(TRUNCATED_WHILE_READ, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"short.gguf: .*unexpectedly reached end of file", done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_refused_file_stays_neither_open_nor_mapped(small: Gguf, tmp_path: Path) -> None:
    path = tmp_path / "refused.gguf"
    path.write_bytes(small.data[:-1])
    for load in (_core.Model, _core.Tokenizer):
        with pytest.raises(ModelError, match="beyond the end"):
            load(str(path))
    assert "refused.gguf" not in Path("/proc/self/maps").read_text()
    assert not [file for file in Path("/proc/self/fd").iterdir() if file.exists() and file.resolve() == path]


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    for load in (_core.Model, _core.Tokenizer):
        with pytest.raises(ModelError, match=r"pipe\.gguf: cannot open: it is no regular file"):
            load(str(path))


def test_the_most_layers_run(random_gguf: Callable[..., Path]) -> None:
    path = random_gguf(width=8, heads=1, layers=512, vocab_size=257, context=8)
    session = _core.Session(_core.Model(str(path)))
    with ThreadPoolExecutor(1) as pool:  # on a thread's smaller stack
        pool.submit(verify, session, [1, 2], [-1, 0], _core.Sampling()).result()


def test_tensors_at_any_address(small: Gguf, tmp_path: Path) -> None:
    """With general.alignment 1 tensors begin where the one before ends."""
    entries = [*small.entries, Entry(b"general.alignment", U32, struct.pack("<I", 1)), Entry(b"general.odd", U8, b"0")]
    path = tmp_path / "odd.gguf"
    path.write_bytes(assemble(entries, small.tensors, 1))
    same = tmp_path / "even.gguf"
    same.write_bytes(small.data)
    logits = []
    for file in (path, same):
        session = _core.Session(_core.Model(str(file), num_threads=1))
        evaluate(session, [1, 2, 3], [-1, 0, 1])
        logits.append(session.logits(2).tobytes())
    assert logits[0] == logits[1]


@pytest.mark.parametrize("load", [_core.Model, _core.Tokenizer])
def test_any_form_of_path(small: Gguf, tmp_path: Path, load: Callable[[object], object]) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.gguf"))
    try:
        path.write_bytes(small.data)
    except OSError:
        path = tmp_path / "m.gguf"
        path.write_bytes(small.data)
    for form in (path, str(path), os.fsencode(path)):
        load(form)
    pystaged.load(path).close()
    with pytest.raises(ModelError, match=r"none\.gguf"):
        load(os.fsencode(path) + b"none.gguf")
    with pytest.raises(TypeError):
        load(5)
    with pytest.raises(ValueError, match="null"):
        load(f"{path}\0")


def test_weights_for_another_vocabulary(small: Gguf, tmp_path: Path) -> None:
    path = changed(small.data, tmp_path / "bad.gguf", reshape("token_embd.weight", (32, 256)))
    with pytest.raises(ModelError, match="has weights for 256 tokens, but a vocabulary of 257"):
        pystaged.load(path)
