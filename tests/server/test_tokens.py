"""Tokens, what the server is, metrics, and the description of it all."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest
from support.server import NAME, Server

import pystaged
from pystaged._core import Tokenizer
from pystaged.engine import Engine
from pystaged.server import tokens
from pystaged.server.errors import ApiError
from pystaged.server.request_types import TokenizeRequest

VOCABULARY = Path(__file__).parents[1] / "data" / "ggml-vocab-gpt-2.gguf"

TEXT = "zwölf Bäume 🤗"


def test_there_and_back(server: Server, engine: Engine) -> None:
    for name in ("content", "prompt"):
        status, found = server.ask("/tokenize", {name: TEXT, "add_special": False})
        assert status == 200
        assert found["tokens"] == engine.tokenizer.encode(TEXT, add_special=False).tolist()
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), engine.n_ctx)
        assert server.ask("/detokenize", {"tokens": found["tokens"]}) == (200, {"content": TEXT, "prompt": TEXT})


def test_pieces(server: Server) -> None:
    _, found = server.ask("/tokenize", {"content": TEXT, "with_pieces": True})
    pieces = [each["piece"] for each in found["tokens"]]
    spelled = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert spelled.decode() == TEXT


@pytest.mark.parametrize("member", ["content", "prompt"])
def test_what_no_tokenizer_splits_names_the_member(member: str) -> None:
    state: Any = SimpleNamespace(engine=SimpleNamespace(tokenizer=Tokenizer(VOCABULARY), n_ctx=8))
    with pytest.raises(ApiError, match="1100000 bytes in a row without white space") as error:
        tokens.tokenize(state, TokenizeRequest(**{member: "a" * 1_100_000}))
    assert (error.value.status, error.value.body["error"]["param"]) == (400, member)


def test_what_no_tokenizer_counts_is_no_fault_of_the_servers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("the text has 1100000 bytes in a row")

    monkeypatch.setattr("pystaged.server.chats.count", fail)
    body = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    status, found = server.ask("/v1/messages/count_tokens", body)
    assert (status, found["error"]["message"]) == (400, "the text has 1100000 bytes in a row")


def test_a_lost_device_shows(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "failure", "RPC server a:1 ended the connection")
    status, found = server.ask("/health")
    assert (status, found["error"]["message"]) == (503, "the device is lost; the server's log names it")


def test_what_the_server_is(server: Server, engine: Engine) -> None:
    assert server.ask("/health") == server.ask("/v1/health") == (200, {"status": "ok"})
    _, props = server.ask("/props")
    assert props["total_slots"] == 16
    assert props["note"] == ""
    assert props["default_generation_settings"]["n_ctx"] == engine.n_ctx
    assert props["build_info"] == f"pystaged {pystaged.__version__}"
    _, info = server.ask("/tokenizer_info")
    assert info["eos_token"] == engine.tokenizer.token_text(engine.tokenizer.eos)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "pystaged")
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def metrics(server: Server) -> dict[str, float]:
    _, text = server.ask("/metrics")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"pystaged:[a-z_]+(\{[^{}]*\})? [0-9.e+-]+", line) for line in lines), lines
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_what_was_written(server: Server) -> None:
    before = metrics(server)
    _, body = server.ask("/v1/completions", {"prompt": "abcabcabc", "max_tokens": 12, "temperature": 0, "n": 2})
    after = metrics(server)
    timings = body["timings"]

    def more(name: str) -> float:
        return after[f"pystaged:{name}"] - before.get(f"pystaged:{name}", 0)

    assert more("tokens_predicted_total") == 24
    assert more("prompt_tokens_total") == timings["prompt_n"]
    assert more("prompt_tokens_cached_total") == timings["cache_n"]
    assert more("spec_decode_num_draft_tokens_total") == timings["draft_n"]
    assert more("spec_decode_num_accepted_tokens_total") == timings["draft_n_accepted"]
    assert more('requests_total{path="/v1/completions",status="200"}') == 1
    assert more("time_to_first_token_seconds_count") == 2

    def more_of_all(part: str) -> float:
        return sum(after[name] - before.get(name, 0) for name in after if part in name)

    assert more_of_all("spec_decode_num_accepted_tokens_p") == timings["draft_n_accepted"]
    assert more_of_all("tokens_by_stage") == 24
    assert after["pystaged:requests_processing"] == 0


@pytest.fixture(scope="module")
def description(server: Server) -> Any:
    return server.ask("/openapi.json")[1]


def test_the_description_is_one(description: Any) -> None:
    assert description["openapi"] == "3.1.0"
    for schema in description["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "body", "is_valid"),
    [
        ("/v1/completions", {"prompt": ["a", [1, 2]], "max_tokens": 3}, True),
        ("/v1/completions", {"prompt": ""}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, True),
        ("/v1/chat/completions", {"messages": []}, False),
    ],
)
def test_requests_are_as_described(description: Any, path: str, body: Any, is_valid: bool) -> None:
    schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": description["components"]})
    assert validator.is_valid(body) == is_valid


def test_so_many_pieces_and_no_more(server: Server) -> None:
    text = "\n0" * (1 << 17)
    assert server.ask("/tokenize", {"content": text})[0] == 200
    status, answer = server.ask("/tokenize", {"content": text, "with_pieces": True})
    assert (status, answer["error"]["param"]) == (400, "with_pieces")
