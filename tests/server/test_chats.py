"""/v1/chat/completions: the engine's own answers, forms, tools and what users say will come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat import write_chat
from support.server import Server, live

import pystaged
from pystaged.decoding.policy import FixedPolicy
from pystaged.engine import Engine

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }}{{ call.function.arguments | tojson }}]{% endfor %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
PLACE, DAYS = {"enum": ["Rome", "Oslo"]}, {"type": "integer", "minimum": 1, "maximum": 9}
FORM = {"type": "object", "properties": {"place": PLACE, "days": DAYS}, "required": ["place", "days"]}
FORM |= {"additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": FORM}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model with a chat template that knows tools."""
    marks = ["<|im_start|>", "<|im_end|>"]
    path = write_chat(tmp_path_factory.mktemp("chats") / "chat.gguf", TEMPLATE, marks, context=2048)
    with pystaged.load(path, policy=FixedPolicy(2, 3, 6), recycle=False, report=lambda _: None) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(random_gguf: Callable[..., Path]) -> Iterator[Server]:
    """A model without a template."""
    path = random_gguf("F32", context=2048)
    policy = FixedPolicy(2, 3, 6)
    with pystaged.load(path, policy=policy, recycle=False, report=lambda _: None) as engine, live(engine) as server:
        yield server


def chat(server: Server, messages: Any = MESSAGES, **options: Any) -> Any:
    status, body = server.ask(PATH, {"messages": messages, "max_tokens": 8, "temperature": 0} | options)
    assert status == 200, body
    return body


def content(body: Any) -> str:
    text: str = body["choices"][0]["message"]["content"]
    return text


def test_an_answer_is_the_engines(server: Server, engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 24}
    body = chat(server, **options)
    result = engine.chat(MESSAGES, **options)
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": result.text, "refusal": None, "annotations": []}
    assert choice["finish_reason"] == result.finish_reason
    assert choice["logprobs"] is None
    assert body["usage"]["prompt_tokens"] == result.stats.prompt_tokens
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"


def test_max_completion_tokens_beats_max_tokens(server: Server) -> None:
    assert chat(server, max_tokens=9, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1, "seed": 4}, {"logprobs": True, "top_logprobs": 2}])
def test_parts_are_the_whole(server: Server, options: dict[str, Any]) -> None:
    whole = chat(server, max_tokens=12, **options)
    events = server.events(PATH, {"messages": MESSAGES, "max_tokens": 12, "temperature": 0} | options)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        first, *parts, last = (e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"])
        assert first["delta"] == {"role": "assistant", "content": None}
        assert all("role" not in part["delta"] and part["delta"].get("content") != "" for part in parts)
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert (last["delta"], last["finish_reason"]) == ({}, choice["finish_reason"])
        if choice["logprobs"]:
            found = [each for part in parts for each in part["logprobs"]["content"]]
            assert found == choice["logprobs"]["content"]
    assert "timings" in events[-1]


def test_usage_in_streams(server: Server) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "timings_per_token": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    first, *parts, last = server.events(PATH, body)
    assert "timings" not in first
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert all("timings" in part for part in [*parts, last])


def test_logprobs(server: Server, engine: Engine) -> None:
    found = chat(server, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]
    result = engine.chat(MESSAGES, max_tokens=8, logprobs=3)
    assert result.logprobs is not None
    assert found["refusal"] is None
    assert [each["logprob"] for each in found["content"]] == [each.logprob for each in result.logprobs]
    for each in found["content"]:
        assert bytes(each["bytes"]).decode("utf-8", "replace") == each["token"]
        best = [top["logprob"] for top in each["top_logprobs"]]
        assert best == sorted(best, reverse=True)
        assert len(best) == 3
    assert chat(server, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_answers_of_a_form(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    forms: list[dict[str, Any]] = [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        {"type": "json_object", "schema": schema},
    ]
    for form in forms:
        body = chat(server, response_format=form, max_tokens=64)
        assert json.loads(content(body)) in ({"a": 1}, {"a": 2})
        assert body["choices"][0]["finish_reason"] == "stop"
    assert content(chat(server, response_format={"type": "json_object"}, max_tokens=2))[0] == "{"
    assert content(chat(server, response_format={"type": "text"})) == content(chat(server))


def test_a_prediction_changes_nothing_but_steps(server: Server) -> None:
    options: dict[str, Any] = {"temperature": 1, "seed": 2, "max_tokens": 48}
    plain = chat(server, **options)
    said = [{"type": "text", "text": content(plain)}]
    body = chat(server, prediction={"type": "content", "content": said}, **options)
    assert content(body) == content(plain)
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0
    assert "completion_tokens_details" not in plain["usage"]


def arguments(call: dict[str, Any]) -> Any:
    assert call["type"] == "function"
    return json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("has_template", [True, False])
def test_a_call_that_must_be(request: pytest.FixtureRequest, choice: Any, has_template: bool) -> None:
    server: Server = request.getfixturevalue("server" if has_template else "plain")
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    body = chat(server, max_tokens=200, **options)
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert arguments(call)["place"] in ("Rome", "Oslo")
    events = server.events(PATH, {"messages": MESSAGES, "max_tokens": 200, "temperature": 0} | options)
    first, *more = (
        each["choices"][0]["delta"]["tool_calls"][0] for each in events if "tool_calls" in each["choices"][0]["delta"]
    )
    assert (first["index"], first["type"], first["function"]) == (0, "function", {"name": "weather", "arguments": ""})
    assert len(more) > 1
    assert all(each.keys() == {"index", "function"} for each in more)
    assert "".join(each["function"]["arguments"] for each in more) == call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_which_tools_there_are(server: Server) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    body = chat(server, tools=[WEATHER, CLOCK], tool_choice=named, max_tokens=100)
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], arguments(call)) == ("clock", {})
    without = content(chat(server))
    assert content(chat(server, tools=[WEATHER], tool_choice="none")) == without
    assert content(chat(server, tools=[{"type": "retrieval"}, {"type": "custom", "custom": {}}])) == without
    assert content(chat(server, tools=[WEATHER])) != without  # the model has read of them


@pytest.mark.parametrize("has_template", [True, False])
def test_a_conversation_with_calls(request: pytest.FixtureRequest, has_template: bool) -> None:
    server: Server = request.getfixturevalue("server" if has_template else "plain")
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert chat(server, messages, tools=[WEATHER])["usage"]["prompt_tokens"] > chat(server)["usage"]["prompt_tokens"]


def test_tools_after_an_empty_message_of_the_system(plain: Server) -> None:
    systems = [{"role": "system"}, {"role": "system", "content": ""}]
    found, expected = (content(chat(plain, [system, MESSAGES[1]], tools=[WEATHER])) for system in systems)
    assert found == expected


def test_tokens_of_a_request_are_not_believed(server: Server, engine: Engine) -> None:
    mark = engine.tokenizer.encode("<|im_end|>", add_special=False).tolist()
    said = {"role": "assistant", "content": "<|im_end|>"}
    bodies = [chat(server, [*MESSAGES, turn, MESSAGES[1]], max_tokens=1) for turn in (said, said | {"tokens": mark})]
    assert len({body["usage"]["prompt_tokens"] for body in bodies}) == 1


def test_a_conversation_that_is_too_long(server: Server, engine: Engine) -> None:
    for stream in (False, True):
        status, body = server.ask(PATH, {"messages": MESSAGES * 200, "stream": stream})
        assert status == 400
        assert body["error"]["type"] == "exceed_context_size_error"
        assert body["error"]["n_prompt_tokens"] > body["error"]["n_ctx"] == engine.n_ctx


def test_the_progress_of_a_prompt(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 3, "temperature": 0}
    plain, events = server.events(PATH, body), server.events(PATH, body | {"return_progress": True})
    told = [event.pop("prompt_progress") for event in events if "prompt_progress" in event]
    assert told
    assert told[-1]["processed"] == told[-1]["total"] > told[-1]["cache"] > 0
    assert all(event["choices"][0]["delta"] == {} for event in events[: len(told)])
    assert [event["choices"] for event in events[len(told) :]] == [event["choices"] for event in plain]
    # Interfaces that have no such event leave it out.
    asked = {"input": "a", "stream": True, "return_progress": True, "max_output_tokens": 2}
    assert b"prompt_progress" not in server.send("POST", "/v1/responses", asked).read()
