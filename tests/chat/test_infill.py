"""Filling in: the prompt is the one that llama-server makes, on every interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from gguf import GGUFWriter
from support.logits import llama_tokenize, llama_vocabulary
from support.random_models import RandomModel, add_sentencepiece, add_vocabulary, write
from support.server import Server, live
from typer.testing import CliRunner

import pystaged
from pystaged import cli
from pystaged.engine import Engine

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]
FILES = [("a.py", "def hello():\n    pass\n"), ("b.py", "import a\n")]
PREFIX, SUFFIX = "def greet():\n    ", "\n\ngreet()\n"


def _qwen(writer: GGUFWriter, size: int) -> None:
    add_vocabulary(writer, size, dict(enumerate(QWEN, 300)))


def _by_metadata(writer: GGUFWriter, size: int) -> None:
    """Tokens with names of their own, which the file's keys tell, and BOS."""
    add_vocabulary(writer, size, dict(enumerate(["<before>", "<after>", "<between>"], 300)))
    for number, name in enumerate(["pre", "suf", "mid"]):
        writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", 300 + number)
    writer.add_add_bos_token(True)


VOCABULARIES: dict[str, Callable[[GGUFWriter, int], None]] = {
    "qwen": _qwen,
    "metadata": _by_metadata,
    "sentencepiece": partial(add_sentencepiece, marks=["<PRE>", "<SUF>", "<MID>"]),
}


def written(folder: Path, kind: str) -> Path:
    model = RandomModel("llama", layers=1, vocab_size=400, context=4096, vocabulary=VOCABULARIES[kind])
    return write(folder / "model.gguf", model)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pystaged.load(written(tmp_path_factory.mktemp("model"), "qwen"), recycle=False, report=print) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with live(engine) as server:
        yield server


def llama_servers(
    path: Path, prefix: str, suffix: str, files: Sequence[tuple[str, str]], begun: str, n_ctx: int, n_predict: int
) -> list[int]:
    """format_prompt_infill of llama-server, with n_batch 2048."""
    with llama_vocabulary(path) as model:
        vocab = llama_cpp.llama_model_get_vocab(model)

        def tokens(text: str) -> list[int]:
            return llama_tokenize(model, text, add_special=False, parse_special=False)

        repository, file = llama_cpp.llama_vocab_fim_rep(vocab), llama_cpp.llama_vocab_fim_sep(vocab)
        extra = [repository, *tokens("myproject\n")] if repository >= 0 else []
        for name, text in files:
            extra += [file, *tokens(f"{name}\n")] if file >= 0 else tokens("\n\n--- snippet ---\n\n")
            extra += tokens(text)
        if file >= 0:
            extra += [file, *tokens("filename\n")]
        before, after, prompt = tokens(prefix), tokens(suffix), tokens(begun)
        prefix_take = min(len(before), 3 * (2048 // 4))
        suffix_take = min(len(after), max(0, 2048 // 4 - (2 + len(prompt))))
        extra_take = min(max(0, n_ctx - 2048 - 2 * n_predict), len(extra))
        first = [llama_cpp.llama_vocab_fim_pre(vocab), *before[len(before) - prefix_take :], *prompt]
        if llama_cpp.llama_vocab_get_add_bos(vocab):
            first.insert(0, llama_cpp.llama_vocab_bos(vocab))
        second = [llama_cpp.llama_vocab_fim_suf(vocab), *after[:suffix_take], llama_cpp.llama_vocab_fim_mid(vocab)]
        return [*extra[len(extra) - extra_take :], *first, *second]


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_the_prompt_is_llama_servers(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    with pystaged.load(path, recycle=False, report=print) as engine:
        for prefix, suffix, files, begun, new in (
            (PREFIX, SUFFIX, FILES, "print(", 128),
            ("", "", [], "", 16),
            ("<|fim_middle|> \u4e2d\u6587" * 9, " <PRE>", [("c", "text " * 900)], "", 128),
            ("before " * 1500, "after " * 900, [("c", "text " * 2000)], "be", 64),
        ):
            found = engine.infill_prompt(prefix, suffix, files=files, begun=begun, max_tokens=new)
            assert found == llama_servers(path, prefix, suffix, files, begun, 4096, new)
            assert len(found) + new <= engine.n_ctx


def test_a_small_context_has_room_for_the_text(tmp_path: Path) -> None:
    with pystaged.load(written(tmp_path, "qwen"), n_ctx=64, recycle=False, report=print) as engine:
        result = engine.infill("before " * 90, "after " * 90, files=FILES, max_tokens=8)
        assert len(result.tokens) == 8


def test_interfaces_write_the_same(engine: Engine, server: Server, tmp_path: Path) -> None:
    expected = engine.infill(PREFIX, SUFFIX, max_tokens=12)
    assert engine.generate(engine.infill_prompt(PREFIX, SUFFIX), max_tokens=12).tokens == expected.tokens
    more: Any = {"max_tokens": 12, "temperature": 0}
    status, body = server.ask("/v1/completions", {"prompt": PREFIX, "suffix": SUFFIX, **more})
    assert (status, body["choices"][0]["text"]) == (200, expected.text)
    status, body = server.ask("/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX, **more})
    assert (status, body["content"]) == (200, expected.text)
    path = written(tmp_path, "qwen")
    options = ["--suffix", SUFFIX, "--max-tokens", "12", "--model", str(path)]
    assert CliRunner().invoke(cli.app, ["generate", PREFIX, *options]).stdout == expected.text + "\n"


def test_the_requests_of_llama_vim(engine: Engine, server: Server) -> None:
    extra = [{"text": text, "time": 7, "str": text, "filename": name} for name, text in FILES]
    around = {"id_slot": 0, "input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": extra, "cache_prompt": True}
    warm = {"n_predict": 0, "temperature": 0.0, "stream": False, "samplers": [], "response_fields": [""]}
    times = {"t_max_prompt_ms": 500, "t_max_predict_ms": 1000}
    assert server.ask("/infill", around | warm | times | {"prompt": ""}) == (200, {})
    fields = ["content", "timings/prompt_n", "timings/predicted_n", "tokens_cached", "generation_settings/n_ctx"]
    ask: Any = {"n_predict": 16, "n_indent": 4, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"]}
    ask |= {"prompt": "print(", "response_fields": fields, "seed": 5}
    status, body = server.ask("/infill", around | ask | times)
    assert (status, list(body)) == (200, fields[:-1])
    prompt = engine.infill_prompt(PREFIX, SUFFIX, files=FILES, begun="print(", max_tokens=16)
    options = engine.recommended_sampling | {"top_k": 40, "top_p": 0.9, "max_tokens": 16, "seed": 5}
    assert body["content"] == engine.generate(prompt, **options).text
    assert body["tokens_cached"] > 0


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 123, "text": "abc"}, {"text": 456}])
def test_wrong_snippets(server: Server, extra: Any) -> None:
    status, body = server.ask("/infill", {"input_prefix": "", "input_suffix": "", "input_extra": [extra]})
    assert (status, body["error"]["param"]) == (400, "input_extra")


def test_models_that_cannot(random_gguf: Callable[..., Path]) -> None:
    engine = pystaged.load(random_gguf("F32"), recycle=False, report=print)
    words = "cannot fill in text: its vocabulary has no token for prefix and suffix"
    with engine, pytest.raises(ValueError, match=words):
        engine.infill(PREFIX, SUFFIX)
