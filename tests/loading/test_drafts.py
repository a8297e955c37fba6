"""Drafts that are known for a family of targets."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from support.draft_checkpoints import FORMS, write_form
from support.feature_drafts import Eagle3, dspark, write_draft
from support.known_models import MODELS, SIZE
from support.random_models import RandomModel, add_vocabulary, gguf_file, write
from typer.testing import CliRunner

import pystaged
from pystaged import Engine, cli
from pystaged._core import Model, ModelError, metadata
from pystaged.loading import bundle, cache, drafts
from pystaged.loading.bundle import Bundle
from pystaged.loading.drafts import Targets, known_drafts
from pystaged.loading.quantize import quantize_checkpoint

NAME = "owner/tiny-draft"
DRAFT = RandomModel("llama", width=32, heads=2, kv_heads=1)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "folder", lambda name="": tmp_path / "models" / name)
    monkeypatch.setattr(drafts, "KNOWN", {Targets("llama", "gpt-2", 32): (NAME,)})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write(tmp_path / "target.gguf", RandomModel("llama"))


def info(target: Path) -> str:
    return CliRunner().invoke(cli.app, ["info", str(target)]).stdout


def automatic(target: Path) -> tuple[Bundle, list[str]]:
    """What is loaded of itself, and what is said of it."""
    said: list[str] = []
    return Bundle(target, draft="auto", num_threads=1, report=said.append), said


def passed_over(target: Path) -> str:
    """What is said of a draft that is not loaded of itself."""
    made, said = automatic(target)
    assert made.draft is None
    return next(line for line in said if line.startswith("passed over: "))


def download(model: RandomModel) -> Path:
    cache.folder(NAME).mkdir(parents=True)
    return write(cache.folder(NAME) / "draft.gguf", model)


def test_a_draft_is_known_for_wider_models_of_its_family(tmp_path: Path) -> None:
    for model, expected in ((RandomModel("llama"), [NAME]), (DRAFT, []), (RandomModel("qwen2"), [])):
        assert known_drafts(metadata(write(tmp_path / "model.gguf", model))) == expected
    assert known_drafts({}) == []


def test_drafts_that_read_hidden_states_are_known_for_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the table of the package
    qwen = {"general.architecture": "qwen3", "tokenizer.ggml.pre": "qwen2"}
    qwen |= {"qwen3.embedding_length": "4096", "qwen3.block_count": "36"}
    names = known_drafts(qwen)
    assert names[0] == "deepseek-ai/dspark_qwen3_8b_block7"
    assert names[-1] == "amd/PARD-Qwen3-0.6B"
    with_ahead = qwen | {"qwen3.block_count": "37", "qwen3.nextn_predict_layers": "1"}
    assert known_drafts(with_ahead) == names
    assert known_drafts(qwen | {"qwen3.block_count": "35"}) == ["amd/PARD-Qwen3-0.6B"]
    llama = {"general.architecture": "llama", "tokenizer.ggml.pre": "llama-bpe"}
    llama |= {"llama.embedding_length": "4096", "llama.block_count": "32"}
    for name, first in (
        ("Meta Llama 3.1 8B Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        ("DeepSeek-R1-Distill-Llama-8B", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
        ("Meta Llama 3 8B", "amd/PARD-Llama-3.2-1B"),
    ):
        assert known_drafts(llama | {"general.name": name})[0] == first
    assert known_drafts(llama | {"llama.block_count": "many"}) == []


def test_auto_takes_it_from_the_cache(target: Path) -> None:
    with Engine(target) as engine:
        assert engine._bundle.draft is None
    download(DRAFT)
    with Engine(target) as engine, Engine(target, draft=None) as alone:
        assert engine._bundle.draft is not None
        assert engine.generate("Hello", max_tokens=20).tokens == alone.generate("Hello", max_tokens=20).tokens
        assert alone._bundle.draft is None


@pytest.mark.parametrize("width", [64, 96])
def test_auto_takes_one_that_reads_hidden_states(target: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """If it was made for the target, and before a draft model; else the next one."""
    download(DRAFT)
    reading = "owner/tiny-eagle"
    monkeypatch.setattr(drafts, "KNOWN", {Targets("llama", "gpt-2", 64, 2): (reading,)} | drafts.KNOWN)
    cache.folder(reading).mkdir(parents=True)
    write_draft(cache.folder(reading) / "draft.gguf", Eagle3(target_width=width))
    made, said = automatic(target)
    assert (made.features is not None) == (width == 64)
    assert any(line.startswith("passed over: ") for line in said) == (width == 96)
    assert (made.draft is not None) == (width == 96)
    with Engine(target) as engine, Engine(target, draft=None) as alone:
        assert engine.generate("Hello", max_tokens=20).tokens == alone.generate("Hello", max_tokens=20).tokens
    if width == 64:
        shown = info(target)
        assert re.search(r"draft +.*tiny-eagle.draft\.gguf, right for \d+% of next tokens", shown)
        assert re.search(r"draft's memory +0\.\d MB of weights, 0\.1 MB of keys and values per 1,000 tokens\n", shown)


@pytest.mark.parametrize(
    ("model", "name"),
    [("LFM2.5-1.2B", "LiquidAI/LFM2.5-1.2B-Instruct-DSpark"), ("MiniCPM5-2B", "openbmb/MiniCPM5-2B-DSpark")],
)
def test_published_drafts_of_small_targets(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skeletons, from the checkpoint on: named, converted, found, and the text stays."""
    monkeypatch.undo()
    monkeypatch.setattr(cache, "folder", lambda name="": tmp_path / "models" / name)
    known = next(targets for targets, made in drafts.KNOWN.items() if made[0] == name)
    family = known.architecture
    shown = {"general.architecture": family, "general.name": f"{model} Instruct"}
    shown |= {"tokenizer.ggml.pre": MODELS[model].pre, f"{family}.embedding_length": "2048"}
    shown |= {f"{family}.block_count": str(known.layers)}
    assert known_drafts(shown)[0] == name
    skeleton = MODELS[model].written
    target = write(tmp_path / "target.gguf", skeleton)
    tiny = known._replace(width=skeleton.width, layers=skeleton.layers, called="")
    monkeypatch.setattr(drafts, "KNOWN", {tiny: (name,)})
    taps = {"target_layer_ids": [0, 1]}
    made = FORMS[f"{model.partition('-')[0]}'s DSpark"]()
    inner = made.config.get("dflash_config")
    config = made.config | ({"dflash_config": inner | taps} if inner else taps)
    draft = replace(made.draft, target_width=skeleton.width, width=skeleton.width, vocab_size=SIZE, taps=[1, 2])
    checkpoint = replace(made, draft=draft, config=config | {"draft_vocab_size": SIZE}, more={})
    folder = write_form(tmp_path / "checkpoint", checkpoint)
    with Engine(target, draft=None) as alone:
        expected = [alone.generate("the the", max_tokens=30, temperature=t, seed=1).tokens for t in (0, 1)]
    said = info(target)
    assert f"{name} is made for it: pystaged pull {name} --type q8_0" in said
    cache.folder(name).mkdir(parents=True)
    quantize_checkpoint(folder, cache.folder(name) / "draft.Q8_0.gguf", "q8_0")
    for chosen in ("auto", name, f"{name}:q8_0"):
        with Engine(target, draft=chosen) as engine:
            found = engine._bundle.features
            assert found
            assert (found.block_size, found.is_anchored, found.has_markov) == (draft.block, True, True)
            texts = [engine.generate("the the", max_tokens=30, temperature=t, seed=1).tokens for t in (0, 1)]
        assert texts == expected
    said = info(target)
    assert re.search(r"draft +.*draft\.Q8_0\.gguf, right for \d+% of next tokens", said)


def test_auto_takes_one_that_was_distilled_first(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download(DRAFT)
    path = write_draft(tmp_path / "distilled.gguf", dspark())
    monkeypatch.setattr(bundle, "find_distilled", lambda *_: path)
    made, _ = automatic(target)
    assert (made.draft_path, made.draft) == (path, None)
    assert made.features is not None
    path.write_bytes(path.read_bytes()[:-100])
    made, said = automatic(target)
    assert made.features is None
    assert made.draft is not None
    assert any(line.startswith(f"passed over: {path}") for line in said)
    assert Bundle(target, draft=None, num_threads=1).features is None


def test_auto_takes_the_models_own_layer_after_a_distilled_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write(tmp_path / "target.gguf", RandomModel("llama", ahead=1))
    download(DRAFT)
    made, _ = automatic(target)
    assert (made.draft_path, made.draft) == (target, None)
    assert made.features is not None
    assert made.features.num_layers == 1
    shown = info(target)
    assert "its own MTP layer" in shown
    cells = f" {made.features.cell_bytes / 1e3:.1f} MB of keys and values per 1,000 tokens"
    assert cells in shown.partition("draft's memory")[2]
    monkeypatch.setattr(bundle, "candidates", lambda *_: ["cpu"])
    assert Bundle(target, draft="auto", num_threads=1, device="auto").features is not None
    monkeypatch.setattr(bundle, "find_distilled", lambda *_: write_draft(tmp_path / "distilled.gguf", dspark()))
    assert automatic(target)[0].draft_path == tmp_path / "distilled.gguf"
    # A file without the layer takes another one's of the same model. Another model's file is a draft model like any.
    plain = Bundle(write(tmp_path / "plain.gguf", RandomModel("llama")), draft=target, num_threads=1)
    assert plain.features is not None
    other = write(tmp_path / "other.gguf", RandomModel("llama", layers=1, ahead=1))
    assert Bundle(target, draft=other, num_threads=1).draft is not None


def test_auto_does_without_a_layer_of_its_own_that_is_damaged(tmp_path: Path) -> None:
    def damage(tensors: dict[str, Any]) -> None:
        del tensors["blk.2.nextn.eh_proj.weight"]

    target = write(tmp_path / "target.gguf", RandomModel("llama", ahead=1), damage)
    made, said = automatic(target)
    assert (made.draft_path, made.features) == (None, None)
    assert any("eh_proj" in line for line in said)
    with pytest.raises(ModelError, match="eh_proj"):
        Bundle(target, draft=target, num_threads=1)


def test_auto_does_without_one_that_does_not_fit(target: Path) -> None:
    def others(writer: GGUFWriter, num_tokens: int) -> None:
        add_vocabulary(writer, num_tokens, {i: f"<|other-{i}|>" for i in range(num_tokens)})

    path = download(replace(DRAFT, vocabulary=others))
    assert passed_over(target)
    with pytest.raises(ValueError, match="draft"):
        pystaged.load(target, draft=path)


@pytest.mark.parametrize("kept", [0, 200, 0.5, -100])
def test_auto_does_without_a_damaged_one(target: Path, kept: float) -> None:
    path = download(DRAFT)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if 0 < kept < 1 else int(kept)])
    assert passed_over(target)


def test_auto_does_without_one_of_several_types(target: Path) -> None:
    download(DRAFT).rename(cache.folder(NAME) / "draft.Q4_0.gguf")
    write(cache.folder(NAME) / "draft.Q5_0.gguf", DRAFT)
    assert "name one of them" in passed_over(target)


def test_auto_does_without_one_that_has_no_room(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, load = download(DRAFT), bundle.load_model

    def short(file: bytes, *more: Any) -> Model:
        if os.fsdecode(file) == str(path):
            raise MemoryError
        return load(file, *more)

    monkeypatch.setattr(bundle, "load_model", short)
    made, _ = automatic(target)
    assert (made.draft, made.draft_path, made.substitutes) == (None, None, {})


def test_the_targets_own_table_stays(target: Path) -> None:
    """The one that was counted from the target's texts, beside its file."""
    done = CliRunner().invoke(cli.app, ["ngram", "build", str(target), "--tokens", "400"])
    assert done.exit_code == 0, done.output
    download(DRAFT)
    with Engine(target) as engine:
        assert engine._bundle.draft is not None
        assert engine._bundle.table is not None


def test_info_names_it_and_then_its_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = info(target)
    assert f"{NAME} is made for it: pystaged pull {NAME} --type q8_0" in said
    monkeypatch.setattr(drafts, "KNOWN", drafts.KNOWN | {Targets("llama", "gpt-2", 64, 2): ("owner/other",)})
    said = info(target)
    assert f"pull {NAME} --type q8_0; so is owner/other" in said
    path = download(DRAFT)
    said = info(target)
    assert ["draft", str(path)] in [line.split() for line in said.splitlines()]


def test_what_reads_images_is_no_model(tmp_path: Path) -> None:
    with gguf_file(tmp_path / "mmproj.gguf", "clip"):
        pass
    with pytest.raises(ValueError, match=r"mmproj.gguf reads images .* name the model's own file"):
        pystaged.load(tmp_path / "mmproj.gguf")
