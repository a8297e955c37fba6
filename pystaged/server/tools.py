"""Tools in the Hermes form: their description in the prompt, the grammar of calls, and parsing of calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pystaged.chat.format import ChatFormat
from pystaged.chat.tools import split_tool_calls
from pystaged.server.answer_types import Call
from pystaged.server.errors import ApiError
from pystaged.server.request_types import ChatRequest, Tool, ToolChoice

_BEGIN = "<tool_call>"
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes it
# The words of Qwen's templates, for templates that do not support tools.
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def offered(request: ChatRequest) -> list[Tool]:
    """The tools that the model may call. Raises ApiError for an invalid tool_choice."""
    tools = [] if request.tool_choice == "none" else request.tools or []
    if request.tool_choice not in (None, "none", "auto") and not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(request.tool_choice, ToolChoice):
        name = request.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise ApiError(400, f"tool_choice names {name!r}, which is not one of the tools", param="tool_choice")
    return tools


def told(request: ChatRequest) -> list[dict[str, Any]]:
    """Messages for templates: call arguments are parsed, and clients' "tokens", which could be forged, are dropped."""
    messages = [message.model_dump(exclude_none=True, exclude={"tokens"}) for message in request.messages]
    for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return messages


def grammar(request: ChatRequest, tools: Sequence[Tool]) -> str | None:
    """The grammar of an answer that must be a call; None if it need not be one."""
    if request.tool_choice in (None, "none", "auto"):
        return None
    rules, names = [], []
    for i, tool in enumerate(tools):
        schema = tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
        head = json.dumps(f'<tool_call>\n{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        tail = json.dumps("}\n</tool_call>")
        schema = schema | {"x-guidance": _STYLE}
        rules.append(f"call_{i}: {head} arguments_{i} {tail}\narguments_{i}: %json {json.dumps(schema)}\n")
        names.append(f"call_{i}")
    several = request.tool_choice == "required" and request.parallel_tool_calls is not False
    more = ' ("\\n" call)*' if several else ""
    return "".join([f"start: call{more}\n", f"call: {' | '.join(names)}\n", *rules])


def messages_with(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adapt messages to a template without tool support: the system message describes the tools, answers contain their
    calls, and the user's messages contain the results."""
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if message["role"] == "tool":
            found.append({"role": "user", "content": f"<tool_response>\n{_text(content)}\n</tool_response>"})
            continue
        calls = [_spelled(call) for call in message.get("tool_calls") or []]
        if calls:
            content = "\n".join([*([_text(content)] if content else []), *calls])
        found.append({key: value for key, value in message.items() if key != "tool_calls"} | {"content": content})
    if tools:
        described = _SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if found[0]["role"] == "system":
            found[0] = found[0] | {"content": f"{_text(found[0]['content'])}\n\n{described}"}
        else:
            found.insert(0, {"role": "system", "content": described})
    return found


def has_calls(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether a conversation contains tool calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def knows_tools(chat_format: ChatFormat) -> bool:
    """Whether a model's chat template supports tools."""
    return "tool_use" in chat_format.names or "tools" in chat_format.variables()


class CallReader:
    """Splits an answer into text and calls while it is generated.

    Text is passed on at once, except white space that a call may follow; from the first call on, everything is
    kept until the end.

    Args:
        key: part of the calls' ids.
        reads: whether to look for calls at all.
    """

    def __init__(self, key: str, reads: bool) -> None:
        self._key, self._reads = key, reads
        self._held = ""

    def push(self, text: str) -> str:
        """Add to the answer; returns what is certainly text."""
        if not self._reads:
            return text
        self._held += text
        begin = self._held.find(_BEGIN)
        if begin < 0:
            begin = max(len(self._held) - len(_BEGIN) + 1, 0)
            while not _BEGIN.startswith(self._held[begin:]):
                begin += 1
        words = self._held[:begin].rstrip()
        self._held = self._held[len(words) :]
        return words

    def finish(self) -> tuple[str, list[Call]]:
        """The remaining text, and the calls."""
        words, found = split_tool_calls(self._held)
        self._held = ""
        calls: list[Call] = []
        for i, call in enumerate(found):
            function = call["function"]
            calls.append({"id": f"call_{self._key}_{i}", "type": "function", "function": function})
        return words, calls


def _spelled(call: dict[str, Any]) -> str:
    function = call["function"]
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content)
    return str(content or "")
