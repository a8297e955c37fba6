"""LlamaPass on ggml's CPU backend or on $PYSTAGED_TEST_DEVICE."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device import DEVICE, gap_alone
from support.families import CASES
from support.family_reference import FamilyReference, log_softmax
from support.logits import model_logits
from support.random_models import quantize, write
from support.steps import evaluate, path_to, prefill, rank, verify
from typer.testing import CliRunner

import pystaged
from pystaged import DeviceError, FixedPolicy
from pystaged._core import Model, Sampling, Session
from pystaged.backends.devices import candidates
from pystaged.cli import app
from pystaged.decoding.cost import PassCost
from pystaged.loading import bundle
from pystaged.loading.costs import Costs
from pystaged.options.config import SamplingConfig

PROMPT = "def fibonacci(n):"
# ggml keeps keys, values and GELU as float16.
TOLERANCE = 0.02


def open_session(path: Path) -> Session:
    return Session(Model(str(path), num_threads=1, device=DEVICE))


@pytest.mark.slow
def test_any_type_of_ggml(random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source, path = random_gguf("F32", width=256), tmp_path / "iq3_s.gguf"
    quantize(source, path, "MOSTLY_IQ3_S")
    with pytest.raises(pystaged.ModelError, match="iq3_s"):
        Model(str(path))
    model = Model(str(path), device=DEVICE)
    assert next(iter(model.weight_types)) == "iq3_s"
    assert 0 < model.weight_bytes < Model(str(source)).weight_bytes / 4
    tokens = list(range(40))
    exact, found = FamilyReference(source, half=False).logits(tokens), model_logits(model, tokens)
    assert np.corrcoef(exact.ravel(), found.ravel())[0, 1] > 0.9


def test_trees_and_commits(random_gguf: Callable[..., Path]) -> None:
    """After any sequence of trees and commits the logits are those of the committed text."""
    path, rng = random_gguf("F32", context=96), np.random.default_rng(1)
    reference, session = FamilyReference(path, half=False), open_session(path)
    text = rng.integers(0, 257, 5).tolist()
    prefill(session, text)
    for _ in range(12):
        size = int(rng.integers(2, 12))
        tokens = rng.integers(0, 257, size).tolist()
        parents = [-1, *(int(rng.integers(-1, i)) for i in range(1, size))]
        evaluate(session, tokens[:1], parents[:1])
        evaluate(session, tokens[1:], parents[1:])
        for row in range(size):
            expected = reference.logits(text + [tokens[i] for i in path_to(row, parents)])[-1]
            assert np.abs(session.logits(row) - expected).max() <= TOLERANCE
        path_kept = path_to(int(rng.integers(size)), parents)
        session.commit(path_kept)
        text += [tokens[i] for i in path_kept]
        assert session.tokens.tolist() == text
        if len(text) > 60:
            text = text[:20]
            session.rewind(20)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 3, 0.9, 0.05, 7), Sampling(1.0)])
def test_texts_choose_the_first_candidate(bundled_target: Path, sampling: Sampling) -> None:
    session = open_session(bundled_target)
    prefill(session, range(40, 60))
    evaluate(session, [30, 31, 32, 33], [-1, -1, 0, 1])
    chosen = [int(session.follow(sampling, row)[1][0]) for row in range(4)]
    found, _ = rank(session, range(4), 1, sampling)
    assert chosen == found[:, 0].tolist()


@pytest.mark.parametrize("k", [1, 100])
def test_the_largest_logits_of_verified_rows(bundled_target: Path, k: int) -> None:
    apart, session = open_session(bundled_target), open_session(bundled_target)
    for each in (apart, session):
        prefill(each, range(40, 60))
    evaluate(apart, [30, 31, 32, 33], [-1, 0, 0, 1])
    logits = np.stack([apart.logits(row) for row in range(4)])
    _, _, tokens, values = verify(session, [30, 31, 32, 33], [-1, 0, 0, 1], Sampling(), k)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 50}, {"temperature": 0.8, "top_p": 0.95}])
def test_staged_decoding_is_the_models_own(random_gguf: Callable[..., Path], sampling: dict[str, Any]) -> None:
    path = random_gguf("F32", context=96)
    with pystaged.load(path, draft=path, device=DEVICE, policy=FixedPolicy(4, 5, 12)) as engine:
        assert engine.model.devices
        assert engine.draft is not None
        assert engine.draft.devices == []
        result = engine.generate(PROMPT, max_tokens=48, **sampling)
        assert result.stats.accepted > 5
        session = Session(engine.model)
        prompt = engine.tokenizer.encode(PROMPT)
        gap = gap_alone(session, prompt, result.tokens, SamplingConfig(**sampling))
        assert gap < 2 * TOLERANCE  # not promised to the bit


def test_auto_takes_the_fastest_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {("target", "cpu"): 2e-3, ("target", DEVICE): 1e-3, ("draft", "cpu"): 1e-4, ("draft", DEVICE): 9e-4}

    def cost(self: object, path: Path, device: str, *_: object, **__: object) -> PassCost:
        del self
        return PassCost({1: costs[path.name.split(".")[0], device]})

    monkeypatch.setattr(bundle, "candidates", lambda name, _: ["cpu", DEVICE] if name == "auto" else [name])
    monkeypatch.setattr(Costs, "of", cost)
    chosen = bundle.Bundle("bundled", draft="auto", num_threads=0, device="auto", draft_device="auto")
    assert (chosen.device, chosen.draft_device) == (DEVICE, "cpu")
    assert chosen.target.devices
    assert chosen.draft is not None
    assert chosen.draft.devices == []


@pytest.mark.parametrize("case", ["gemma2", "gpt-oss", "olmo2-windows"])
def test_cells_that_a_window_hides_stay_a_texts_own(tmp_path: Path, case: str) -> None:
    """Another text's rows, which need cells meanwhile, change nothing of what a text can go back to."""
    path = write(tmp_path / "model.gguf", CASES[case])
    model, alone = (Model(path, num_threads=1, device=DEVICE) for _ in range(2))
    tokens = np.random.default_rng(0).integers(0, 8, 150)
    other, session, fresh = Session(model, 500), Session(model, 500), Session(alone, 500)
    prefill(other, [5] * 30)
    prefill(session, tokens)
    other.rewind(29)
    prefill(other, [6] * 60)
    prefill(fresh, tokens[:20])
    for left in (session.fork(20), session):
        assert left.rewind(20) == 20
        for each in (left, fresh):
            evaluate(each, [3], [-1])
        assert np.abs(log_softmax(left.logits(0)) - log_softmax(fresh.logits(0))).max() <= TOLERANCE
        fresh.discard()


def test_candidates() -> None:
    gpus = [device.name for device in pystaged.devices() if device.is_gpu]
    assert candidates("auto") == ["cpu", *gpus]
    assert candidates("ggml-cpu") == ["ggml-cpu"]


def test_the_cpu_in_capitals_is_our_kernels() -> None:
    with pystaged.load("bundled", device=" CPU", draft_device="Cpu") as engine:
        assert (engine.device, engine.model.devices) == ("cpu", [])


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("abacus0", DeviceError, "no device 'abacus0' here; there are: cpu, ggml-cpu"),
        ("", ValueError, "needs a name"),
        ("rpc:somewhere", ValueError, "is not HOST:PORT"),
        ("rpc:a:1,b:99999", ValueError, "'b:99999'"),
        (",", ValueError, "a list of devices has each once"),
        ("cpu,ggml-cpu", ValueError, "neither cpu nor auto"),
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
    repeated = run(app, ["verify", file, *on])
    assert "8 tokens" in repeated.stdout
    assert "promised for the CPU only" in repeated.stderr
