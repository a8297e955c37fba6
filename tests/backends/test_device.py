"""The portable path: decoders in ggml's own operations, here on ggml's CPU backend or on $PYSTAGED_TEST_DEVICE."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from grow import grow
from support.device import DEVICE, GPU_LAYERS
from support.family_reference import FamilyReference
from support.libraries import LLAMA_TOLERANCE
from support.logits import llama_context, llama_output, llama_pass
from support.random_models import RandomModel, write
from typer.testing import CliRunner

import pystaged
from pystaged import DeviceError, FixedPolicy
from pystaged._core import ContextFullError, Model, Sampling, Session
from pystaged.backends.audit import audit
from pystaged.backends.devices import candidates
from pystaged.cli import app
from pystaged.config import SamplingConfig
from pystaged.decoding.cost import PassCost
from pystaged.loading import bundle
from pystaged.loading.costs import Costs

Floats = npt.NDArray[np.float32]

ROWS = 64  # of a pass
GREEDY = SamplingConfig()
PROMPT = "def fibonacci(n):"
# ggml keeps keys, values and GELU as float16.
TOLERANCE = 0.02


def open_session(path: Path, n_ctx: int = 0) -> Session:
    return Session(Model(str(path), num_threads=1, device=DEVICE), n_ctx)


def all_logits(session: Session, tokens: list[int]) -> Floats:
    """Logits after each token, in one evaluation."""
    session.evaluate(tokens, range(-1, len(tokens) - 1))
    found = np.stack([session.logits(row) for row in range(len(tokens))])
    session.discard()
    return found


@pytest.fixture(scope="module")
def float_target(bundled_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target with its weights as float32."""
    path, shape = tmp_path_factory.mktemp("float") / "target.gguf", Model(str(bundled_target))
    grow(bundled_target, path, width=shape.width, layers=shape.num_layers, quantization="F32")
    return path


@pytest.mark.parametrize(("family", "quantization"), [("llama", "F32"), ("llama", "Q8_0"), ("qwen3", "Q4_1")])
def test_families_against_llama_cpp(tmp_path: Path, family: str, quantization: str) -> None:
    path = write(tmp_path / "model.gguf", RandomModel(family, head_dim=32, quantization=quantization))
    assert_as_llama_cpp(path, np.random.default_rng(0).integers(0, 257, 3 * ROWS).tolist(), np.arange(257))


def assert_as_llama_cpp(path: Path, text: list[int], mine: npt.NDArray[np.intp]) -> None:
    """The logits of the tokens `mine` in whole passes of a text, in passes of one row and in one of a tree.

    ggml's results depend on the rows of a pass, so llama.cpp is given the same passes.
    """
    rng = np.random.default_rng(2)
    session = open_session(path)
    actual, expected = [all_logits(session, text)], []
    session.prefill(text)
    with llama_context(path, GPU_LAYERS) as context:
        for first in range(0, len(text), ROWS):
            expected.append(llama_pass(context, text[first : first + ROWS], first))
        for _ in range(16):
            token = int(actual[-1][-1].argmax())
            session.evaluate([token], [-1])
            actual.append(session.logits(0)[None])
            expected.append(llama_pass(context, [token], len(session.tokens)))
            session.commit([0])
        tokens, parents = rng.choice(mine, 12).tolist(), [-1, 0, 0, 1, 1, 2, 3, 3, 4, 6, 6, 9]
        session.evaluate(tokens, parents)
        actual.append(np.stack([session.logits(row) for row in range(12)]))
        expected.append(llama_tree(context, tokens, parents, len(session.tokens)))
    assert np.abs(np.concatenate(actual) - np.concatenate(expected))[:, mine].max() <= LLAMA_TOLERANCE


def llama_tree(context: Any, tokens: list[int], parents: list[int], position: int) -> Floats:
    """Logits after each node of a tree, by llama.cpp with a sequence for each leaf."""
    size = len(tokens)
    leaves = sorted(set(range(size)) - set(parents))
    sequences, depths = [list[int]() for _ in tokens], [0] * size
    for node in range(1, size):
        depths[node] = depths[parents[node]] + 1
    for sequence, leaf in enumerate(leaves):
        llama_cpp.llama_memory_seq_cp(llama_cpp.llama_get_memory(context), 0, sequence, -1, -1)
        node = leaf
        while node >= 0:
            sequences[node].append(sequence)
            node = parents[node]
    batch = llama_cpp.llama_batch_init(size, 0, len(leaves))
    batch.n_tokens = size
    for node in range(size):
        batch.token[node], batch.pos[node], batch.logits[node] = tokens[node], position + depths[node], 1
        batch.n_seq_id[node] = len(sequences[node])
        for i, sequence in enumerate(sequences[node]):
            batch.seq_id[node][i] = sequence
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    assert status == 0
    return llama_output(context, size)


@pytest.mark.slow
def test_any_type_of_ggml(random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source, path = random_gguf("F32", width=256), tmp_path / "iq3_s.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = 26  # IQ3_S
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params) == 0
    with pytest.raises(pystaged.ModelError, match="iq3_s"):
        Model(str(path))
    model = Model(str(path), device=DEVICE)
    assert next(iter(model.weight_types)) == "iq3_s"
    assert 0 < model.weight_bytes < Model(str(source)).weight_bytes / 4
    tokens = list(range(40))
    exact, found = FamilyReference(source, half=False).logits(tokens), all_logits(Session(model), tokens)
    assert np.corrcoef(exact.ravel(), found.ravel())[0, 1] > 0.9


def test_trees_and_commits(random_gguf: Callable[..., Path]) -> None:
    """After any sequence of trees and commits the logits are those of the committed text."""
    path, rng = random_gguf("F32", context=96), np.random.default_rng(1)
    reference, session = FamilyReference(path, half=False), open_session(path)
    text = rng.integers(0, 257, 5).tolist()
    session.prefill(text)
    for _ in range(12):
        size = int(rng.integers(2, 12))
        tokens = rng.integers(0, 257, size).tolist()
        parents = [-1, *(int(rng.integers(-1, i)) for i in range(1, size))]
        session.evaluate(tokens[:1], parents[:1])
        session.evaluate(tokens[1:], parents[1:])
        ways: list[list[int]] = []
        for row in range(size):
            ways.append([*(ways[parents[row]] if parents[row] >= 0 else []), row])
            expected = reference.logits(text + [tokens[i] for i in ways[row]])[-1]
            assert np.abs(session.logits(row) - expected).max() <= TOLERANCE
        path_kept = ways[int(rng.integers(size))]
        session.commit(path_kept)
        text += [tokens[i] for i in path_kept]
        assert session.tokens.tolist() == text
        if len(text) > 60:
            text = text[:20]
            session.rewind(20)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 3, 0.9, 0.05, 7), Sampling(1.0)])
def test_a_shortlist_chooses_as_all_logits_do(bundled_target: Path, sampling: Sampling) -> None:
    session = open_session(bundled_target)
    session.prefill(range(40, 60))
    session.evaluate([30, 31, 32, 33], [-1, -1, 0, 1])
    chosen = [int(session.follow(sampling, row)[1][0]) for row in range(4)]
    # Candidates come from whole rows.
    found, _ = session.candidates(range(4), 1, sampling)
    assert chosen == found[:, 0].tolist()


@pytest.mark.parametrize("k", [1, 100])
def test_the_largest_logits_of_verified_rows(bundled_target: Path, k: int) -> None:
    apart, session = open_session(bundled_target), open_session(bundled_target)
    for each in (apart, session):
        each.prefill(range(40, 60))
    apart.evaluate([30, 31, 32, 33], [-1, 0, 0, 1])
    logits = np.stack([apart.logits(row) for row in range(4)])
    _, _, tokens, values = session.verify([30, 31, 32, 33], [-1, 0, 0, 1], Sampling(), k)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, axis=1))


def test_errors_leave_a_session_as_it_was(random_gguf: Callable[..., Path]) -> None:
    session = open_session(random_gguf("F32"), 8)
    session.prefill([1, 2, 3])
    with pytest.raises(ContextFullError):
        session.evaluate(range(6), range(-1, 5))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        session.evaluate([100000], [-1])
    assert session.tokens.tolist() == [1, 2, 3]
    session.close()
    with pytest.raises(ValueError, match="closed"):
        session.evaluate([1], [-1])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 50}, {"temperature": 0.8, "top_p": 0.95}])
@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
def test_staged_decoding_is_the_models_own(
    bundled_target: Path, float_target: Path, quantization: str, sampling: dict[str, Any]
) -> None:
    path = float_target if quantization == "F32" else bundled_target
    with pystaged.load(path, draft="bundled", device=DEVICE, policy=FixedPolicy(4, 5, 12)) as engine:
        assert engine.model.devices
        assert engine.draft is not None
        assert engine.draft.devices == []
        result = engine.generate(PROMPT, max_tokens=48, **sampling)
        assert result.stats.accepted > 5
        session = Session(engine.model)
        prompt = engine.tokenizer.encode(PROMPT)
        difference = audit(session, prompt, result.tokens, SamplingConfig(**sampling))
        # Not promised to the bit. ggml's logits of the Q8_0 model vary by up to 0.6 with the rows of a pass, so two of
        # them may come that much closer to each other from either side.
        assert difference is None or difference.gap < (2 * TOLERANCE if quantization == "F32" else 1.2)


@pytest.mark.slow
def test_an_audit_finds_a_wrong_token(bundled_target: Path) -> None:
    session = open_session(bundled_target)
    tokenizer = pystaged._core.Tokenizer(str(bundled_target))
    prompt = tokenizer.encode(PROMPT)
    own = pystaged.generate(PROMPT, model="bundled", max_tokens=8, speculate=False).tokens
    assert audit(session, prompt, own[:1], GREEDY) is None
    wrong = [*own[:3], own[3] + 1, *own[4:]]
    difference = audit(session, prompt, wrong, GREEDY)
    assert difference is not None
    assert (difference.index, difference.emitted, difference.replayed) == (3, own[3] + 1, own[3])
    assert difference.gap > 0


def test_auto_takes_the_fastest_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {("target", "cpu"): 2e-3, ("target", DEVICE): 1e-3, ("draft", "cpu"): 1e-4, ("draft", DEVICE): 9e-4}

    def cost(self: object, path: Path, device: str, *_: object, **__: object) -> PassCost:
        del self
        return PassCost({1: costs[path.name.split(".")[0], device]})

    monkeypatch.setattr(bundle, "candidates", lambda name, _: ["cpu", DEVICE] if name == "auto" else [name])
    monkeypatch.setattr(Costs, "of", cost)
    chosen = bundle.Bundle("bundled", "auto", 0, lambda _: None, device="auto", draft_device="auto")
    assert (chosen.device, chosen.draft_device) == (DEVICE, "cpu")
    assert chosen.target.devices
    assert chosen.draft is not None
    assert chosen.draft.devices == []


def test_candidates() -> None:
    gpus = [device.name for device in pystaged.devices() if device.is_gpu]
    assert candidates("auto") == ["cpu", *gpus]
    assert candidates("ggml-cpu") == ["ggml-cpu"]


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("abacus0", DeviceError, "no device 'abacus0' here; there are: cpu, ggml-cpu"),
        ("", ValueError, "needs a name"),
        ("rpc:somewhere", ValueError, "is not HOST:PORT"),
        ("rpc:a:1,b:99999", ValueError, "'b:99999'"),
        (",", DeviceError, "no device"),
    ],
)
def test_names_that_are_no_devices(device: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        pystaged.load("bundled", device=device)


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "ggml-cpu" in run(app, ["info"]).stdout
    file = str(tmp_path / "it.receipt")
    on = ["--device", DEVICE]
    assert run(app, ["generate", PROMPT, "-m", "bundled", "--max-tokens", "8", "--receipt", file, *on]).exit_code == 0
    replayed = run(app, ["verify", file, "--by-row", *on])
    assert (replayed.exit_code, "8 tokens" in replayed.stdout) == (0, True)
