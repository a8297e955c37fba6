"""Recipes of the repository's models folder, in processes of their own."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from random_weights import write_random_gpt2
from support.checkpoints import config, weights, write_checkpoint, write_weights
from support.logits import engine_logits, llama_logits
from support.reference import Gpt2Reference

import pystaged
from pystaged.loading.convert import convert

REPOSITORY = Path(__file__).parents[2]
TOKENS = [5, 17, 255, 0, 298, 42, 42, 7, 130, 61, 3]

pytestmark = pytest.mark.skipif(not (REPOSITORY / "models" / "grow.py").exists(), reason="only in the repository")


def run(recipe: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"models.{recipe}", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_grow(tmp_path: Path) -> None:
    source, grown = tmp_path / "source.gguf", tmp_path / "grown.gguf"
    write_random_gpt2(source, width=64, layers=2, heads=2, vocab_size=300, context=32, quantization="F16", tie=False)
    done = run("grow", source, grown, "--width", 128, "--layers", 3, "--type", "F16")
    assert done.returncode == 0, done.stderr
    expected = Gpt2Reference(source).logits(TOKENS)
    np.testing.assert_allclose(Gpt2Reference(grown).logits(TOKENS), expected, rtol=0, atol=1e-3)
    refused = run("grow", source, grown, "--width", 100)
    assert refused.returncode == 2
    assert "width 100 is not a multiple" in refused.stderr


@pytest.fixture(params=[True, False], ids=["tied", "separate-head"])
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A tiny model with likes and dislikes, so that there is something to learn."""
    shape = {"tie_word_embeddings": request.param}
    folder = write_checkpoint(tmp_path / "checkpoint", **shape)
    arrays = weights(config(**shape))
    arrays["transformer.wte.weight" if request.param else "lm_head.weight"] *= 4
    write_weights(folder, arrays)
    convert(folder, tmp_path / "target.gguf", quantization="F16")
    return tmp_path / "target.gguf"


def test_distill(target: Path, tmp_path: Path) -> None:
    for package in ("torch", "tokenizers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    out = tmp_path / "draft.gguf"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the tree then another tree and the other then " * 20)
    done = run(
        *("distill", "--target", target, "--out", out, "--draft-shape", "1x32x2", "--type", "F16", "--device", "cpu"),
        *("--steps", 60, "--texts", 16, "--length", 48, "--threads", 1, "--prompts", prompts),
    )
    assert done.returncode == 0, done.stderr
    before, after = (float(re.search(rf"{when}: ([\d.]+) nats", done.stdout)[1]) for when in ("before", "after"))
    assert 0 < after < 0.8 * before
    logits = Gpt2Reference(out).logits(TOKENS)
    (llama,) = llama_logits(out, [TOKENS])
    assert np.abs(llama - logits).max() <= 0.05
    assert np.abs(engine_logits(out, TOKENS) - logits).max() <= 0.05
    with pystaged.load(target, draft=out) as engine:
        assert engine.generate("the tree", max_tokens=20).tokens


def test_a_checkpoint_is_read_without_running_what_it_holds(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import models.model as model  # noqa: PLC0415, PLR0402

    config = model.Config(width=8, layers=1, heads=1, num_known=5, context=16, tied=False)
    saved = model.Checkpoint(model.GPT(config), np.arange(0, 50, 10), 60)
    saved.save(tmp_path / "model.pt")
    read = model.load(tmp_path / "model.pt")
    assert read.model.config == config
    assert read.vocab_size == 60
    np.testing.assert_array_equal(read.known, saved.known)
    for name, value in saved.model.state_dict().items():
        assert torch.equal(read.model.state_dict()[name], value), name

    torch.save({"config": _Evil(tmp_path / "run")}, tmp_path / "evil.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        model.load(tmp_path / "evil.pt")
    assert not (tmp_path / "run").exists()


class _Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)
