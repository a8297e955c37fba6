"""Vocabularies of both kinds against libllama, and drafts whose vocabulary is almost the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from support.logits import llama_tokenize, llama_vocabulary
from support.random_models import RandomModel, add_pairs, add_sentencepiece, add_vocabulary, gguf_file, write

from pystaged._core import ModelError, Tokenizer

TEXTS = [
    "",
    "hello the other thing",
    " leading and  double spaces ",
    "<s>begin</s> <|tool|>x<|tool|> <think>y</think>",
    "\u00e9t\u00e9 \u65e5\u672c \U0001f600\n\ttabs",
    "<s>" * 200 + "a" + "</s> " * 100,
]


def byte_pairs(writer: GGUFWriter, size: int) -> None:
    add_vocabulary(writer, size)
    writer.add_add_bos_token(True)


def no_bytes(writer: GGUFWriter, size: int) -> None:
    add_sentencepiece(writer, size, byte_tokens=False)


def character_pairs(writer: GGUFWriter, size: int) -> None:
    """As in Gemma 4: merges of characters, spaces as U+2581, and tokens for single bytes."""
    bytes_alone = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "\u2581the", "\n", "\n\n"]
    tokens = ["<pad>", "<s>", "<unk>", *bytes_alone, *letters]
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list([*tokens, *(f"<unused{i}>" for i in range(size - len(tokens)))])
    kinds = [TokenType.CONTROL] * 3 + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(letters)
    writer.add_token_types(kinds + [TokenType.CONTROL] * (size - len(tokens)))
    writer.add_token_merges(["t h", "th e", "\u2581 the"])
    writer.add_bos_token_id(1)


KINDS: dict[str, Callable[[GGUFWriter, int], object]] = {
    "sentencepiece": add_sentencepiece,
    "byte-pairs": byte_pairs,
    "character pairs": character_pairs,
}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("vocabularies")

    def make(kind: str, size: int = 300) -> Path:
        path = folder / f"{kind}-{size}.gguf"
        return path if path.exists() else write(path, RandomModel("llama", vocab_size=size, vocabulary=KINDS[kind]))

    return make


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, model_file: Callable[..., Path]) -> Iterator[tuple[Tokenizer, Any]]:
    """Our tokenizer and libllama's model."""
    path = model_file(request.param)
    with llama_vocabulary(path) as model:
        yield Tokenizer(path), model


@pytest.mark.parametrize("add_special", [True, False])
@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_as_libllama(pair: tuple[Tokenizer, Any], text: str, add_special: bool, parse_special: bool) -> None:
    ours, model = pair
    assert ours.encode(text, add_special, parse_special).tolist() == llama_tokenize(
        model, text, add_special, parse_special
    )


def test_what_sentencepiece_says(model_file: Callable[..., Path]) -> None:
    ours = Tokenizer(model_file("sentencepiece"))
    assert (ours.adds_bos, ours.bos, ours.eos) == (True, 1, 2)
    tokens = ours.encode("the <|tool|>").tolist()
    assert tokens[0] == 1
    tool = tokens[-1]
    assert (ours.token_text(tool), ours.is_control(tool)) == ("<|tool|>", True)
    assert (ours.token_bytes(tool), ours.token_bytes(tool, special=True)) == (b"", b"<|tool|>")
    assert ours.encode("<|tool|>", parse_special=False).tolist()[-1] != tool
    think = tool + 1
    assert ours.encode("<think>", add_special=False, parse_special=False).tolist()[-1] == think
    assert ours.token_bytes(think) == b"<think>"
    assert not ours.is_control(think)
    assert ours.token_bytes(3 + 0x41) == b"A"
    assert ours.end_tokens.tolist() == [token for token in range(300) if ours.is_end(token)] == [2]


def test_what_gemma_4_says(model_file: Callable[..., Path]) -> None:
    ours = Tokenizer(model_file("character pairs"))
    assert ours.adds_bos
    tokens = ours.encode("the the\n\n\n\u00e9\n").tolist()
    assert [ours.token_text(token) for token in tokens] == [
        *("<s>", "the", "\u2581the", "\n", "\n", "\n", "<0xC3>", "<0xA9>", "\n")
    ]
    assert ours.decode(tokens) == "the the\n\n\n\u00e9\n"


def test_characters_without_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", RandomModel("llama", vocabulary=no_bytes))
    ours = Tokenizer(path)
    assert ours.encode("the").size > 0
    with pytest.raises(ValueError, match="no tokens for some character"):
        ours.encode("Z")


def tiny(writer: GGUFWriter, size: int) -> None:
    """Too small for the token that libllama takes to begin texts where none is named."""
    add_pairs(writer, [chr(0x61 + i) for i in range(size)])
    writer.add_add_bos_token(True)


def test_what_would_end_the_process(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", RandomModel("llama", vocab_size=8, vocabulary=tiny))
    with pytest.raises(ModelError, match="adds a token to every text"):
        Tokenizer(path)


def test_almost_the_same(model_file: Callable[..., Path]) -> None:
    """A padded tail, and another vocabulary altogether."""
    target, padded = Tokenizer(model_file("sentencepiece")), Tokenizer(model_file("sentencepiece", 320))
    shared = target.shared_with(padded)
    assert shared.dtype == np.bool_
    assert shared.all()
    assert padded.shared_with(target).tolist() == [True] * 300 + [False] * 20
    assert target.fingerprint != padded.fingerprint
    pairs = Tokenizer(model_file("byte-pairs"))
    assert not target.shared_with(pairs).all()


def test_control_tokens_count(tmp_path: Path) -> None:
    """Two control tokens with other spellings have the same bytes: none."""
    paths = []
    for name in ("<|a|>", "<|b|>"):
        path = tmp_path / f"{len(paths)}.gguf"
        with gguf_file(path, "gpt2") as writer:
            add_pairs(writer, ["a", "b", "ab", name], [1, 1, 1, 3])
            writer.add_bos_token_id(3)
            writer.add_eos_token_id(2)
        paths.append(path)
    first, second = (Tokenizer(path) for path in paths)
    assert first.token_bytes(3) == second.token_bytes(3) == b""
    assert first.shared_with(second).tolist() == [True, True, True, False]
    assert first.fingerprint != second.fingerprint
