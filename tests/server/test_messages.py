"""/v1/messages, as Anthropic's client reads it."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from support.scheduling import is_idle, wait_until
from support.server import NAME, live

from pystaged.engine import Engine
from pystaged.sampling.definitions import GrammarError

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"model": NAME, "max_tokens": 12, "extra_body": {"temperature": 0}}


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_a_whole_answer(claude: anthropic.Anthropic, engine: Engine) -> None:
    found = claude.messages.create(messages=MESSAGES, **GREEDY)
    expected = engine.chat(MESSAGES, max_tokens=12)
    assert text_of(found) == expected.text
    assert (found.type, found.role, found.model, found.stop_reason) == ("message", "assistant", NAME, "max_tokens")
    assert found.id.startswith("msg_")
    usage = found.usage
    assert (usage.input_tokens + (usage.cache_read_input_tokens or 0)) == expected.stats.prompt_tokens
    assert usage.output_tokens == 12


def test_parts_and_the_system(claude: anthropic.Anthropic, engine: Engine) -> None:
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on"},
    ]
    system: Any = [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}]
    plain = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}, *turns[1:]]
    found = claude.messages.create(messages=turns, system=system, **GREEDY)
    expected = engine.chat(plain, max_tokens=12)
    assert text_of(found) == expected.text
    counted = claude.messages.count_tokens(messages=turns, system=system, model=NAME)
    assert counted.input_tokens == expected.stats.prompt_tokens


def test_claude_codes_billing_header_is_no_part_of_the_prompt(claude: anthropic.Anthropic, engine: Engine) -> None:
    header = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"
    plain = claude.messages.count_tokens(messages=MESSAGES, system="Be brief", model=NAME).input_tokens
    blocks: Any = [{"type": "text", "text": header}, {"type": "text", "text": "Be brief"}]
    for system in (blocks, f"{header}\nBe brief"):
        assert claude.messages.count_tokens(messages=MESSAGES, system=system, model=NAME).input_tokens == plain
    alone: Any = blocks[:1]
    nothing = claude.messages.count_tokens(messages=MESSAGES, model=NAME).input_tokens
    assert claude.messages.count_tokens(messages=MESSAGES, system=alone, model=NAME).input_tokens == nothing
    with live(engine, billing_header=True) as server, anthropic.Anthropic(base_url=server.url, api_key="none") as other:
        assert other.messages.count_tokens(messages=MESSAGES, system=blocks, model=NAME).input_tokens > plain


def test_errors_are_the_clients_own(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as found:
        claude.messages.create(messages=[{"role": "user", "content": "a" * 999}], **GREEDY)
    body: Any = found.value.body
    assert (body["type"], body["error"]["code"]) == ("error", "context_length_exceeded")
    assert "prompt is too long: " in body["error"]["message"]
    tool: Any = {"name": "f", "input_schema": {"type": "object"}}
    for options in (
        {"tools": [tool | {"name": "a b"}]},
        {"tools": [tool], "tool_choice": {"type": "tool", "name": "g"}},
        {"extra_body": {"mcp_servers": [{"name": "x"}]}},
    ):
        name = "mcp_servers" if "extra_body" in options else [*options][-1]
        with pytest.raises(anthropic.BadRequestError, match=name):
            claude.messages.create(messages=MESSAGES, **GREEDY | options)
    called: Any = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]
    for turns in ([], [*MESSAGES, {"role": "assistant", "content": called}], [{"role": "system", "content": "a"}]):
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            claude.messages.create(messages=turns, **GREEDY)


def test_a_failure_in_the_middle(claude: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    def fail(*_: object) -> Any:
        raise GrammarError("it broke")

    monkeypatch.setattr("pystaged.server.messages.MessageAnswer.parts", fail)
    with (
        claude.messages.stream(messages=MESSAGES, **GREEDY) as stream,
        pytest.raises(anthropic.APIError, match="broke"),
    ):
        stream.get_final_message()
    wait_until(lambda: is_idle(engine))
