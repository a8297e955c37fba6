"""Who may ask, what for, and how much of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient
from support.server import NAME

from pystaged.engine import Engine
from pystaged.options.aliases import ADDRESSES
from pystaged.server.app import application
from pystaged.server.models import Models
from pystaged.server.request_types import ChatRequest, CompletionRequest, DetokenizeRequest
from pystaged.server.settings import Settings

ASK = {"prompt": "a", "max_tokens": 1}
TEXT = "/v1/completions"


def client(engine: Engine, **settings: Any) -> TestClient:
    return TestClient(application(Models.of(engine, Settings(NAME, **settings))), base_url="http://localhost:8080")


@pytest.fixture(scope="module")
def usual(engine: Engine) -> Iterator[TestClient]:
    with client(engine) as usual:
        yield usual


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:80", "my.localhost", "192.0.2.7", "LOCALHOST"])
def test_own_names_and_addresses_are_answered_to(usual: TestClient, host: str) -> None:
    assert usual.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example:8080", "127.0.0.1.evil.example", "", "[::1", "x@localhost"),
        *("localhost/x", "localhost?x", "localhost#x", 'localhost"} 1', "localhost:x"),
    ],
)
def test_other_names_are_not(usual: TestClient, host: str) -> None:
    for path in ("/health", "/", TEXT):
        response = usual.get(path, headers={"Host": host})
        assert response.status_code == 403
        assert "--allowed-host" in response.json()["error"]["message"]


def test_a_name_can_be_allowed(engine: Engine) -> None:
    with client(engine, allowed_hosts=["Models.Example"]) as named:
        assert named.get("/health", headers={"Host": "models.example:80"}).status_code == 200


def test_pages_of_other_sites_may_not_ask(usual: TestClient) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:9999"):
        response = usual.post(TEXT, json=ASK, headers={"Origin": origin})
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
    assert usual.post(TEXT, json=ASK, headers={"Origin": "http://localhost:8080"}).status_code == 200
    assert usual.options(TEXT, headers={"Origin": "https://evil.example"}).status_code == 403


def test_sites_that_may(engine: Engine) -> None:
    with client(engine, cors_origins=["https://good.example/"], api_keys=["k"]) as shared:
        good = {"Origin": "https://good.example"}
        asked = good | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        before = shared.options(TEXT, headers=asked)
        assert before.status_code == 200
        assert before.headers["access-control-allow-headers"] == "authorization"
        response = shared.post(TEXT, json=ASK, headers=good | {"Authorization": "Bearer k"})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://good.example"
        assert "access-control-allow-credentials" not in response.headers
        assert shared.post(TEXT, json=ASK, headers={"Origin": "https://evil.example"}).status_code == 403
    with client(engine, cors_origins=["*"]) as open_to_all:
        assert open_to_all.post(TEXT, json=ASK, headers={"Origin": "https://any.example"}).status_code == 200


def test_keys(engine: Engine) -> None:
    with client(engine, api_keys=["first", "zweiter-ü"]) as closed:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"X-Api-Key": ""}):
            for path in (TEXT, "/tokenize", "/nowhere"):
                response = closed.post(path, json=ASK, headers=headers)
                assert response.status_code == 401
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        others: Any = {"X-Api-Key": "first"}, {"Authorization": b"Bearer " + "zweiter-ü".encode()}
        for path in ("/props", "/metrics", "/v1/models"):
            assert closed.get(path).status_code == 401
        for path in ("/health", "/"):
            assert closed.get(path).status_code == 200
        for headers in ({"Authorization": "Bearer first"}, {"authorization": "bearer first "}, *others):
            assert closed.post(TEXT, json=ASK, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"nothing", b'{"prompt": NaN}', b'{"prompt": "a", "temperature": Infinity}', b"\xff\xfe"),
        *(b"[" * 100_000, b'{"a":' * 50_000),
        json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(2000)}}).encode(),
        json.dumps({"prompt": "a", "stop": ["x"] * 100}).encode(),
    ],
    ids=["empty", "cut", "list", "word", "nan", "infinity", "bytes", "deep lists", "deep objects", "biases", "stops"],
)
def test_bodies_that_are_none(usual: TestClient, body: bytes) -> None:
    response = usual.post(TEXT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


_MANY = 10_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * _MANY}),
        (CompletionRequest, {"prompt": ["a", 1] * _MANY}),
        (CompletionRequest, {"prompt": [[]] * _MANY}),
        (CompletionRequest, {"prompt": [[True] * _MANY] * 100}),
        (CompletionRequest, {"prompt": ["a"] * _MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * _MANY}),
        (CompletionRequest, {"prompt": "a", "dry_sequence_breakers": [1] * _MANY}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(_MANY)), "x")}),
        (CompletionRequest, {"prompt": "a", "logit_bias": [[1, "x"]] * _MANY}),
        (CompletionRequest, {"prompt": "a", "grammar": "x" * (1 << 18)}),
        (ChatRequest, {"messages": [1] * _MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * _MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * _MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "tool_calls": [1] * _MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "tools": [1] * _MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "prediction": {"content": [1] * _MANY}}),
        (DetokenizeRequest, {"tokens": [-1] * _MANY}),
    ],
)
def test_a_request_full_of_faults_is_read_to_the_first(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Errors for each of a million would take a minute and gigabytes, in the thread that everybody waits for."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 4  # one for each form that a member may have


def test_a_body_that_is_too_large(engine: Engine) -> None:
    with client(engine, max_body=1000) as small:
        assert small.post(TEXT, content=b" " * 1001).status_code == 413
        assert small.post(TEXT, content=iter([b" " * 600] * 2)).status_code == 413
        assert small.post(TEXT, content=json.dumps(ASK).encode() + b" " * 900).status_code == 200


def test_addresses_of_other_servers(usual: TestClient) -> None:
    def refusal(path: str) -> str:
        response = usual.get(path)
        error = response.json()["error"]
        assert response.status_code == 404
        if path.startswith("/api/"):
            return str(error)
        assert error["type"] == "not_found_error"
        return str(error["message"])

    ours = {route.path for route in usual.app.routes}  # type: ignore[attr-defined]
    for theirs, hint in ADDRESSES.items():
        assert refusal(theirs) == f"there is no GET {theirs}; {hint}"
        assert not hint.startswith("use ") or hint.removeprefix("use ") in ours
    assert refusal("/nothing") == "there is no GET /nothing; see /openapi.json for all paths"


@pytest.mark.usefixtures("nothing_is_resolved")
def test_a_models_name_reaches_neither_files_nor_hub(usual: TestClient, engine: Engine) -> None:
    with client(engine, strict=True) as strict:
        for name in ("/etc/passwd", "../../secret.gguf", "openai-community/gpt2", "x" * 10_000, "a\0b"):
            assert usual.post(TEXT, json=ASK | {"model": name}).json()["model"] == NAME
            response = strict.post(TEXT, json=ASK | {"model": name})
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "model_not_found"
        assert strict.post(TEXT, json=ASK).status_code == 400
        assert strict.post(TEXT, json=ASK | {"model": NAME}).status_code == 200


def test_another_method_than_an_address_has(usual: TestClient) -> None:
    response = usual.get(TEXT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "error" in response.json()


def test_nothing_says_where_files_are(usual: TestClient, engine: Engine) -> None:
    folder = str(engine._bundle.path.parent)
    for path in ("/", "/props", "/metrics", "/v1/models", "/tokenizer_info", "/openapi.json"):
        assert folder not in usual.get(path).text


def test_a_fault_of_ours_is_not_told(usual: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("pystaged.server.answer.usage", fail)
    response = usual.post(TEXT, json=ASK)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"


def test_the_page_may_run_its_own_script_alone(usual: TestClient) -> None:
    response = usual.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http://" not in response.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in response.text
    assert "innerHTML" not in response.text
