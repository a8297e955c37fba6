"""/v1/completions: the engine's own texts, and log-probabilities as evaluations read them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from support.server import NAME, Server

from pystaged.engine import Engine
from pystaged.server.errors import too_long

PATH = "/v1/completions"
PROMPT = "the tree then "


def complete(server: Server, prompt: Any = PROMPT, **options: Any) -> Any:
    status, body = server.ask(PATH, {"prompt": prompt, "max_tokens": 8, "temperature": 0} | options)
    assert status == 200, body
    return body


def texts(body: Any) -> list[str]:
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return [choice["text"] for choice in body["choices"]]


def test_every_form_of_a_prompt_gives_the_engines_texts(server: Server, engine: Engine) -> None:
    ids = engine.encode(PROMPT).tolist()
    other = engine.encode("another").tolist()
    expected = [engine.generate(prompt, max_tokens=8).text for prompt in (PROMPT, "another")]
    assert texts(complete(server)) == expected[:1]
    assert texts(complete(server, ids)) == expected[:1]
    assert texts(complete(server, [PROMPT, "another"])) == expected
    assert texts(complete(server, [ids, other])) == expected


def test_openais_client(client: openai.OpenAI, engine: Engine) -> None:
    asked: Any = {"model": NAME, "prompt": "the tree", "temperature": 0, "max_tokens": 12}
    found = client.completions.create(echo=True, logprobs=2, **asked)
    assert found.choices[0].text == "the tree" + engine.generate("the tree", max_tokens=12).text
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert found.usage is not None
    assert len(logprobs.tokens) == found.usage.total_tokens
    parts = list(client.completions.create(stream=True, **asked))
    assert "the tree" + "".join(part.choices[0].text for part in parts) == found.choices[0].text


def test_sampling_is_the_engines(server: Server, engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "seed": 7}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repeat_penalty": 1.1}
    body = complete(server, n=3, **options)
    expected = engine.generate(PROMPT, n=3, max_tokens=8, **options)
    assert texts(body) == [each.text for each in expected]
    assert body["seed"] == 7


def test_a_drawn_seed_is_told_and_gives_the_text_again(server: Server) -> None:
    first = complete(server, temperature=1, max_tokens=24)
    assert texts(complete(server, temperature=1, max_tokens=24, seed=first["seed"])) == texts(first)
    assert complete(server, temperature=1)["seed"] != first["seed"]
    assert complete(server, temperature=1, seed=-1)["seed"] != first["seed"]


def test_usage_and_timings(server: Server, engine: Engine) -> None:
    body = complete(server, ["a new one", PROMPT], n=2)
    prompt = sum(len(engine.encode(each)) for each in ("a new one", PROMPT))
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == 4 * 8
    assert body["usage"]["total_tokens"] == prompt + 32
    timings = body["timings"]
    assert timings["predicted_n"] == 32
    assert timings["cache_n"] + timings["prompt_n"] == 2 * prompt
    assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"]
    assert complete(server)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert complete(server, cache_prompt=False)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_rest_of_an_answer(server: Server) -> None:
    body = complete(server)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == NAME
    assert body["system_fingerprint"].startswith("b")
    assert complete(server)["system_fingerprint"] == body["system_fingerprint"]
    assert body["choices"][0]["finish_reason"] == "length"


def test_stop_strings(server: Server) -> None:
    text = texts(complete(server, max_tokens=48))[0]
    stop = text[20:22]
    for given in (stop, [stop, "never there"]):
        body = complete(server, max_tokens=48, stop=given)
        assert texts(body) == [text[: text.index(stop)]]
        assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 3, "temperature": 1, "seed": 5}, {"echo": True}, {"logprobs": 2, "echo": True}, {"echo": True, "n": 2}],
)
def test_parts_are_the_whole(server: Server, options: dict[str, Any]) -> None:
    whole = complete(server, max_tokens=12, **options)
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream_options": {"include_usage": True}}
    *events, last = server.events(PATH, body | options)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["timings"]["predicted_n"] == whole["timings"]["predicted_n"]
    assert all(event["usage"] is None for event in events)
    assert len({event["id"] for event in events}) == 1
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        if choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                assert [each for part in parts if part["logprobs"] for each in part["logprobs"][name]] == values


def test_echoed_scores_are_the_engines(server: Server, engine: Engine) -> None:
    """As evaluations ask for them; a batch and one at a time give the same bits."""
    prompts = [PROMPT * 9, "a", "0123456789" * 12, "zwölf Bäume"]
    options: dict[str, Any] = {"echo": True, "max_tokens": 1, "logprobs": 3}
    batch = complete(server, [engine.encode(each).tolist() for each in prompts], **options)["choices"]
    for prompt, choice in zip(prompts, batch, strict=True):
        single = complete(server, prompt, **options)["choices"][0]
        assert single["text"] == choice["text"]
        assert single["text"].startswith(prompt)
        found = choice["logprobs"]
        assert found == single["logprobs"]
        score = engine.score(prompt)
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(score.logprobs[1:], abs=2e-6)
        assert sum(found["token_logprobs"][1:-1]) == pytest.approx(score.total, rel=1e-6)
        for name, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
            assert name in top
            assert len(top) in (3, 4)
        # Greedy is told by equality.
        assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())


def test_offsets_count_characters(server: Server, engine: Engine) -> None:
    prompt = "zwölf €"
    choice = complete(server, prompt, echo=True, max_tokens=1, logprobs=0)["choices"][0]
    found, tokens = choice["logprobs"], engine.encode(prompt).tolist()
    assert len(found["text_offset"]) == len(tokens) + 1
    for i in range(len(tokens)):
        before = b"".join(engine.tokenizer.token_bytes(token) for token in tokens[:i])
        assert found["text_offset"][i] == len(before.decode("utf-8", "ignore"))
    assert found["text_offset"][-1] == len(prompt)
    assert any(name.startswith("bytes:\\x") for name in found["tokens"])


def test_only_an_echo(server: Server, engine: Engine) -> None:
    body = complete(server, echo=True, max_tokens=0, logprobs=1)
    choice = body["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(engine.encode(PROMPT))
    assert body["usage"]["completion_tokens"] == 0
    events = server.events(PATH, {"prompt": "x", "echo": True, "max_tokens": 0})
    first, last = (event["choices"][0] for event in events)
    assert (first["text"], last["text"], last["finish_reason"]) == ("x", "", "length")


def test_a_biased_and_a_formed_text(server: Server, engine: Engine) -> None:
    token = engine.generate(PROMPT, max_tokens=1).tokens[0]
    for bias in ({str(token): -100}, [[token, False]]):
        body = complete(server, logit_bias=bias, max_tokens=4, pystaged=True)
        assert token not in body["choices"][0]["token_ids"]
    first, second = engine.generate(PROMPT, max_tokens=8).tokens[0], engine.encode("o", add_special=False)[0]
    spelled = engine.tokenizer.decode([second])
    body = complete(server, logit_bias=[[spelled + spelled, -100]], max_tokens=8, pystaged=True)
    ids = body["choices"][0]["token_ids"]
    assert first in ids
    assert second not in ids
    assert texts(complete(server, grammar='root ::= "a"{5,5}', max_tokens=9)) == ["aaaaa"]
    assert texts(complete(server, json_schema={"const": "42"}, max_tokens=9)) == ['"42"']


def test_who_proposed_what(server: Server) -> None:
    body = complete(server, "abcabcabcabc", max_tokens=16, pystaged=True)
    choice = body["choices"][0]
    assert "".join(text for text, _ in choice["pystaged"]["pieces"]) == choice["text"]
    events = server.events(PATH, {"prompt": "abcabcabcabc", "max_tokens": 16, "temperature": 0, "pystaged": True})
    ours = [event["choices"][0]["pystaged"] for event in events if "pystaged" in event["choices"][0]]
    assert "".join(text for each in ours for text, _ in each["pieces"]) == choice["text"]
    for each in ours:
        tree = each["tree"]
        assert tree[0]["parent"] == -1
        assert all(node["parent"] < i for i, node in enumerate(tree))
        assert all(tree[node["parent"]]["accepted"] for node in tree[1:] if node["accepted"])


def test_harmless_options_are_ignored(server: Server) -> None:
    harmless: dict[str, Any] = {"user": "me", "metadata": {"a": "b"}, "store": True, "suffix": None, "stop": None}
    harmless |= {"dynatemp_range": 0.0, "top_n_sigma": -1, "t_max_predict_ms": 0, "allowed_token_ids": []}
    harmless |= {"lora": [], "best_of": 1, "service_tier": "auto", "something": {"new": 1}}
    assert texts(complete(server, **harmless)) == texts(complete(server))


def test_a_prompt_that_is_too_long(server: Server, engine: Engine) -> None:
    for prompt in ("a" * 600, [5] * 600):
        status, body = server.ask(PATH, {"prompt": prompt})
        assert status == 400
        error = body["error"]
        assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, engine.n_ctx)
        assert "maximum context length is 512 tokens" in error["message"]
        assert "--n-ctx" not in error["message"]  # the model's own context is no longer
    assert "with a longer context (--n-ctx)" in too_long(600, 512, 513, "prompt").body["error"]["message"]


def test_a_text_ends_with_the_context(server: Server, engine: Engine) -> None:
    body = complete(server, "a" * 500, max_tokens=-1)
    assert body["usage"]["total_tokens"] == engine.n_ctx + 1  # the last one needs no place
    assert np.isfinite(body["timings"]["predicted_per_second"])


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_the_progress_of_a_prompt(server: Server, path: str) -> None:
    """As llama-server tells it: of all tokens, those that were there and those that are read by now."""
    prompt = [len(path)] + [(7 * i) % 251 for i in range(300)]
    told = []
    for more in ([], [1, 2, 3]):
        body = {"prompt": prompt + more, "max_tokens": 2, "temperature": 0, "stream": True, "return_progress": True}
        body["cache_prompt"] = bool(more)  # other tests' texts may begin alike
        lines = server.send("POST", path, body).read().decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        told.append([event["prompt_progress"] for event in events if "prompt_progress" in event])
        assert all("prompt_progress" in event for event in events[: len(told[-1])])  # before any text
    cold, warm = told
    assert {(each["total"], each["cache"]) for each in cold} == {(301, 0)}
    assert [each["processed"] for each in cold] == [0, 256, 301]
    times = [each["time_ms"] for each in cold]
    assert times == sorted(times)
    assert {(each["total"], each["cache"]) for each in warm} == {(304, 301)}
    assert [each["processed"] for each in warm] == [301, 304]
    assert "prompt_progress" not in str(server.ask(path, body | {"stream": False}))
