"""/completion, and what llama-server's own tests of determinism ask for, the one it skips as failing included."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.server import Server

from pystaged.engine import Engine

PATH = "/completion"
PROMPT = "I believe the meaning of life is"


def complete(server: Server, **options: Any) -> Any:
    status, body = server.ask(PATH, {"prompt": PROMPT, "n_predict": 24} | options)
    assert status == 200, body
    return body


def test_a_text(server: Server, engine: Engine) -> None:
    body = complete(server, temperature=0, return_tokens=True, n_probs=3)
    result = engine.generate(PROMPT, max_tokens=24, logprobs=3)
    assert (body["content"], body["tokens"]) == (result.text, result.tokens)
    assert (body["stop"], body["stop_type"], body["truncated"]) == (True, "limit", False)
    assert body["generation_settings"]["n_predict"] == 24
    assert body["has_new_line"] is ("\n" in result.text)
    assert result.logprobs is not None
    found = body["completion_probabilities"]
    assert [each["id"] for each in found] == result.tokens
    assert [each["logprob"] for each in found] == [each.logprob for each in result.logprobs]
    assert all(len(each["top_logprobs"]) == 3 for each in found)
    assert complete(server, temperature=0)["tokens"] == []


def test_why_a_text_ended(server: Server) -> None:
    text = complete(server, temperature=0)["content"]
    assert complete(server, temperature=0, stop=[text[4:6]])["stop_type"] == "word"
    assert complete(server, grammar='root ::= "ab"')["stop_type"] == "eos"


def test_parts_are_the_whole(server: Server) -> None:
    response = server.send("POST", PATH, {"prompt": PROMPT, "n_predict": 24, "seed": 3, "stream": True})
    data = response.read().decode()
    assert "[DONE]" not in data
    *parts, last = [json.loads(part.removeprefix("data: ")) for part in data.split("\n\n") if part.startswith("data")]
    whole = complete(server, seed=3, return_tokens=True)
    assert "".join(part["content"] for part in [*parts, last]) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert last["stop"] is True
    assert last["timings"]["predicted_n"] == 24


def test_several_prompts(server: Server, engine: Engine) -> None:
    ids = engine.encode(PROMPT).tolist()
    first, second = complete(server, prompt=[PROMPT, ids], temperature=0)
    assert first["content"] == second["content"]


@pytest.mark.parametrize("name", ["n", "n_cmpl"])
def test_several_texts(server: Server, name: str) -> None:
    texts = [each["content"] for each in complete(server, seed=3, **{name: 2})]
    assert texts == [complete(server, seed=seed)["content"] for seed in (3, 4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cache_vs_nocache_prompt(server: Server, temperature: float) -> None:
    """llama-server skips its own: "This test fails on linux, need to be fixed"."""
    options = {"seed": 42, "temperature": temperature}
    cold = complete(server, cache_prompt=False, **options)
    warm = [complete(server, cache_prompt=True, **options) for _ in range(2)]
    assert warm[1]["tokens_cached"] > cold["tokens_cached"] == 0
    assert {each["content"] for each in [cold, *warm]} == {cold["content"]}
