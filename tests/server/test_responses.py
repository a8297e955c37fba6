"""/v1/responses, as OpenAI's client reads it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from support.server import NAME, Server

from pystaged.engine import Engine
from pystaged.sampling.definitions import GrammarError

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"model": NAME, "temperature": 0, "max_output_tokens": 12}


def test_a_whole_answer(client: openai.OpenAI, engine: Engine) -> None:
    expected = engine.chat(MESSAGES, max_tokens=12)
    for asked in ("Hello", MESSAGES):
        found = client.responses.create(input=asked, metadata={"a": "b"}, **GREEDY)
        assert found.output_text == expected.text
        assert (found.status, found.error, found.model, found.metadata) == ("incomplete", None, NAME, {"a": "b"})
        assert found.incomplete_details is not None
        assert found.incomplete_details.reason == "max_output_tokens"
        usage = found.usage
        assert usage is not None
        tokens = (expected.stats.prompt_tokens, 12)
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (*tokens, sum(tokens))


def test_a_stream(client: openai.OpenAI) -> None:
    more = {"grammar": 'root ::= "Hello there"'}
    with client.responses.stream(input="Hello", extra_body=more, **GREEDY) as stream:
        events = list(stream)
        found = stream.get_final_response()
    assert found.output_text == "Hello there"
    assert found.status == "completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello there"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[:4] == [f"response.{name}" for name in begin]
    assert kinds[-4:] == [f"response.{name}" for name in end]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    *_, last = client.responses.create(input="Hello", stream=True, **GREEDY)
    assert last.type == "response.incomplete"


def test_parts_instructions_and_earlier_answers(client: openai.OpenAI, engine: Engine) -> None:
    asked: Any = [
        {"role": "developer", "content": "Be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
        {"role": "user", "content": "Go on"},
    ]
    found = client.responses.create(input=asked[1:], instructions="Be brief", **GREEDY)
    assert found.output_text == client.responses.create(input=asked, **GREEDY).output_text
    # Templates may allow one message of the system, at the beginning.
    apart = client.responses.create(input=asked, instructions="You are kind.", **GREEDY)
    assert (
        apart.output_text
        == client.responses.create(input=asked[1:], instructions="You are kind.\n\nBe brief", **GREEDY).output_text
    )
    plain = [("system", "Be brief"), ("user", "Hello"), ("assistant", "Yes?"), ("user", "Go on")]
    expected = engine.chat([{"role": role, "content": content} for role, content in plain], max_tokens=12)
    assert found.output_text == expected.text


def test_a_failure_in_the_middle(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    def fail(*_: object) -> Any:
        raise GrammarError("it broke")

    monkeypatch.setattr("pystaged.server.responses.ResponseAnswer.parts", fail)
    with pytest.raises(openai.APIError, match="broke"):
        list(client.responses.create(input="a", stream=True, **GREEDY))
    body = {"input": "a", "stream": True, "max_output_tokens": 2}
    *_, last = server.send("POST", "/v1/responses", body).read().decode().strip().split("\n\n")
    name, data = last.split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert (name, told["type"], told["message"], told["sequence_number"]) == ("event: error", "error", "it broke", 2)
