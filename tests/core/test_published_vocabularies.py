"""The vocabularies of published models, with llama.cpp's texts and their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader, TokenType
from support import archive
from support.random_models import byte_alphabet

from pystaged._core import ModelError, Tokenizer
from pystaged.decoding.stop_strings import TextBuffer

NAMES = {path.name.removeprefix("ggml-vocab-").removesuffix(".gguf.out"): path for path in archive.VOCABULARIES}
pytestmark = [pytest.mark.slow, archive.needed]


def test_all_are_there() -> None:
    assert len(NAMES) == 15


@pytest.fixture(scope="module", params=sorted(NAMES.keys() - {"bert-bge"}))
def file(request: pytest.FixtureRequest) -> Path:
    return NAMES[request.param].with_suffix("")


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Tokenizer:
    return Tokenizer(file)


@pytest.fixture(scope="module")
def cases(file: Path) -> list[tuple[str, list[int]]]:
    texts = Path(f"{file}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{file}.out").read_text().split("\n")[: len(texts)]
    return [(text, list(map(int, line.split()))) for text, line in zip(texts, lines, strict=True)]


def test_tokens_and_text(file: Path, tokenizer: Tokenizer, cases: list[tuple[str, list[int]]]) -> None:
    space = " " * ("-spm" in file.name or "phi-3" in file.name)  # which SentencePiece puts before a text
    for text, tokens in cases:
        assert tokenizer.encode(text, add_special=False).tolist() == tokens
        assert tokenizer.decode(tokens) == (space + text if text else "")


def test_text_in_pieces(tokenizer: Tokenizer, cases: list[tuple[str, list[int]]]) -> None:
    for text, tokens in cases:
        pieces = [tokenizer.token_bytes(token) for token in tokens]
        data = b"".join(pieces)
        whole = tokenizer.decode(tokens)
        assert whole.encode() == data
        for cut in range(len(data)):
            buffer = TextBuffer()
            assert buffer.push(data[:cut]) + buffer.push(data[cut:]) + buffer.finish() == whole
        # A stop string that begins and ends within tokens.
        for begin in range(0, len(text) - 3, 3):
            stop = text[begin : begin + 3]
            for given in (pieces, [data[i : i + 1] for i in range(len(data))]):
                buffer = TextBuffer((stop,))
                assert "".join(map(buffer.push, given)) + buffer.finish() == whole[: whole.index(stop)]
                assert buffer.met == stop


def test_bytes_of_every_token(file: Path, tokenizer: Tokenizer) -> None:
    fields = GGUFReader(file).fields
    words, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]  # by themselves; the others come last
    alphabet = dict(zip(byte_alphabet(), [*printed, *sorted({*range(256)} - {*printed})], strict=True))
    is_level = fields["tokenizer.ggml.model"].contents() == "gpt2"
    for token, (word, kind) in enumerate(zip(words, kinds, strict=True)):
        spelled = word.encode()
        if kind == TokenType.NORMAL and is_level and not alphabet.keys() >= {*word}:
            assert "command-r" in file.name  # some of whose added tokens are no bytes; what they mean nobody says
            continue
        if tokenizer.is_control(token) or kind in (TokenType.UNKNOWN, TokenType.UNUSED):
            expected = b""
        elif kind == TokenType.BYTE:
            expected = bytes([int(word[3:5], 16)])
        elif kind == TokenType.USER_DEFINED:
            expected = spelled
        else:
            expected = bytes(map(alphabet.__getitem__, word)) if is_level else word.replace("\u2581", " ").encode()
        assert tokenizer.token_bytes(token) == expected
        assert kind != TokenType.CONTROL or tokenizer.token_bytes(token, special=True) == spelled


def test_a_vocabulary_for_embeddings_is_refused() -> None:
    with pytest.raises(ModelError, match="tokenizer model 'bert' is not supported, only 'gpt2'"):
        Tokenizer(NAMES["bert-bge"].with_suffix(""))
