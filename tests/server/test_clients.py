"""Public clients, each with its own types."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from support.server import NAME

from pystaged.engine import Engine

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"model": NAME, "temperature": 0, "max_tokens": 12}


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "pystaged")
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_completions(client: openai.OpenAI, engine: Engine) -> None:
    found = client.completions.create(prompt="the tree", echo=True, logprobs=2, **GREEDY)
    assert found.choices[0].text == "the tree" + engine.generate("the tree", max_tokens=12).text
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert found.usage is not None
    assert len(logprobs.tokens) == found.usage.total_tokens
    parts = list(client.completions.create(prompt="the tree", stream=True, **GREEDY))
    assert "the tree" + "".join(part.choices[0].text for part in parts) == found.choices[0].text


def test_chats(client: openai.OpenAI, engine: Engine) -> None:
    found = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    assert found.choices[0].message.content == engine.chat(MESSAGES, max_tokens=12).text
    assert found.choices[0].logprobs is not None
    parts = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == found.choices[0].message.content
    usage = parts[-1].usage
    assert usage is not None
    assert found.usage is not None
    assert usage.completion_tokens == found.usage.completion_tokens == 12


def test_accumulated_streams(client: openai.OpenAI) -> None:
    more = {"pystaged": True, "grammar": 'root ::= "Hello there"'}
    with client.chat.completions.stream(messages=MESSAGES, extra_body=more, logprobs=True, **GREEDY) as stream:
        for _ in stream:
            pass
        found = stream.get_final_completion()
    assert found.choices[0].message.content == "Hello there"
    assert found.choices[0].finish_reason == "stop"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(prompt="a" * 999, model=NAME)
    assert (found.value.code, found.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="a")
