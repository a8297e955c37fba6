"""Embeddings: llama.cpp's, on every interface, whatever else the engine does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray
from support.families import CASES
from support.random_models import write
from support.scheduling import wait_until
from support.server import NAME, Server, live
from support.steps import prefill

import pystaged
from pystaged._core import Session, Work, run
from pystaged.engine import Engine

TEXTS = ["Water boils.", "a", "The tree stands, then falls. " * 5]
POOLINGS = {
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
}


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with pystaged.load(path, recycle=False, report=lambda _: None) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with live(engine) as server:
        yield server


@pytest.mark.parametrize("case", ["gpt2", "llama", "gemma2", "qwen3"])
def test_they_are_llama_cpps(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / "model.gguf", CASES[case])
    with pystaged.load(path, recycle=False, report=lambda _: None) as engine:
        for pooling, number in POOLINGS.items():
            theirs = llama_cpp.Llama(str(path), embedding=True, pooling_type=number, n_ctx=256, verbose=False)
            for normalize in (True, False):
                expected = np.array([theirs.embed(text, normalize=normalize) for text in TEXTS])
                found = engine.embed(TEXTS, pooling=pooling, normalize=normalize)  # type: ignore[arg-type]
                np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
            theirs.close()


def test_rows_are_those_of_other_passes(engine: Engine) -> None:
    tokens = [engine.encode(text) for text in TEXTS]

    def rows(*pieces: NDArray[np.int32], shared: bool) -> list[Any]:
        sessions = [Session(engine.model, 512) for _ in pieces]
        works = [Work.embed(session, piece) for session, piece in zip(sessions, pieces, strict=True)]
        return run(works) if shared else [run([work])[0] for work in works]

    for together, alone in zip(rows(*tokens, shared=True), rows(*tokens, shared=False), strict=True):
        np.testing.assert_array_equal(together, alone)
    session = Session(engine.model, 512)
    pieces = [run([Work.embed(session, piece)])[0] for piece in np.array_split(tokens[2], 3)]
    np.testing.assert_array_equal(np.concatenate(pieces), rows(tokens[2], shared=False)[0])
    prefill(session, tokens[0])
    assert session.tokens.tolist() == [*tokens[2].tolist(), *tokens[0].tolist()]


def test_long_texts_and_files_that_name_a_pooling(engine: Engine, tmp_path: Path) -> None:
    text = "x" * 400  # more than one pass
    states = run([Work.embed(Session(engine.model, 512), engine.encode(text))])[0]
    np.testing.assert_allclose(engine.embed([text], normalize=False)[0], states.mean(0), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(engine.embed([text], pooling="last", normalize=False)[0], states[-1])
    path = write(tmp_path / "model.gguf", CASES["llama"].__class__("llama", metadata={"pooling_type": 3}))
    with pystaged.load(path, recycle=False, report=lambda _: None) as other:
        np.testing.assert_array_equal(other.embed(TEXTS), other.embed(TEXTS, pooling="last"))


def test_texts_are_written_meanwhile(engine: Engine) -> None:
    expected = engine.generate("the tree", max_tokens=40).text
    stream = engine.stream("the tree", max_tokens=40)
    begun = next(stream)
    vectors = engine.embed(TEXTS)
    assert begun + "".join(stream) == expected
    np.testing.assert_array_equal(engine.embed(TEXTS[::-1])[::-1], vectors)


def test_what_cannot_be_embedded(engine: Engine) -> None:
    with pytest.raises(TypeError, match="a list of texts"):
        engine.embed("a text")
    with pytest.raises(ValueError, match="there are no texts; give at least one"):
        engine.embed([])
    with pytest.raises(ValueError, match="empty"):
        engine.embed([""])
    with pytest.raises(ValueError, match='"mean", "cls" or "last", not "max"'.replace('"max"', "'max'")):
        engine.embed(["a"], pooling="max")  # type: ignore[arg-type]
    with pytest.raises(pystaged.ContextFullError):
        engine.embed(["a" * 600])


def test_the_servers(server: Server, engine: Engine) -> None:
    expected = engine.embed(TEXTS)
    ids = [engine.encode(text).tolist() for text in TEXTS]
    for given in (TEXTS, ids):
        status, body = server.ask("/v1/embeddings", {"input": given, "model": NAME})
        assert (status, [each["index"] for each in body["data"]]) == (200, [0, 1, 2])
        np.testing.assert_array_equal(np.array([each["embedding"] for each in body["data"]], np.float32), expected)
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    status, body = server.ask("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4"), expected[0])
    status, body = server.ask("/api/embed", {"input": TEXTS, "model": NAME})
    np.testing.assert_array_equal(np.array(body["embeddings"], np.float32), expected)
    assert body["prompt_eval_count"] == sum(map(len, ids))
    for wrong, param in (({"input": ""}, "input"), ({"input": "a" * 600}, "input"), ({"dimensions": 8}, "dimensions")):
        status, body = server.ask("/v1/embeddings", {"input": "a", **wrong})
        assert (status, body["error"]["param"]) == (400, param)


def test_who_leaves_ends_the_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, left, texts = threading.Event(), threading.Event(), []

    def embed(text: Any, embed: Callable[..., Any] = engine.embed) -> NDArray[np.float32]:
        texts.append(text)
        begun.set()
        assert left.wait(600)
        return embed(text)

    lines: list[str] = []
    monkeypatch.setattr(engine, "embed", embed)
    with live(engine, log=lines.append) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=600)
        body = json.dumps({"input": ["a"] * 50})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        assert begun.wait(600)
        connection.close()
        left.set()
        wait_until(lambda: lines)
    assert lines[0].startswith("/v1/embeddings left ")
    assert len(texts) < 50
