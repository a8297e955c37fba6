"""Recipes of the repository's models folder, in processes of their own."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from support.checkpoints import config, weights, write_checkpoint, write_weights
from support.convert import convert
from support.family_reference import FamilyReference
from support.logits import engine_logits, llama_logits
from support.random_models import RandomModel, add_vocabulary, write

import pystaged
from pystaged._core import DraftHead, Model
from pystaged.decoding.policy import FixedPolicy

REPOSITORY = Path(__file__).parents[2]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
TOKENS = [5, 17, 255, 0, 298, 42, 42, 7, 130, 61, 3]

pytestmark = pytest.mark.skipif(not (REPOSITORY / "models" / "grow.py").exists(), reason="only in the repository")


def run(recipe: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"models.{recipe}", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


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


@pytest.mark.slow
def test_distill(target: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
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
    logits = FamilyReference(out, half=False).logits(TOKENS)
    (llama,) = llama_logits(out, [TOKENS])
    assert np.abs(llama - logits).max() <= 0.05
    assert np.abs(engine_logits(out, TOKENS) - logits).max() <= 0.05
    with pystaged.load(target, draft=out) as engine:
        assert engine.generate("the tree", max_tokens=20).tokens


def test_a_checkpoint_is_read_without_running_what_it_holds(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import models.model as model  # noqa: PLC0415, PLR0402

    config = model.Config(width=8, layers=1, heads=1, vocab_size=60, context=16, tied=False)
    saved = model.GPT(config)
    model.save(saved, tmp_path / "model.pt")
    read = model.load(tmp_path / "model.pt")
    assert read.config == config
    for name, value in saved.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name

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


@pytest.mark.slow
def test_a_draft_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import answers  # noqa: PLC0415
    import head  # noqa: PLC0415  needs torch

    def vocabulary(writer: GGUFWriter, size: int) -> None:
        add_vocabulary(writer, size)
        writer.add_chat_template(CHATML)

    def likes(found: dict[str, np.ndarray]) -> None:
        found["token_embd.weight"] *= 4

    model = RandomModel("llama", layers=3, head_dim=32, vocab_size=400, context=512, vocabulary=vocabulary)
    target = write(tmp_path / "target.gguf", model, likes)
    monkeypatch.setattr(answers, "ANSWERS", 8)
    monkeypatch.setattr(answers, "documentation", lambda: iter(["A tree has leaves. It grows where there is light."]))
    folder, out = tmp_path / "answers", tmp_path / "head.gguf"
    answers.main([str(target), str(folder), "--files", "5"])
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"000{number}.npz" for number in range(5)]
    greedy = head.Answers.load(files[0])
    assert greedy.layers == [1, 2, 3]
    # The states are those that the tokens came of.
    last = head.norm(greedy.states[:, -64:].float(), head.Target.load(target).norm)
    likeliest = (last @ head.Target.load(target).head.T).argmax(-1)
    assert (likeliest == greedy.tokens).float().mean() > 0.9

    command = [str(target), str(folder), str(out), "--window", "64", "--tokens", "128", "--ffn-width", "64"]
    head.main([*command, "--minutes", "0.05"])
    trained = torch.load(out.with_suffix(".pt"), weights_only=True)
    head.main([*command, "--minutes", "0.1", "--type", "F32"])
    later = torch.load(out.with_suffix(".pt"), weights_only=True)
    assert later["step"] > trained["step"] > 0
    assert later["tokens"].equal(trained["tokens"])
    loaded = head.Target.load(target)
    twin = head.DraftHead(loaded, later["tokens"], 3, 64, 1)
    twin.load_state_dict(later["head"])
    native, runs = DraftHead(out), Model(target)
    runs.tap(native.taps)
    assert native.tokens.tolist() == later["tokens"].tolist()
    states = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    state = native.begin(runs, states)
    with torch.no_grad():
        expected = twin.begin(torch.from_numpy(states).view(1, -1))
        after = twin(expected, torch.tensor([7]))
        chances = twin.logits(after).log_softmax(-1)[0].numpy()
    np.testing.assert_allclose(state, expected[0], atol=0.05)
    found = native.step(runs, state[None], [7], 128)
    np.testing.assert_allclose(found[0], after, atol=0.1)
    by_token = dict(zip(native.tokens.tolist(), chances.tolist(), strict=True))
    np.testing.assert_allclose(found[2][0], [by_token[token] for token in found[1][0].tolist()], atol=0.2)
    # It knows its target better than chance does.
    with pystaged.load(target, draft=out, recycle=False, policy=FixedPolicy(1, 3, 3)) as engine:
        drafted = engine.generate("a question", max_tokens=100)
        assert drafted.tokens == engine.generate("a question", max_tokens=100, speculate=False).tokens
        assert drafted.stats.drafters["draft"].passes > 0
