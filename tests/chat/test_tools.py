"""Calls of tools in an answer, and what stays text."""

from __future__ import annotations

import json

import pytest

from pystaged.chat.tools import split_tool_calls
from pystaged.result import GenerationResult
from pystaged.stats import GenerationStats

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'


def call(number: int, name: str, arguments: object) -> dict[str, object]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def test_calls_are_those_of_openai() -> None:
    expected = call(0, "weather", {"city": "Köln", "days": 2})
    assert split_tool_calls(WEATHER) == ("", [expected])
    text = f'I will look.\n{WEATHER}\n<tool_call>{{"name":"time"}}</tool_call> '
    assert split_tool_calls(text) == ("I will look.", [expected, call(1, "time", {})])


@pytest.mark.parametrize(
    "arguments", [{"text": "</tool_call>"}, {"text": "}\n</tool_call>{"}, {"text": "<tool_call>"}, {"a": [{"b": "\\"}]}]
)
def test_what_looks_like_an_end_within_a_string_is_none(arguments: dict[str, object]) -> None:
    text = f"<tool_call>{json.dumps({'name': 'say', 'arguments': arguments})}</tool_call>"
    assert split_tool_calls(text) == ("", [call(0, "say", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " no calls ",
        "<tool_call>",
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": "cut", "arguments": {}}',
        '<tool_call>{"name": "cut", "arguments": {}',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "say", "arguments": "no object"}</tool_call>',
        '<tool_call>["say"]</tool_call>',
        '<tool_call>{"name": "say", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "say", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "say", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "\\udfff", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "say"} and more</tool_call>',
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_what_is_malformed_stays_text(text: str) -> None:
    assert split_tool_calls(text) == (text, [])
    assert split_tool_calls(text + WEATHER)[0] == text.strip()
    assert len(split_tool_calls(text + WEATHER)[1]) == 1


def test_a_result_has_its_calls_and_its_message_the_text_as_it_was_written() -> None:
    result = GenerationResult(WEATHER, [1, 2], "stop", 0, GenerationStats(), [], [])
    assert result.tool_calls == [call(0, "weather", {"city": "Köln", "days": 2})]
    assert result.message == {"role": "assistant", "content": WEATHER, "tokens": [1, 2]}
