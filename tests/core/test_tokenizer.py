"""Text to tokens and back: llama.cpp's own cases, any text, special tokens, limits."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from support.logits import llama_tokenize, llama_vocabulary
from support.paths import DATA, table
from support.random_models import add_pairs, byte_alphabet, gguf_file

from pystaged import _core

VOCABULARY = DATA / "ggml-vocab-gpt-2.gguf"
END_OF_TEXT = 50256
TEXTS = (DATA / "ggml-vocab-gpt-2.gguf.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
TOKENS = [[int(word) for word in line.split()] for line in (DATA / "ggml-vocab-gpt-2.gguf.out").read_text().split("\n")]
AWKWARD = table("awkward_texts")
texts = st.text(max_size=40) | st.lists(st.sampled_from([*AWKWARD, "a", " ", "'s", "\n", "12"]), max_size=6).map(
    "".join
)


@pytest.fixture(scope="module")
def tokenizer() -> _core.Tokenizer:
    return _core.Tokenizer(str(VOCABULARY))


@pytest.fixture(scope="module")
def llama() -> Iterator[Any]:
    """The vocabulary as llama-cpp-python opens it."""
    with llama_vocabulary(VOCABULARY) as model:
        yield model


def round_trip(tokenizer: _core.Tokenizer, text: str) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text))


@pytest.mark.parametrize(("text", "tokens"), list(zip(TEXTS, TOKENS, strict=True)), ids=[ascii(text) for text in TEXTS])
def test_llama_cpp_cases(tokenizer: _core.Tokenizer, text: str, tokens: list[int]) -> None:
    assert tokenizer.encode(text).tolist() == tokens
    assert round_trip(tokenizer, text) == text.encode()
    assert tokenizer.decode(tokens) == tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=50)
@given(text=texts)
def test_same_tokens_as_llama_cpp_python(tokenizer: _core.Tokenizer, llama: Any, text: str) -> None:
    tokens, vocab = tokenizer.encode(text), llama_cpp.llama_model_get_vocab(llama)
    assert tokens.dtype.name == "int32"
    assert tokens.tolist() == llama_tokenize(llama, text)
    assert tokenizer.decode(tokens, special=True) == tokenizer.decode(tokens.tolist(), special=True) == text
    for token in tokens.tolist():
        piece = ctypes.create_string_buffer(64)
        size = llama_cpp.llama_token_to_piece(vocab, token, piece, len(piece), 0, False)
        assert tokenizer.token_bytes(token) == piece.raw[:size]


def test_special_tokens(tokenizer: _core.Tokenizer) -> None:
    assert tokenizer.encode("<|endoftext|>").tolist() == [END_OF_TEXT]
    alone = [tokenizer.encode(part).tolist() for part in ("a ", "b")]
    assert tokenizer.encode("a <|endoftext|>b").tolist() == [*alone[0], END_OF_TEXT, *alone[1]]
    assert tokenizer.token_bytes(END_OF_TEXT) == b""


def test_every_token_has_bytes(tokenizer: _core.Tokenizer) -> None:
    assert tokenizer.num_tokens == END_OF_TEXT + 1
    pieces = [tokenizer.token_bytes(token) for token in range(END_OF_TEXT)]
    assert all(pieces)
    assert len(set(pieces)) == END_OF_TEXT
    assert {bytes([byte]) for byte in range(256)} <= set(pieces)


def test_decode_of_special_and_of_half_characters(tokenizer: _core.Tokenizer) -> None:
    tokens = tokenizer.encode("a<|endoftext|>\U0001f999").tolist()
    assert tokenizer.decode(tokens) == "a\U0001f999"
    assert tokenizer.decode(tokens, special=True) == "a<|endoftext|>\U0001f999"
    assert tokenizer.decode(tokens[:-1]) == "a\ufffd"
    for wrong, kind in (([50257], ValueError), ([-1], ValueError), ([1.5], TypeError), ("ab", TypeError)):
        with pytest.raises(kind):
            tokenizer.decode(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 50257, 2**31 - 1, -(2**31)])
def test_tokens_out_of_range(tokenizer: _core.Tokenizer, token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 50257"):
        tokenizer.token_bytes(token)
    assert not tokenizer.is_end(token)


@pytest.mark.parametrize(
    "unit", ["def f(x):\n    return x\n", "a", " ", "\n", "\U0001f999", "\u4e2d", "<|endoftext|>"], ids=ascii
)
def test_very_long_texts(tokenizer: _core.Tokenizer, unit: str) -> None:
    text = unit * (60_000 // len(unit))
    tokens = tokenizer.encode(text)
    if unit == "<|endoftext|>":
        assert tokens.tolist() == [END_OF_TEXT] * text.count(unit)
    else:
        assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()


def bytes_alone(path: Path, pre: str) -> _core.Tokenizer:
    """A vocabulary of GPT-2's bytes whose texts are split in another way."""
    with gguf_file(path, "llama") as writer:
        add_pairs(writer, byte_alphabet(), pre=pre)
    return _core.Tokenizer(path)


# libllama splits texts for these by std::regex, which takes a stack as deep as a word is long.
@pytest.mark.parametrize("pre", ["tekken", "default"])
def test_very_long_words(tmp_path: Path, pre: str) -> None:
    tokenizer = bytes_alone(tmp_path / "vocabulary.gguf", pre)
    for unit in ("a", "\u4e2d", "="):
        text = unit * (40_000 // len(unit))
        with ThreadPoolExecutor(1) as pool:
            tokens = pool.submit(tokenizer.encode, text, add_special=False).result()
        assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()


def test_words_that_are_too_long(tmp_path: Path) -> None:
    tokenizer = bytes_alone(tmp_path / "vocabulary.gguf", "gpt-4o")
    for text in ("a b" + "=" * (1 << 20), "a b " + " " * (1 << 20)):
        with pytest.raises(ValueError, match="1048577 bytes in a row without white space, or of it; at most 1048576"):
            tokenizer.encode(text)


def test_a_way_of_splitting_that_ends_the_process(tmp_path: Path) -> None:
    with pytest.raises(_core.ModelError, match="pre-tokenizer 'whitespace' is not supported"):
        bytes_alone(tmp_path / "vocabulary.gguf", "whitespace")


# Tokens inside, across and next to each other, and of white space.
SPECIALS = ["<a>", "<a", "a><", "<a><b>", "<b>", "<|x|>", "|>", "  ", " <c> ", "\n\n"]


@pytest.fixture(scope="module", params=[False, True], ids=["no-ends", "ends"])
def tangled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A vocabulary of bytes and such special tokens, opened by us and by llama-cpp-python."""
    path = tmp_path_factory.mktemp("tangled") / "vocabulary.gguf"
    with gguf_file(path, "gpt2") as writer:
        kinds = [TokenType.CONTROL if i % 2 else TokenType.USER_DEFINED for i in range(len(SPECIALS))]
        add_pairs(writer, [*byte_alphabet(), *SPECIALS], [TokenType.NORMAL] * 256 + kinds)
        for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
            add(260)
            writer.add_bool(f"tokenizer.ggml.add_{name}_token", request.param)
    with llama_vocabulary(path) as model:
        yield _core.Tokenizer(path), model


@pytest.mark.slow
@settings(max_examples=25)
@given(
    parts=st.lists(
        st.sampled_from([*SPECIALS, "<", "a", ">", " ", "x", "\n", "<a><", "<b>" * 64]), min_size=100, max_size=400
    )
)
def test_long_texts_of_special_tokens(tangled: tuple[Any, Any], parts: list[str]) -> None:
    tokenizer, llama = tangled
    assert tokenizer.encode("".join(parts)).tolist() == llama_tokenize(llama, "".join(parts))


def test_ctrl_c_while_a_text_is_tokenized(tokenizer: _core.Tokenizer) -> None:
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    text = "<|endoftext|>" * 2_000_000

    def encode() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        tokenizer.encode(text)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(Alarm):
            encode()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_text_that_is_not_unicode(tokenizer: _core.Tokenizer) -> None:
    with pytest.raises((ValueError, TypeError)):
        tokenizer.encode("\ud800")
    with pytest.raises(TypeError):
        tokenizer.encode(5)  # type: ignore[arg-type]
