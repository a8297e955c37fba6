"""A tiny model served for the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from support.server import Server, live

import pystaged
from pystaged.decoding.policy import FixedPolicy
from pystaged.engine import Engine


@pytest.fixture(scope="module")
def engine(random_gguf: Callable[..., Path]) -> Iterator[Engine]:
    path = random_gguf("F32", context=512)
    with pystaged.load(path, policy=FixedPolicy(2, 3, 6), recycle=False, report=lambda _: None) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with live(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def nothing_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a request was resolved")

    monkeypatch.setattr("pystaged.loading.names.resolve", refuse)
