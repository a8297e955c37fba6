"""The recipe of the package's draft head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from support.random_models import RandomModel, add_vocabulary, write

import pystaged
from pystaged._core import DraftHead, Model
from pystaged.decoding.policy import FixedPolicy
from pystaged.distill import prompts

REPOSITORY = Path(__file__).parents[2]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)

pytestmark = pytest.mark.skipif(not (REPOSITORY / "models" / "grow.py").exists(), reason="only in the repository")


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
    monkeypatch.setattr(prompts, "_documentation", lambda: iter(["A tree has leaves. It grows where there is light."]))
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
    head.main([*command, "--minutes", "0.001"])
    trained = torch.load(out.with_suffix(".pt"), weights_only=True)
    head.main([*command, "--minutes", "0.05", "--type", "F32"])
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
