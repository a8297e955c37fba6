"""Parse tool calls in answers."""

from __future__ import annotations

import json
from typing import Any

_BEGIN, _END = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


def split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into text and tool calls of the Hermes form, which Qwen, SmolLM3 and Granite write:
    <tool_call>{"name": ..., "arguments": {...}}</tool_call>. A malformed or incomplete call stays text.

    Returns:
        The text without white space around it, and the calls in OpenAI's form, with arguments as JSON text.
    """
    calls: list[dict[str, Any]] = []
    rest, at = "", 0
    while (begin := text.find(_BEGIN, at)) >= 0:
        found = _call(text, begin + len(_BEGIN))
        rest += text[at:begin]
        if found is None:
            rest, at = rest + _BEGIN, begin + len(_BEGIN)
            continue
        function, at = found
        calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
    return (rest + text[at:]).strip() if calls else text, calls


def _call(text: str, begin: int) -> tuple[dict[str, str], int] | None:
    """The name and arguments of the call at an offset, and the offset after it; None if there is no valid call."""
    try:
        call, end = _DECODER.raw_decode(text, begin + _space(text, begin))
    except (ValueError, RecursionError):
        return None
    end += _space(text, end)
    if not isinstance(call, dict) or not text.startswith(_END, end):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()
    except ValueError:  # Python reads what JSON lacks: infinity, lone surrogates
        return None
    return {"name": name, "arguments": written}, end + len(_END)


def _space(text: str, begin: int) -> int:
    """Number of white space characters at an offset."""
    end = begin
    while end < len(text) and text[end] in " \t\r\n":
        end += 1
    return end - begin
