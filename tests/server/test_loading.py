"""A server whose model is being loaded: it is there, says so, and loses no request when it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from support.server import NAME, Server, live
from typer.testing import CliRunner

from pystaged.cli import app, serve
from pystaged.engine import Engine
from pystaged.server.run import answering_that_it_loads, bound
from pystaged.server.settings import Settings


def test_it_says_that_it_loads() -> None:
    with bound("127.0.0.1", 0) as listener, answering_that_it_loads(listener, Settings(NAME)):
        server = Server(listener.getsockname()[1])
        for path, body in (("/health", None), ("/v1/models", None), ("/v1/completions", {"prompt": "a"})):
            status, answer = server.ask(path, body)
            assert status == 503
            expected = {"code": 503, "message": "Loading model", "type": "unavailable_error", "param": None}
            assert answer["error"] == expected
        assert server.send("GET", "/").getheader("refresh") == "1"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.InternalServerError, match="Loading model"):
            client.models.list()


def test_who_may_not_ask_learns_nothing() -> None:
    settings = Settings(NAME, api_keys=["right"])
    with bound("127.0.0.1", 0) as listener, answering_that_it_loads(listener, settings):
        server = Server(listener.getsockname()[1])
        assert server.ask("/v1/models")[0] == 401
        assert server.ask("/v1/models", Authorization="Bearer right")[0] == 503
        assert server.ask("/health", Host="example.com")[0] == 403


def test_who_comes_when_it_is_loaded_waits_until_it_listens(engine: Engine) -> None:
    listener = bound("127.0.0.1", 0)
    with answering_that_it_loads(listener, Settings(NAME)):
        server = Server(listener.getsockname()[1])
        assert server.ask("/health")[0] == 503
    early = server.raw()
    early.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    with live(engine, listener):
        assert b" 200 " in early.recv(1 << 16)
        early.close()


def test_the_command_answers_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bound("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    seen: list[Any] = []

    def ask(name: str, options: object, *, long_context: bool) -> None:
        assert long_context
        del options
        seen.append(Server(port).ask("/health"))
        raise ValueError(f"{name} cannot be loaded")

    monkeypatch.setattr(serve, "open_engine", ask)
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "x.gguf"), "--port", str(port)])
    assert "cannot be loaded" in str(done.exception)
    assert [(status, body["error"]["message"]) for status, body in seen] == [(503, "Loading model")]
    with bound("127.0.0.1", port):
        pass  # the address is free again
