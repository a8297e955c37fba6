"""Models that our kernels refuse run by llama.cpp, and say so; sequence ids, cells and passes that run out or fail."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from support import random_models
from support.commands import here
from support.logits import llama_context, llama_pass
from support.random_models import RandomModel, write
from support.steps import evaluate, prefill, verify

import pystaged
from pystaged import DeviceError, FixedPolicy
from pystaged._core import Model, Sampling, Session, UnsupportedModelError
from pystaged.decoding.requests import perform
from pystaged.receipts.receipt import Receipt

LLAMA = RandomModel("llama", width=256, ffn_width=256, head_dim=32, heads=8, kv_heads=4)
# Where blocks of a type have their scales, and what is 0.01 there; elsewhere all bytes mean something.
SCALES = {
    "IQ1_S": (0, np.float16(0.01).tobytes()),
    "IQ2_XXS": (0, np.float16(0.01).tobytes()),
    "IQ3_XXS": (0, np.float16(0.01).tobytes()),
    "IQ3_S": (0, np.float16(0.01).tobytes()),
    "TQ2_0": (64, np.float16(0.05).tobytes()),
    "NVFP4": (0, bytes([0x10] * 4)),
}


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return random_blocks(tmp_path / "unknown.gguf", "IQ3_S", monkeypatch)


def random_blocks(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose matrices are random blocks of a type that the gguf package does not make."""
    rng, (at, scale) = np.random.default_rng(0), SCALES[kind]
    size, block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]

    def made(values: npt.NDArray[np.float32], quantization: GGMLQuantizationType) -> npt.NDArray[np.uint8]:
        del quantization
        blocks = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // size, block), np.uint8)
        blocks[..., at : at + len(scale)] = list(scale)
        return blocks.reshape(*values.shape[:-1], -1)

    monkeypatch.setattr(random_models.quants, "quantize", made)
    model = RandomModel(**{**vars(LLAMA), "quantization": kind, "tie": False, "types": {"token_embd": kind}})
    return write(path, model)


@pytest.mark.parametrize("kind", SCALES)
def test_types_that_our_kernels_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = random_blocks(tmp_path / "model.gguf", kind, monkeypatch)
    with pytest.raises(UnsupportedModelError, match=kind.lower()):
        Model(path)
    session, text, tree = Session(Model(path, num_threads=1, device="ggml-cpu"), 100), [*range(20)], [7, 8, 9]
    prefill(session, text)
    evaluate(session, tree, [-1, 0, 0])
    for row, way in enumerate(([7], [7, 8], [7, 9])):
        with llama_context(path, num_threads=1) as context:
            expected = [llama_pass(context, [token], i)[0] for i, token in enumerate([*text, *way])][-1]
        assert expected.std() > 0.01
        np.testing.assert_allclose(session.logits(row), expected, atol=0.05 * expected.std())


def test_an_engine_says_what_is_not_exact(unknown: Path) -> None:
    said = list[str]()
    with pystaged.load(unknown, report=said.append, num_threads=1, policy=FixedPolicy(4, 4, 12)) as engine:
        assert [line for line in said if "not exact, drafts from n-grams and draft models only" in line]
        assert engine.model.devices == ["CPU"]
        result = engine.generate([1, 2, 3] * 5, max_tokens=30)
        assert len(result.tokens) == 30 or result.finish_reason == "stop"
        with pytest.raises(ValueError, match=r"a receipt promises an exact text, and .* runs by llama\.cpp"):
            assert result.receipt
        many = engine.generate([1, 2, 3] * 5, n=3, max_tokens=20, temperature=1.0)
        assert len({tuple(each.tokens) for each in many}) > 1
        scored = engine.score([1, 2, 3, 4])
        assert np.isfinite(scored.logprobs[1:]).all()
        assert np.linalg.norm(engine.embed(["words"])[0]) == pytest.approx(1, abs=1e-3)
        kept = Receipt.load(Path(__file__).parent.parent / "data/greedy.receipt")
        with pytest.raises(ValueError, match="the receipt is of"):
            pystaged.repeat(engine, kept)
    done = here("bench", "lossless", "-m", unknown, "--limit", "1")
    assert done.returncode
    assert b"not promised to be the same again" in done.stderr


def test_it_is_said_before_a_text_is_written(unknown: Path) -> None:
    with pytest.warns(UserWarning, match=r"runs by llama\.cpp, because .*: its texts are not exact") as warned:
        pystaged.load(unknown, num_threads=1, policy=FixedPolicy(1, 1, 1)).close()
    assert (len(warned), warned[0].filename) == (1, __file__)
    with pytest.raises(
        ValueError, match=r"unknown\.gguf runs by llama\.cpp, which needs kv='f16' \(--kv f16\), not q8_0"
    ):
        pystaged.load(unknown, kv="q8_0")
    file = unknown.with_name("a.receipt")
    done = here("generate", "a", "-m", unknown, "--receipt", file)
    assert (done.returncode, done.stdout, file.exists()) == (1, b"", False)
    assert b"not promised to be the same again" in done.stderr
    done = here("info", unknown)
    assert b"runs by llama.cpp: not exact" in done.stderr
    rows = [line.split(maxsplit=1) for line in done.stdout.decode().splitlines()]
    assert ["kernel", "llama.cpp's on ggml-cpu"] in rows
    assert ["device", "cpu: this package's kernels, not for this model"] in rows


def test_more_leaves_than_ids(unknown: Path) -> None:
    """The first 256 leaves are verified; what leads to no leaf is left out."""
    session = Session(Model(unknown, num_threads=1, device="ggml-cpu"), 100)
    prefill(session, range(10))
    tree = np.arange(1 + 280) % 300
    parents = [-1] + [0] * 280
    path, tokens, found, scores = verify(session, tree, parents, Sampling(), 1)
    assert len(path) == len(tokens) >= 1
    assert (found[:257, 0] >= 0).all()
    assert (found[257:, 0] == -1).all()
    assert np.isneginf(scores[257:, 0]).all()
    assert session.tokens.tolist() == [*range(10), *tree[path].tolist()]


def test_proposals_of_leaves_that_are_left_out_are_empty(unknown: Path) -> None:
    session = Session(Model(unknown, num_threads=1, device="ggml-cpu"), 100)
    prefill(session, range(10))
    tokens, scores = perform(session, "propose", np.arange(281) % 300, [-1] + [0] * 280, 281, 2, Sampling())
    assert (tokens[:257] >= 0).all()
    assert (tokens[257:] == -1).all()
    assert np.isneginf(scores[257:]).all()


def test_ids_of_discarded_trees_are_free(unknown: Path) -> None:
    model = Model(unknown, num_threads=1, device="ggml-cpu")
    model.reserve(4000)
    crowd = [Session(model, 200) for _ in range(3)]
    for session in crowd:
        evaluate(session, range(101), [-1] + [0] * 100)
        session.discard()
    assert all(Session(model, 200).n_ctx == 200 for _ in range(20))


def test_a_failed_reading_takes_no_cells(tmp_path: Path) -> None:
    model = Model(write(tmp_path / "long.gguf", replace(LLAMA, context=1200)), num_threads=1, device="ggml-cpu")
    model.reserve(1)
    first, failing, last = (Session(model, 1200) for _ in range(3))
    prefill(first, [1] * 1000)
    with pytest.raises(DeviceError, match="is full"):
        prefill(failing, [2] * 1000)
    assert (len(failing.tokens), failing.num_pending) == (0, 0)
    prefill(last, [3] * 300)


def test_room_is_reserved_before_sessions(unknown: Path) -> None:
    model = Model(unknown, num_threads=1, device="ggml-cpu")
    with pytest.raises(ValueError, match=re.escape("room for 0 to 2^30 tokens")):
        model.reserve(2**31 - 1)
    session = Session(model, 100)
    with pytest.raises(ValueError, match="this model has sessions"):
        model.reserve(1000)
    session.close()
    model.reserve(1000)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no such signal")
def test_a_signal_handler_cannot_use_a_model_in_a_pass(tmp_path: Path) -> None:
    path = write(
        tmp_path / "slow.gguf",
        RandomModel("llama", width=512, ffn_width=2048, head_dim=64, heads=8, layers=4, context=1000),
    )
    model = Model(path, num_threads=1, device="ggml-cpu")
    session, other = Session(model, 1000), Session(model, 100)
    prefill(other, [1, 2, 3])
    said = list[str]()

    def handle(*_: object) -> None:
        try:
            other.rewind(1)
        except RuntimeError as error:
            said.append(str(error))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        while not said:  # a handler also runs between two passes, where it may use the model
            prefill(session, [7] * 900)
            session.rewind(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "in a pass that this call interrupts" in said[0]
    other.rewind(0)


def test_ids_of_texts_at_rest_are_taken_from_them(unknown: Path) -> None:
    model = Model(unknown, num_threads=1, device="ggml-cpu")
    crowd = [Session(model, 40) for _ in range(8)]
    tree, parents = [1, *range(2, 42)], [-1] + [0] * 40
    for session in crowd:
        prefill(session, [5, 6])
        verify(session, tree, parents, Sampling())
    for session in crowd:
        _, _, found, _ = verify(session, tree, parents, Sampling(), 1)
        assert (found >= 0).all()


def test_cells_run_out(unknown: Path) -> None:
    """Whoever needs them gets an error, and all others go on."""
    model = Model(unknown, num_threads=1, device="ggml-cpu")
    model.reserve(1000)
    crowd = [Session(model, 400) for _ in range(3)]
    for token, session in enumerate(crowd[:2]):
        prefill(session, [token] * 390)
    fork = crowd[0].fork(390)
    with pytest.raises(DeviceError, match=r"context of 1024 tokens for all texts is full"):
        prefill(crowd[2], [4] * 390)
    assert len(crowd[2].tokens) == 0
    for session in (crowd[0], fork):
        evaluate(session, [7], [-1])
    np.testing.assert_allclose(crowd[0].logits(0), fork.logits(0), atol=1e-3)
    crowd[1].close()
    prefill(crowd[2], [4] * 390)
