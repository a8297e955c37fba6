"""Files as people have them, which other programs read wrongly or not at all: single types, odd metadata, odd parts."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from support.families import CASES, models
from support.feature_drafts import Block, write_draft
from support.gguf_parts import (
    ARRAY,
    BOOL,
    I32,
    STRING,
    U32,
    Change,
    Gguf,
    alter,
    array,
    assemble,
    changed,
    drop,
    put,
    text,
)
from support.logits import llama_logits, model_logits
from support.plain import staged_as_plain
from support.random_models import RandomModel, add_sentencepiece, split, write, write_without

import pystaged
from pystaged._core import Model, ModelError, Tokenizer
from pystaged.chat.format import ChatFormat

LLAMA = RandomModel("llama")
TOKENS = list(range(5, 60))
LAST = "blk.1.ffn_down"

# Types and shapes.
MODELS = models("found_files")
MODELS["a layer that predicts further, and other norms' names"] = CASES["qwen35-ahead"]


@pytest.mark.parametrize("case", MODELS)
def test_as_libllama_reads_it(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / "model.gguf", MODELS[case])
    ours, theirs = model_logits(Model(str(path)), TOKENS), llama_logits(path, [TOKENS])[0]
    assert np.abs(ours - theirs).max() <= 0.15 * theirs.std()  # both round to int8
    staged_as_plain(path)


# Metadata that changes nothing.
HARMLESS: dict[str, Change] = {
    "no end": drop("tokenizer.ggml.eos_token_id"),
    "neither beginning nor end": drop(
        *(f"tokenizer.ggml.{key}" for key in ("bos_token_id", "eos_token_id", "add_bos_token"))
    ),
    "an id of another time": put("tokenizer.ggml.seperator_token_id", U32, struct.pack("<I", 2**32 - 1)),
    "a padding token beyond": put("tokenizer.ggml.padding_token_id", U32, struct.pack("<I", 2**32 - 1)),
    "no type of file": drop("general.file_type", "general.quantization_version"),
    "precision of tensors": put("general.tensor_extra.prec_a4", BOOL, b"\1"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "model.gguf", LLAMA)


@pytest.mark.parametrize("case", HARMLESS)
def test_metadata_that_changes_nothing(small: Path, tmp_path: Path, case: str) -> None:
    path = changed(small.read_bytes(), tmp_path / "model.gguf", HARMLESS[case])
    assert (model_logits(Model(str(path)), TOKENS) == model_logits(Model(str(small)), TOKENS)).all()
    whole, other = Tokenizer(small), Tokenizer(path)
    assert other.encode("the the", False).tolist() == whole.encode("the the", False).tolist()
    # What no file names, libllama takes to be token 11; it is not put before texts.
    assert other.adds_bos == whole.adds_bos


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_tokens_are_never_chosen(small: Path, tmp_path: Path, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "ignore_eos": True}
    banned = sorted(set(staged_as_plain(small, **options)))
    ids = array(I32, [struct.pack("<i", token) for token in [*banned, 10**6]])
    path = changed(small.read_bytes(), tmp_path / "model.gguf", put("tokenizer.ggml.suppress_tokens", ARRAY, ids))
    assert Tokenizer(path).suppressed == banned
    assert not set(staged_as_plain(path, **options)) & set(banned)


# Types that no kernel of ours reads, and types that ggml has given up.
UNREAD = {18: "iq3_xxs", 17: "iq2_xs", 21: "iq3_s", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 40: "nvfp4", 41: "q1_0"}
UNREAD |= {42: "q2_0", 16: "iq2_xxs", 19: "iq1_s", 22: "iq2_s"}


@pytest.mark.parametrize("kind", UNREAD)
def test_types_are_refused_by_name(tmp_path: Path, kind: int) -> None:
    wide = write(tmp_path / "wide.gguf", replace(LLAMA, width=256, ffn_width=256))
    of_kind = alter(f"{LAST}.weight", kind=kind, data=bytes(256 * 256))
    path = changed(wide.read_bytes(), tmp_path / "model.gguf", of_kind)
    with pytest.raises(ModelError, match=rf"'{LAST}\.weight': weights of type {UNREAD[kind]} are not supported; use"):
        Model(str(path))


def test_a_type_that_was_given_up(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape("model.gguf")):
        Model(changed(small.read_bytes(), tmp_path / "model.gguf", alter(f"{LAST}.weight", kind=36)))


def test_a_pre_tokenizer_without_a_name(small: Path, tmp_path: Path) -> None:
    path = changed(small.read_bytes(), tmp_path / "model.gguf", put("tokenizer.ggml.pre", STRING, text("of-next-year")))
    with pytest.raises(ModelError, match="of-next-year"):
        Tokenizer(path)


# Names that files of 2026 have.
NAMES = (
    "qwen35 lfm2 minicpm5 glm4 glm5 hy_v4 laguna mellum2 joyai-llm sarvam-moe f2llmv2 spark2_5 granite-embed-multi-97m"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_pre_tokenizers_by_name(small: Path, tmp_path: Path, name: str) -> None:
    path = changed(small.read_bytes(), tmp_path / "model.gguf", put("tokenizer.ggml.pre", STRING, text(name)))
    tokenizer = Tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("the\u00e942", False)) == "the\u00e942"


def test_one_file_that_is_said_to_be_a_part(small: Path, tmp_path: Path) -> None:
    (part,) = split(small, tmp_path, 1)
    assert part.name.endswith("-00001-of-00001.gguf")
    assert (model_logits(Model(str(part)), TOKENS) == model_logits(Model(str(small)), TOKENS)).all()


def test_a_first_part_without_tensors(small: Path, tmp_path: Path) -> None:
    first, second = split(small, tmp_path, 2)
    parts, more = Gguf(first.read_bytes()), Gguf(second.read_bytes())
    first.write_bytes(assemble(parts.entries, []))
    second.write_bytes(assemble(more.entries, [*parts.tensors, *more.tensors]))
    assert (model_logits(Model(str(first)), TOKENS) == model_logits(Model(str(small)), TOKENS)).all()


def test_a_layer_ahead_that_was_left_out(tmp_path: Path) -> None:
    model = CASES["qwen35-ahead"]
    whole = write(tmp_path / "whole.gguf", model)
    path = write_without(tmp_path / "model.gguf", model, [f"blk.{model.layers}."])
    assert (model_logits(Model(str(path)), TOKENS) == model_logits(Model(str(whole)), TOKENS)).all()


@pytest.mark.parametrize("name", ["v.blk.0.attn_q.weight", "a.blk.0.attn_q.weight", "mm.input_projection.weight"])
def test_images_and_sound_in_the_models_file(tmp_path: Path, name: str) -> None:
    """As in Ollama's files of Gemma 4."""
    path = write(
        tmp_path / "model.gguf", CASES["gemma4"], lambda found: found.update({name: np.ones((4, 32), np.float32)})
    )
    with pytest.raises(ValueError, match=r"model\.gguf also reads images or sound, .* take a file of text alone"):
        pystaged.load(path, draft=None)


@pytest.mark.parametrize("name", ["blk.0.attn_conv_base", "blk.0.ffn_conv_proj", "selector_hidden"])
def test_drafts_of_a_later_kind_are_refused(tmp_path: Path, name: str) -> None:
    draft = write_draft(tmp_path / "draft.gguf", Block(), {name: np.ones(4, np.float32)})
    target = write(tmp_path / "target.gguf", RandomModel("qwen3", head_dim=32))
    with pytest.raises((ValueError, ModelError), match=f"'{name}' is none of architecture 'dflash'"):
        pystaged.load(target, draft=draft)


def test_a_draft_whose_layers_all_have_windows(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft.gguf", Block())
    window = put("dflash.attention.sliding_window", U32, struct.pack("<I", 8))
    pattern = put("dflash.attention.sliding_window_pattern", ARRAY, array(BOOL, [b"\1"] * Block().layers))
    draft = changed(draft.read_bytes(), tmp_path / "windows.gguf", window, pattern)
    target = write(tmp_path / "target.gguf", RandomModel("qwen3", head_dim=32))
    staged_as_plain(target, draft)


# ---- Where texts end and begin ----


def chatty(
    path: Path, end: int | None, marks: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"), **keys: bool
) -> Tokenizer:
    """A SentencePiece vocabulary with marks of a chat, the first of them token 281."""

    def add(writer: GGUFWriter, size: int) -> None:
        add_sentencepiece(writer, size, marks=marks)
        writer.add_tokenizer_pre("default")
        writer.add_bos_token_id(1)
        if end is not None:
            writer.add_eos_token_id(end)
        for key, value in keys.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    return Tokenizer(write(path, replace(LLAMA, vocabulary=add)))


def test_turns_end_whatever_the_end_of_a_text_is(tmp_path: Path) -> None:
    """IQuest-Coder names no end, Hermes 4 its padding."""
    for i, end in enumerate((None, 2, 283)):
        made = chatty(tmp_path / f"{i}.gguf", end, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), add_bos_token=False)
        assert made.is_end(282)
        assert end is None or made.is_end(end)
        assert not made.adds_bos
        assert not made.is_end(281)


@pytest.mark.parametrize("keys", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_a_text_begins_once(tmp_path: Path, keys: dict[str, bool], template: str) -> None:
    made = chatty(tmp_path / "model.gguf", 2, **keys)
    prompt = ChatFormat({"tokenizer.chat_template": template}, made, lambda _: None).encode(
        [{"role": "user", "content": "the"}]
    )
    wanted = int("bos_token" in template or made.adds_bos)
    assert [int(token) for token in prompt].count(1) == wanted


TEMPLATES = {
    "{% for m in messages[::-1] %}{{ m.content }};{% endfor %}": "b;a;",
    "{{ (messages | first).content.rstrip('\\n') }}|": "a|",
    "{% for m in messages %}{% for part in m.content %}{{ part.text }};{% endfor %}{% endfor %}": "a;b;",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_that_others_cannot_read(tmp_path: Path, template: str) -> None:
    chat = ChatFormat({"tokenizer.chat_template": template}, chatty(tmp_path / "model.gguf", 2), lambda _: None)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat.render(messages) == TEMPLATES[template]
