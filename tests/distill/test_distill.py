"""A tiny target writes answers, a draft learns from them, and its file computes what torch does."""

from __future__ import annotations

import itertools
import json
import re
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from support.chat import CHATML
from support.families import CASES
from support.feature_drafts import BlockTwin, Contents
from support.random_models import RandomModel, add_vocabulary, write
from support.steps import prefill, verify
from typer.testing import CliRunner

import pystaged
from pystaged import cli
from pystaged._core import Model, Sampling, Session, Tokenizer
from pystaged.distill import prompts
from pystaged.distill.prompts import Questions
from pystaged.loading.distilled import DISTILLED, find_distilled, identity
from pystaged.platform.files import alone

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.oracle

from pystaged.distill import answers as writing  # noqa: E402
from pystaged.distill import plan as plans  # noqa: E402
from pystaged.distill import train as training  # noqa: E402
from pystaged.distill.answers import Answers, Asker, Writer  # noqa: E402
from pystaged.distill.draft import TAPS, BlockDraft, Shape, Target, commonest, compared, layers_of, shape_for  # noqa: E402
from pystaged.distill.export import export  # noqa: E402
from pystaged.distill.optimizer import orthogonalized  # noqa: E402
from pystaged.distill.train import Trainer, train  # noqa: E402

ROWS, VOCABULARY = 256, 400


def vocabulary(writer: GGUFWriter, size: int) -> None:
    add_vocabulary(writer, size, {size - 3: "<|im_start|>", size - 2: "<|im_end|>"})
    writer.add_chat_template(CHATML)


def likes(found: dict[str, np.ndarray]) -> None:
    """There is something to learn."""
    found["output.weight"] *= 4


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """Files of a few short texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "TEXTS", 12)
        patch.setattr(writing, "MOST_ANSWER", 40)
        patch.setattr(writing, "_MOST_QUESTION", 12)
        patch.setattr(training, "TEXTS_OF_STEP", 4)
        patch.setattr(prompts, "_documentation", lambda: iter(["A tree has leaves. It grows where there is light."]))
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, small: None) -> Path:
    del small
    shape = {"layers": 3, "head_dim": 32, "vocab_size": VOCABULARY, "context": 512, "tie": False}
    model = RandomModel("llama", vocabulary=vocabulary, **shape)
    return write(tmp_path_factory.mktemp("target") / "target.gguf", model, likes)


@pytest.fixture(scope="module")
def answers(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Three files."""
    folder = tmp_path_factory.mktemp("answers")
    found, tokenizer = Answers(folder), Tokenizer(str(target))
    model = Model(str(target))
    writer = Writer(model, tokenizer.is_end, layers_of(model, TAPS))
    asker = Asker(writer, tokenizer)
    for number in range(3):
        found.write(number, writer, asker, lambda _: None)
    writer.close()
    return found


@pytest.fixture
def trainer(target: Path, answers: Answers) -> Callable[..., Trainer]:
    torch.set_num_threads(1)

    def make(steps: int = 60, **chosen: Any) -> Trainer:
        lender = Target(target)
        shape = shape_for(Model(str(target)), Tokenizer(str(target)), lender, ROWS, **chosen)
        tokens = commonest(answers.likely([1, 2], VOCABULARY), ROWS)
        draft = BlockDraft(shape, tokens, lender, torch.Generator().manual_seed(0))
        return Trainer(draft, lender, answers, answers.texts([1, 2]), answers.texts([0]), steps)

    return make


def test_the_last_norm_of_lfm2_has_another_name(tmp_path: Path) -> None:
    path = write(tmp_path / "target.gguf", CASES["lfm2"])
    np.testing.assert_array_equal(Target(path).norm, Contents.of(path).tensors["token_embd_norm.weight"])


def test_answers_are_what_the_target_computes(target: Path, answers: Answers) -> None:
    model = Model(str(target))
    model.tap([1, 2, 3], all_rows=True)
    session = Session(model, 512)
    texts = answers.texts([1])
    assert len(texts) > 6
    for which in texts:
        text = answers.text(which)
        tokens = text.tokens.numpy().astype(np.int32)
        session.rewind(0)
        prefill(session, tokens[: text.prompt - 1])
        states = [session.hidden.numpy()]
        said: list[int] = []
        for i, token in enumerate(tokens[text.prompt - 1 :]):
            found = verify(session, [token], [-1], Sampling(logprobs=50))
            states.append(session.hidden.numpy())
            said.append(int(found[1][0]))
            assert text.likeliest[i].tolist() == found[2][1][0].tolist()
            np.testing.assert_allclose(text.logprobs[i], found[2][2][0], atol=0.01, rtol=1e-3)
        if text.greedy:
            assert said[:-1] == tokens[text.prompt :].tolist()
        expected = np.concatenate(states)
        features = (text.features.float() * 8 * answers.scale).numpy()
        assert features.shape == expected.shape == (len(tokens), 3 * 64)
        np.testing.assert_allclose(features, expected, rtol=1 / 15, atol=0.02 * np.abs(expected).max())
    assert {answers.text(which).greedy for which in texts} == {True, False}


def test_the_same_files_are_written_again(target: Path, answers: Answers, tmp_path: Path) -> None:
    model, tokenizer = Model(str(target)), Tokenizer(str(target))
    writer = Writer(model, tokenizer.is_end, layers_of(model, TAPS))
    again = Answers(tmp_path)
    asker = Asker(writer, tokenizer)
    for number in range(2):
        again.write(number, writer, asker, lambda _: None)
        assert again.path(number).read_bytes() == answers.path(number).read_bytes()


def test_a_draft_begins_with_the_nearest_tokens(trainer: Callable[..., Trainer], answers: Answers) -> None:
    found = trainer()
    found.begin()
    text = next(text for text in map(answers.text, answers.texts([0])) if len(text.tokens) > 40)
    batch = found._blocks([text], [[len(text.tokens) - 4]], np.array([0]), np.array([0]))

    def change(back: int) -> float:
        """Of the first guess, where the features of a token before the block are another's."""
        features = batch.features.clone()
        features[0, batch.anchors[0, 0] - back] = features[0, 3]
        return float((found.draft(replace(batch, features=features)) - expected)[0, 0, 0].norm())

    with torch.no_grad():
        expected = found.draft(batch)
        changes = [change(back) for back in range(1, 33)]
    assert changes[0] > 5 * np.median(changes[8:]) > 0


@pytest.mark.parametrize("block", [2, 8, 16])
def test_an_anchor_for_each_block_of_tokens(trainer: Callable[..., Trainer], answers: Answers, block: int) -> None:
    texts = [answers.text(which) for which in answers.texts([1])[:6]]
    batch = trainer(block=block)._collate(texts, np.random.default_rng(0))
    for text, anchors, weights in zip(texts, batch.anchors, batch.weights, strict=True):
        size = len(text.tokens) - text.prompt + 1
        own = anchors[weights[:, 0] > 0]
        assert size // block <= len(own) <= -(-size // block) or len(own) == 1
        assert len(set(((own - text.prompt + 1) // block).tolist())) == len(own)
        assert text.prompt - 1 <= min(own) <= max(own) < len(text.tokens)


def test_the_loss_falls(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    found = trainer()
    before = found.report()
    losses: list[float] = []
    reports: list[training.Report] = []

    def reported(step: int, loss: float, figures: training.Report) -> None:
        assert step == found.step
        losses.append(loss)
        reports.append(figures)

    clock = itertools.count()
    done = train(found, tmp_path / "checkpoint", reported, every=10, clock=lambda: float(next(clock)))
    assert list(done) == list(range(1, 61))
    after = found.report()
    assert len(losses) > 4
    assert losses[-1] < 0.8 * losses[1]
    assert after.common[0] > before.common[0] + 0.1
    assert after.same[0] > before.same[0] + 0.1
    assert reports[0].same == before.same


def test_what_was_stopped_ends_alike(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    whole = trainer(8)
    for _ in range(8):
        whole.advance()
    first = trainer(8)
    running = train(first, tmp_path / "checkpoint", lambda *_: None)
    assert [next(running) for _ in range(3)] == [1, 2, 3]
    running.close()
    second = trainer(8)
    second.resume(tmp_path / "checkpoint")
    assert list(train(second, tmp_path / "checkpoint", lambda *_: None)) == [4, 5, 6, 7, 8]
    expected = dict(whole.draft.named_parameters())
    for name, value in second.draft.named_parameters():
        assert torch.equal(value, expected[name]), name
    with pytest.raises(ValueError, match="checkpoint of another draft"):
        trainer(8, layers=1).resume(tmp_path / "checkpoint")


def test_damaged_files_are_named(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    whole = trainer(8)
    whole.save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="checkpoint is damaged"):
        whole.resume(path)
    writing.save({"step": torch.zeros(2)} | {f"draft.{k}": v.detach() for k, v in whole.draft.named_parameters()}, path)
    with pytest.raises(ValueError, match="checkpoint of another draft"):
        whole.resume(path)
    found = Answers(tmp_path)
    writing.save({"tokens": torch.zeros(2)}, found.path(0))
    with pytest.raises(ValueError, match=r"00000\.safetensors is damaged.*answers"):
        found.num_tokens(0)
    found.path(1).write_bytes(b"8" * 100)
    with pytest.raises(ValueError, match=r"00001\.safetensors is damaged"):
        found.num_tokens(1)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="checkpoint"):
            writing.save({"step": torch.zeros(2000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "change", [{"tokens": "1000"}, {"tokens": 0}, {"epochs": -1}, {"kind": "Tensor"}, {"rows": 1 << 50}, {"seed": True}]
)
def test_a_plan_that_cannot_be_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    good = plans.Plan("target", "", "float32", 1000, 4)
    good.save(tmp_path)
    assert plans.Plan.load(tmp_path) == good
    (tmp_path / "plan.json").write_text(json.dumps(vars(good) | change))
    with pytest.raises(ValueError, match=r"plan\.json is no plan of this version"):
        plans.Plan.load(tmp_path)


def test_a_prompt_that_cannot_be_encoded_is_passed_over(target: Path) -> None:
    model, tokenizer, said = Model(str(target)), Tokenizer(str(target)), list[str]()
    writer = Writer(model, tokenizer.is_end, layers_of(model, TAPS))
    texts = [*["the tree"] * 19, "half of a pair \ud800"]
    asker = Asker(writer, tokenizer, [[{"role": "user", "content": text}] for text in texts], said.append)
    found = asker.prompts(0, list) + asker.prompts(1, list)
    writer.close()
    assert found
    assert said
    assert all(line.startswith("passed over the prompt 'half of a pair") for line in said)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_the_file_computes_what_torch_does(
    trainer: Callable[..., Trainer], target: Path, answers: Answers, tmp_path: Path, kind: str
) -> None:
    found = trainer(20)
    for _ in range(20):
        found.advance()
    path, draft = tmp_path / "draft.gguf", found.draft
    export(draft, answers.scale, path, target, Model(str(target)), kind)
    embedding = Contents.of(target).tensors["token_embd.weight"]
    twin = BlockTwin.of(path, embedding)
    assert twin.d2t is not None
    assert twin.d2t.tolist() == draft.tokens.tolist()
    assert (twin.keys["target_layers"], twin.first_place) == ([1, 2, 3], 0)
    assert (twin.mask_token, twin.keys["block_size"]) == (VOCABULARY - 3, 8)
    text = answers.text(answers.texts([0])[1])
    anchor = text.prompt + 9
    batch = found._blocks([text], [[anchor]], np.zeros(1, np.int64), np.zeros(1, np.int64))
    with torch.no_grad():
        y = draft(batch)
        expected = draft.logits(y, batch.before)[0, 0].numpy()
    twin.commit((text.features.float() * 8 * answers.scale).numpy()[:anchor])
    logits, _ = twin.block(int(text.tokens[anchor]))
    logits = logits + [twin.correction(int(token)) for token in batch.before[0, 0]]
    error = {"F32": 1e-4, "Q8_0": 0.02, "Q4_0": 0.25}[kind]
    assert np.abs(logits - expected).max() <= error * np.abs(expected).max()


@pytest.mark.parametrize(("rows", "cols"), [(24, 96), (96, 24)])
def test_updates_are_orthogonal(rows: int, cols: int) -> None:
    update = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)) * 1e-4
    found = orthogonalized(update) / max(1, rows / cols) ** 0.5
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3
    assert float((found * update).sum() / found.norm() / update.norm()) > 0.9


def test_a_new_draft_guesses_nothing_in_particular(trainer: Callable[..., Trainer]) -> None:
    found = trainer(1)
    with torch.no_grad():
        y = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * found.draft.output_norm
        logits = found.draft.logits(y, torch.zeros(200, dtype=torch.long))
    assert 0.5 < float(logits.std()) < 2


def test_distributions_are_compared() -> None:
    class Draft:
        tokens = torch.tensor([2, 5, 6])
        index = torch.tensor([-1, -1, 0, -1, -1, 1, 2])

    q = torch.tensor([[0.5, 0.3, 0.2]])
    likeliest, logprobs = torch.tensor([[2, 4, 5]]), torch.tensor([[0.4, 0.3, 0.2]]).log()
    surprise, common, same = compared(Draft(), q.log() + 3, likeliest, logprobs)  # type: ignore[arg-type]
    # Tokens 2 and 5 are in both; token 4 is none of the draft's.
    np.testing.assert_allclose(surprise, [-0.4 * np.log(0.5) - 0.2 * np.log(0.3)], rtol=1e-5)
    np.testing.assert_allclose(common, [0.4 + 0.2], rtol=1e-5)
    assert same.tolist() == [True]


@pytest.mark.parametrize("place", [0, 5 << 20, (10 << 20) - 1])
def test_another_model_of_the_same_size_is_another(place: int, tmp_path: Path) -> None:
    content = bytearray(10 << 20)
    (tmp_path / "model").write_bytes(content)
    before = identity(tmp_path / "model")
    assert identity(tmp_path / "model") == before
    content[place] = 1
    (tmp_path / "model").write_bytes(content)
    assert identity(tmp_path / "model") != before


def test_the_plan_fills_the_time_and_no_more_than_half_of_the_disk() -> None:
    shape = Shape(576, 9, 3, 64, 1536, (10, 20, 30), 49152, 16384, 17)
    speed = plans.Speed(500.0, 2e11, "float32")
    tokens, epochs = plans.amounts(speed, shape, 8 * 3600, 10**12)
    assert epochs == plans.EPOCHS
    assert sum(speed.seconds(tokens, epochs, shape)) == pytest.approx(8 * 3600, rel=0.01)
    fewer, more = plans.amounts(speed, shape, 8 * 3600, 2 * 10**9)
    assert plans.answer_bytes(fewer, shape) <= 10**9
    assert more > epochs
    assert plans.amounts(speed, shape, 1, 10**12) == (plans.LEAST_TOKENS, plans.EPOCHS)


@pytest.fixture
def command(target: Path, tmp_path: Path, small: None) -> Callable[..., Any]:
    del small

    def invoke(*arguments: object) -> Any:
        given = ["distill", target, "--folder", tmp_path / "work", "--rows", ROWS, "--device", "cpu", "--threads", 1]
        return CliRunner().invoke(cli.app, [str(each) for each in [*given, *arguments]])

    return invoke


def test_the_command_goes_on_and_its_draft_is_found(
    command: Callable[..., Any], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(str(target))
    assert find_distilled(target, tokenizer) is None
    advance = Trainer.advance

    def interrupted(trainer: Trainer) -> float:
        if trainer.step == 2:
            raise KeyboardInterrupt
        return advance(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", interrupted)
        stopped = command("--tokens", 1000, "--epochs", 2)
    assert stopped.exit_code == 130, stopped.stderr
    assert "to write 1,000 tokens of answers takes about" in stopped.stderr
    assert "the same command resumes" in stopped.stderr
    assert not DISTILLED.path(target).exists()
    files = sorted((tmp_path / "work").glob("0*"))
    written = [file.stat().st_mtime_ns for file in files]
    other = command("--tokens", 2000)
    assert other.exit_code == 1
    assert "was begun with other tokens" in str(other.exception)
    done = command()
    assert done.exit_code == 0, done.stderr
    assert "step 2 of" in done.stderr
    assert "the first place is right in" in done.stderr
    gains = re.findall(r"held-out prompts, (greedy|at temperature 1): ([\d.]+) tokens per step", done.stderr)
    assert [sampling for sampling, _ in gains] == ["greedy", "at temperature 1"]
    assert all(0.5 < float(tokens) <= 9 for _, tokens in gains)  # the end of a text is a step without a token
    assert [file.stat().st_mtime_ns for file in sorted((tmp_path / "work").glob("0*"))] == written
    path, said = DISTILLED.path(target), list[str]()
    assert find_distilled(target, tokenizer, said.append) == path
    assert not said
    like = tmp_path / "like.gguf"
    like.write_bytes(target.read_bytes() + b"changed")
    assert find_distilled(like, Tokenizer(str(like)), said.append) == path
    assert "was distilled for another file than like.gguf" in said.pop()
    moved, name = tmp_path / "moved.gguf", identity(target).encode()
    moved.write_bytes(target.read_bytes())
    DISTILLED.path(moved).write_bytes(path.read_bytes().replace(name, name[::-1]))  # of what was there before
    assert find_distilled(moved, tokenizer, said.append) == path
    assert not said
    DISTILLED.path(moved).unlink()
    twin = BlockTwin.of(path, Contents.of(target).tensors["token_embd.weight"])
    assert twin.keys["general.name"] == "draft of random weights"
    with pystaged.load(target, num_threads=1) as engine:
        assert engine.draft_name == "draft of random weights"
        found = engine.generate("the tree", max_tokens=30)
        assert found.tokens == engine.generate("the tree", max_tokens=30, speculate=False).tokens
    listed = CliRunner().invoke(cli.app, ["models"])
    assert re.search(rf"^{target.stem} +0\.\d +distilled drafts", listed.stdout, re.MULTILINE)
    path.write_bytes(b"GGUF")
    assert find_distilled(target, tokenizer, said.append) is None
    assert said[0].startswith("passed over: ")
    removed = CliRunner().invoke(cli.app, ["models", "remove", "--distilled", str(target)])
    assert "removed distilled drafts: 1 file" in removed.stderr
    assert not path.exists()


def test_own_prompts_are_answered(
    command: Callable[..., Any], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(f"the {i} tree") + "\n" for i in range(30)))
    monkeypatch.setattr(Questions, "draw", lambda *_: pytest.fail("there are prompts"))
    done = command("--prompts", file, "--tokens", 1000, "--epochs", 1, "--out", tmp_path / "draft.gguf")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "draft.gguf").exists()
    assert not DISTILLED.path(target).exists()
    tokenizer = Tokenizer(str(target))
    found = Answers(tmp_path / "work")
    asked = [
        [tokenizer.decode(text.tokens[: text.prompt].tolist()) for text in map(found.text, found.texts([number]))]
        for number in (0, 1)
    ]
    assert "tree" in asked[0][0]
    assert not set(asked[0]) & set(asked[1])


def test_what_is_read_is_not_replaced(command: Callable[..., Any], target: Path, tmp_path: Path) -> None:
    before = target.read_bytes()
    (tmp_path / "link.gguf").symlink_to(target)
    done = command("--out", tmp_path / "link.gguf")
    assert done.exit_code == 2
    assert "would replace" in " ".join(done.stderr.replace("\u2502", "").split())
    assert target.read_bytes() == before


def test_one_process_works_in_a_folder(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with alone(tmp_path / "work"):
        done = command()
    assert done.exit_code == 1
    assert "another process works in" in str(done.exception)
    with alone(tmp_path / "work"):
        pass


def test_a_model_without_a_chat_template_goes_on_from_the_start(
    random_gguf: Callable[..., Path], small: None, tmp_path: Path
) -> None:
    del small
    path = random_gguf(width=64, layers=2, heads=2, context=96)
    given = ["distill", path, "--folder", tmp_path / "work", "--out", tmp_path / "draft.gguf", "--threads", 1]
    given += ["--rows", 300, "--tokens", 1000, "--epochs", 1]
    done = CliRunner().invoke(cli.app, [str(each) for each in given])
    assert done.exit_code == 0, done.stderr
    contents = Contents.of(tmp_path / "draft.gguf")
    assert "d2t" not in contents.tensors
    assert contents.keys["target_layers"] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--type", "q2_k"], 2, "must be q8_0 or q4_0 or f16 or f32"),
        (["--device", "tpu"], 1, "torch has no device 'tpu' here"),
        (["--out", "nowhere/draft.gguf"], 1, "there is no folder"),
        (["--prompts", "missing.txt"], 1, "missing.txt"),
    ],
)
def test_options_that_cannot_be(command: Callable[..., Any], arguments: list[str], status: int, words: str) -> None:
    done = command("--tokens", 1000, *arguments)
    assert done.exit_code == status
    assert words in " ".join(f"{done.stderr} {done.exception}".replace("│", " ").split())


def test_without_torch_it_says_what_to_install(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = command()
    assert done.exit_code == 1
    assert str(done.exception) == "distilling needs PyTorch; run: pip install torch"
