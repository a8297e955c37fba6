"""Checkpoints of every family: as GGUF files they say what transformers says, to llama.cpp and to us."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
from support.checkpoints import (
    NUM_TOKENS,
    family_config,
    family_weights,
    write_checkpoint,
    write_family,
    write_sentencepiece,
    write_tokenizer_json,
    write_weights,
)
from support.convert import change_json, convert, gpt2_vocabulary, llama_tokens, needed_transformers, write_bfloat16
from support.logits import engine_logits, llama_context, llama_pass
from support.paths import table
from support.random_models import gguf_file

from pystaged import _core
from pystaged.loading.families import ARCHITECTURES, FAMILIES
from pystaged.loading.metadata import About
from pystaged.loading.quantize import quantize, quantize_checkpoint

pytestmark = pytest.mark.oracle

Floats = npt.NDArray[np.float32]

TOKENS = np.random.default_rng(0).integers(0, 256, 120).tolist()
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 96, "max_position_embeddings": 256, "vocab_size": NUM_TOKENS}
ENDS = {"bos_token_id": NUM_TOKENS - 1, "eos_token_id": NUM_TOKENS - 1, "pad_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (kind, changes) for name, kind, changes in table("checkpoints")}


def save(folder: Path, case: str) -> Any:
    """A random checkpoint; returns its model."""
    transformers = needed_transformers()
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    kind, changes = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **SMALL | ENDS | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases do not show mistakes otherwise
            parameter.add_((0.3 if "norm" in name else 0.1) * torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_tokenizer_json(folder)
    return model


def expected_logits(model: Any) -> Floats:
    import torch  # noqa: PLC0415

    with torch.no_grad():
        logits: Floats = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    assert logits.std() > 0.1
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    expected = expected_logits(save(tmp_path / "saved", case))
    path = tmp_path / "model.gguf"
    convert(tmp_path / "saved", path)
    with llama_context(path, num_threads=2, exact=True) as context:
        tolerance = 1e-2 if case.startswith(("gemma", "gpt2")) else 1e-3  # their GELU is a table of F16 numbers
        assert np.abs(llama_pass(context, TOKENS, 0) - expected).max() <= tolerance
    # Our keys and values are F16.
    assert np.abs(engine_logits(path, TOKENS) - expected).max() <= 1e-2


# ---- Without PyTorch ----


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_are_those_of_gguf(model_type: str) -> None:
    family = FAMILIES[model_type]
    (architecture,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = get_tensor_name_map(architecture, 1)
    top = "transformer" if model_type == "gpt2" else "model"
    for name, source in family.layers.items():
        assert names.get_name(f"{top}.{family.blocks}.0.{source}") == f"blk.0.{name}"
    for name, source in family.others.items():
        assert names.get_name(f"{top}.{source}") == name


def test_architectures_are_those_of_the_engine(tmp_path: Path) -> None:
    with gguf_file(tmp_path / "odd.gguf", "odd"):
        pass
    with pytest.raises(_core.ModelError, match="choose a model of one of: " + ", ".join(ARCHITECTURES)):
        _core.Model(str(tmp_path / "odd.gguf"))
    assert {family.architecture for family in FAMILIES.values()} <= set(ARCHITECTURES)


def test_the_text_of_a_model_of_pictures(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "text", "gemma3_text", tie_word_embeddings=True)
    convert(folder, tmp_path / "text.gguf", about=About("tiny"))
    config = json.loads((folder / "config.json").read_text())
    arrays = family_weights(config, prefix="model.language_model.")
    whole = {"model_type": "gemma3", "tie_word_embeddings": True, "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    write_weights(folder, arrays | {"model.vision_tower.embedding.weight": np.zeros((2, 2), np.float32)})
    convert(folder, tmp_path / "pictures.gguf", about=About("tiny"))
    assert (tmp_path / "pictures.gguf").read_bytes() == (tmp_path / "text.gguf").read_bytes()


def test_the_mask_token_of_a_parallel_draft_is_kept(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "c", "llama", hidden_size=256, head_dim=64)
    change_json("config.json", pard_token=7)(folder)
    quantize_checkpoint(folder, tmp_path / "model.gguf", "q8_0", about=About("tiny"))
    assert _core.Tokenizer(tmp_path / "model.gguf").mask_token == 7


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_quantizing_loses_nothing_on_the_way(tmp_path: Path, kind: str) -> None:
    """From a checkpoint in BF16 as from the same numbers in F32."""
    folder = write_family(tmp_path / "c", "llama", hidden_size=256, head_dim=64)
    arrays = family_weights(json.loads((folder / "config.json").read_text()))
    write_bfloat16(folder / "model.safetensors", arrays)
    convert(folder, tmp_path / "f32.gguf", about=About("tiny"))
    quantize(tmp_path / "f32.gguf", tmp_path / "expected.gguf", kind)
    quantize_checkpoint(folder, tmp_path / "model.gguf", kind, about=About("tiny"))
    expected = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "expected.gguf").tensors}
    for tensor in GGUFReader(tmp_path / "model.gguf").tensors:
        assert tensor.tensor_type == expected.pop(tensor.name).tensor_type
    assert not expected
    logits = [engine_logits(tmp_path / f"{name}.gguf", TOKENS[:20]) for name in ("model", "expected")]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_large_tensors_are_converted_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    folder = tmp_path / "c"
    write_checkpoint(folder) if model_type == "gpt2" else write_family(folder, model_type)
    steps: dict[str, list[int]] = {"whole": [], "pieces": []}
    for name, seen in steps.items():
        convert(folder, tmp_path / name, "F16", about=About("tiny"), progress=lambda *step, s=seen: s.append(step))
        monkeypatch.setattr("pystaged.loading.convert._CHUNK", 1000)
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()
    assert len(steps["pieces"]) > 1.5 * len(steps["whole"])


# ---- Vocabularies ----

TEXT = (
    "I'm 1234567 years old, WE'VE told 'them'!!\n\n  def f(x):\n\treturn x**2  # caf\u00e9 \u00bd\r\n"
    "\u4e2d\u6587 \u043d\u0435\u0449\u043e \u0939\u093f\u0928\u094d\u0926\u0940 "
    "HelloWorld fooBAR 3.14 \U0001f999\u2764 <|user|>hi<|endoftext|>  end "
)


PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def write_gpt2_tokenizer(folder: Path, steps: list[dict[str, Any]], ignore_merges: bool) -> None:
    """GPT-2's tokens, with two that are added, for texts split in another way."""
    tokens, merges = gpt2_vocabulary()
    first = {"id": len(tokens) - 1, "content": "<|endoftext|>", "special": True} | PLAIN
    second = {"id": len(tokens), "content": "<|user|>", "special": False} | PLAIN
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "ignore_merges": ignore_merges}
    model |= {"merges": [merge.split(" ") for merge in merges]}
    found = {"version": "1.0", "added_tokens": [first, second], "normalizer": {"type": "NFC"}, "model": model}
    found |= {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    (folder / "tokenizer.json").write_text(json.dumps(found), "utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(("pre", "steps", "ignore_merges"), table("pre_tokenizers"))
def test_texts_are_split_as_the_tokenizer_says(tmp_path: Path, pre: str, steps: Any, ignore_merges: bool) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    write_family(tmp_path, "llama")
    write_gpt2_tokenizer(tmp_path, steps, ignore_merges)
    config = family_config("llama", vocab_size=50300, hidden_size=8, head_dim=2)
    rows = family_weights(config)
    rows["model.embed_tokens.weight"] = rows["lm_head.weight"] = np.ones((50300, 8), np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_weights(tmp_path, rows)
    out = tmp_path / "model.gguf"
    convert(tmp_path, out)
    expected = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids
    assert llama_tokens(out, TEXT) == expected
    found = _core.Tokenizer(str(out))
    assert found.metadata["tokenizer.ggml.pre"] == pre
    assert found.encode(TEXT).tolist() == expected
    assert [found.is_control(token) for token in range(50255, 50259)] == [False, True, True, False]


def test_bos_and_the_template_of_chats(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "llama", "llama")
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    write_tokenizer_json(folder, post_processor={"type": "Sequence", "processors": [template]})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    convert(folder, tmp_path / "model.gguf")
    fields = GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.ggml.add_eos_token"].contents() is False
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert llama_tokens(tmp_path / "model.gguf", "a")[0] == NUM_TOKENS - 1


def test_ends_of_turns(tmp_path: Path) -> None:
    """The token that ends texts ends turns, too; marks are control tokens, whether or not the tokenizer says so."""
    folder, marks = write_family(tmp_path / "c", "llama"), ["<|im_end|>", "<|im_start|>", "<think>", "</think>"]
    added = [{"id": 280 + i, "content": mark, "special": False} for i, mark in enumerate(marks)]
    write_tokenizer_json(folder, 280, added_tokens=added)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": marks[0]}))
    convert(folder, tmp_path / "model.gguf")
    tokenizer = _core.Tokenizer(str(tmp_path / "model.gguf"))
    assert tokenizer.eos == 280
    assert tokenizer.end_tokens.tolist() == [279, 280]
    assert [tokenizer.is_control(280 + i) for i in range(len(marks))] == [mark.startswith("<|") for mark in marks]


def with_ends(folder: Path, config: object, generation: object) -> Path:
    """A checkpoint whose tokens from 289 on end texts if something says so, the last two as llama.cpp knows them."""
    write_family(folder, "llama", eos_token_id=config)
    words = ["<turn_over>", "<|eot|>", "<stop>", "<|im_end|>", "<end_of_turn>"]
    write_tokenizer_json(folder, 290, added_tokens=[{"id": 290 + i, "content": word} for i, word in enumerate(words)])
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return folder


@pytest.mark.parametrize(("config", "generation", "expected"), table("ends_of_texts"))
def test_all_that_ends_texts(tmp_path: Path, config: object, generation: object, expected: list[int]) -> None:
    """As in transformers, where generation_config.json's tokens replace config.json's."""
    convert(with_ends(tmp_path / "c", config, generation), tmp_path / "model.gguf")
    tokenizer = _core.Tokenizer(str(tmp_path / "model.gguf"))
    assert tokenizer.eos == expected[0]
    assert tokenizer.end_tokens.tolist() == [*expected, 293, 294]


def test_too_many_tokens_that_end_texts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 tokens end a text, but a GGUF file can name three"):
        convert(with_ends(tmp_path / "c", [289, 290, 291, 292], None), tmp_path / "model.gguf")


@pytest.mark.parametrize(("files", "expected"), table("template_files"))
def test_the_template_is_that_of_transformers(tmp_path: Path, files: dict[str, str], expected: Any) -> None:
    folder = write_family(tmp_path / "c", "llama")
    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    convert(folder, tmp_path / "model.gguf")
    found = _core.metadata(tmp_path / "model.gguf")
    several = expected if isinstance(expected, dict) else {"default": expected}
    keys = {f"tokenizer.chat_template.{name}".removesuffix(".default"): text for name, text in several.items()}
    assert {key: text for key, text in found.items() if re.match(r"tokenizer\.chat_template(\.|$)", key)} == keys
    if find_spec("transformers"):
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

        assert PreTrainedTokenizerFast.from_pretrained(folder).chat_template == expected


WORDS = ("\u2581\u2581", "<|end|>")
ADDED = [{"id": 790 + i, "content": word, "special": False} | PLAIN for i, word in enumerate(WORDS)]
GEMMA = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}


def learnt_pieces(text: str, count: int) -> list[str]:
    """Words of a text and their parts, the commonest first."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    learner.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=count, show_progress=False))
    vocab = learner.get_vocab()
    return sorted(sorted(vocab, key=lambda piece: vocab[piece]), key=lambda piece: len(piece) == 1)


@pytest.mark.parametrize(
    ("changes", "first"),
    [({}, True), ({"normalizer": None, "pre_tokenizer": METASPACE}, True), (GEMMA, False)],
    ids=["Llama", "Metaspace", "Gemma"],
)
def test_sentencepiece(tmp_path: Path, changes: dict[str, Any], first: bool) -> None:
    """Texts become the tokens that the tokenizers library makes of the same tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder, rows = write_family(tmp_path / "c", "llama"), 800
    write_sentencepiece(folder, learnt_pieces(Path(__file__).read_text("utf-8"), 500), **changes)
    whole = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    whole["added_tokens"] += ADDED
    (folder / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_prefix_space": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = family_weights(family_config("llama"))
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = np.ones((rows, 64), np.float32)
    write_weights(folder, tensors)
    convert(folder, tmp_path / "model.gguf")
    fields = GGUFReader(tmp_path / "model.gguf").fields
    contents = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "tokens", "token_type")}
    assert contents["model"] == "llama"
    assert contents["tokens"][790:793] == ["  ", "<|end|>", "[PAD792]"]
    assert [contents["token_type"][i] for i in (0, 3, 790, 791, 792)] == [3, 6, 4, 3, 5]
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is first
    text = "def test(x):\n\treturn 'caf\u00e9 \U0001f999' # the parametrized tokenizer's families, ends"
    expected = [1, *tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids]
    assert len(expected) < len(text)
    assert llama_tokens(tmp_path / "model.gguf", text) == expected
    assert _core.Tokenizer(str(tmp_path / "model.gguf")).encode(text).tolist() == expected


# ---- Malformed ones ----


@pytest.mark.parametrize(("case", "model_type", "changes", "message"), table("malformed_configs"))
def test_malformed_configs(tmp_path: Path, case: str, model_type: str, changes: dict[str, Any], message: str) -> None:
    del case
    folder = write_family(tmp_path / "c", model_type if model_type in FAMILIES else "llama")
    change_json("config.json", model_type=model_type, **changes)(folder)
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(folder, tmp_path / "model.gguf", "f16")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(("changes", "message"), table("malformed_tokenizers"))
def test_malformed_tokenizers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_family(tmp_path / "c", "llama")
    write_tokenizer_json(folder, **changes)
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: whole.update(normalizer={"type": "Lowercase"}), "cannot say how this tokenizer splits"),
        (lambda whole: whole.update(pre_tokenizer=METASPACE | {"split": True}), "cannot say how this tokenizer splits"),
        # Two parts that make a token do so in a GGUF file.
        (lambda whole: whole["model"]["merges"].remove("ab c"), "cannot say how this tokenizer splits"),
        (lambda whole: whole["model"]["merges"].append("a b c"), "the merge 'a b c' names tokens outside the vocab"),
        (lambda whole: whole["model"]["vocab"].pop("<0xFF>"), "has no tokens for bytes"),
    ],
)
def test_malformed_sentencepiece(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    folder = write_family(tmp_path / "c", "llama")
    write_sentencepiece(folder, ["ab", "bc", "abc", "a", "b", "c"])
    whole = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    change(whole)
    (folder / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "model.gguf")


def test_a_token_spelled_as_an_unused_one(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "c", "llama")
    write_tokenizer_json(folder, 290, added_tokens=[{"content": "[PAD299]", "id": 292}])
    with pytest.raises(ValueError, match=r"two tokens would be spelled '\[PAD299\]'"):
        convert(folder, tmp_path / "model.gguf")
