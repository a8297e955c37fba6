"""Tools and reasoning of chat requests: what the model is told of them, and how its answer is limited and read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pystaged.chat.calls import HERMES, CallForm
from pystaged.chat.format import ChatFormat
from pystaged.chat.marked import join, mark
from pystaged.chat.turn import Dialect, TurnReader
from pystaged.server.errors import ApiError
from pystaged.server.request_types import ChatRequest, Tool, ToolChoice
from pystaged.text import encode_continuation
from pystaged.thinking import Reasoning

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
_THINKS = ("enable_thinking", "thinking")  # names of the variable by which templates switch reasoning on or off


@dataclass(frozen=True)
class Manner:
    """How an answer is written and read.

    dialect: the model's. splits: whether reasoning is apart. is_open: whether the prompt ends inside of reasoning.
    schemas: of the arguments of the tools on offer; None for no tools.
    """

    dialect: Dialect
    splits: bool
    is_open: bool
    schemas: Mapping[str, Mapping[str, Any]] | None

    @property
    def spelled(self) -> frozenset[int]:
        """The control tokens that the reader needs."""
        thinking = self.dialect.thinking if self.splits else None
        marks = (*(self.dialect.form.marks if self.schemas is not None else ()), *(thinking.marks if thinking else ()))
        return frozenset(self.dialect.controls[mark] for mark in marks if mark in self.dialect.controls)

    def reader(self) -> TurnReader:
        """Reads one answer."""
        thinking = self.dialect.thinking if self.splits else None
        form = self.dialect.form if self.schemas is not None else None
        return TurnReader(thinking, self.is_open, form, self.schemas or {})


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


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]] | None:
    """The schemas of the tools' arguments; None for no tools."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools} or None


def told(request: ChatRequest, dialect: Dialect) -> list[dict[str, Any]]:
    """Messages for templates: call arguments are parsed, and clients' "tokens", which could be forged, are dropped."""
    messages = [message.model_dump(exclude_none=True, exclude={"tokens"}) for message in request.messages]
    for message in messages:
        if isinstance(message.get("reasoning"), str):  # the name in newer clients
            message.setdefault("reasoning_content", message["reasoning"])
        for function in (call["function"] for call in message.get("tool_calls", ())):
            with suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(function["arguments"] or "{}")
    if dialect.form.between is None:
        messages = _one_by_one(messages)
    if dialect.form.begins == ("[TOOL_CALLS]",):
        for call in (call for message in messages for call in [message, *message.get("tool_calls", ())]):
            for name in {"id", "tool_call_id"} & call.keys():
                call[name] = _nine(str(call[name]))
    return messages


def _one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with one call each, followed by its result, for templates that allow no more."""
    results = {each["tool_call_id"]: each for each in messages if "tool_call_id" in each}
    found: list[dict[str, Any]] = []
    moved: list[int] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        for i, call in enumerate(calls):
            found.append((message if i == 0 else {"role": message["role"]}) | {"tool_calls": [call]})
            if (result := results.pop(call.get("id"), None)) is not None:
                found.append(result)
                moved.append(id(result))
        if not calls and id(message) not in moved:
            found.append(message)
    return found


def _nine(key: str) -> str:
    """An id of nine letters and digits, as Mistral's templates want it."""
    return key if re.fullmatch("[a-zA-Z0-9]{9}", key) else hashlib.sha256(key.encode()).hexdigest()[:9]


def template_options(request: ChatRequest, chat_format: ChatFormat, think: bool | None, tools: bool) -> dict[str, Any]:
    """The variables for a template: the request's own, and those for reasoning that the template knows."""
    effort, known = request.reasoning_effort, _variables(chat_format, tools)
    found: dict[str, Any] = {name: think for name in _THINKS if think is not None and name in known}
    if effort not in (None, "none") and "reasoning_effort" in known:
        found["reasoning_effort"] = effort
    return found | (request.chat_template_kwargs or {})


def thinks_by_template(chat_format: ChatFormat, tools: bool) -> bool:
    """Whether a variable of the template switches reasoning on or off."""
    return not _variables(chat_format, tools).isdisjoint(_THINKS)


def _variables(chat_format: ChatFormat, tools: bool) -> set[str]:
    return chat_format.variables("tool_use" if tools and "tool_use" in chat_format.names else "default")


def reasoning(
    request: ChatRequest, manner: Manner, limit: int | None, tokenizer: Any, has_grammar: bool
) -> Reasoning | None:
    """How the answer reasons, if that needs a limit, or a grammar waits for its end.

    Args:
        limit: most tokens of reasoning if the request does not say, None for no limit.
    """
    thinking, asked = manner.dialect.thinking, request.reasoning_budget_tokens
    budget = limit if asked is None else asked if asked >= 0 else None
    if thinking is None or (budget is None and not (has_grammar and manner.is_open)):
        return None
    closing = encode_continuation(tokenizer, thinking.closing).tolist()
    return Reasoning(thinking.begin.encode(), thinking.end.encode(), tuple(closing), manner.is_open, budget)


def with_calls(messages: Sequence[dict[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """Messages whose content contains their calls, for templates that do not write these; the marks around all calls of
    a message become control tokens, as if the template had written them."""

    def content(message: dict[str, Any]) -> str:
        return join("\n", filter(None, (mark(_text(message.get("content"))), _spelled(message["tool_calls"], form))))

    return [
        {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content(message)}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def messages_with(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adapt messages to a template without tool support: the system message describes the tools, and the user's
    messages contain the results."""
    found = [
        {"role": "user", "content": f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"}
        if message["role"] == "tool"
        else message
        for message in messages
    ]
    if tools:
        described = _SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if found[0]["role"] == "system":
            found[0] = found[0] | {"content": f"{_text(found[0].get('content'))}\n\n{described}"}
        else:
            found.insert(0, {"role": "system", "content": described})
    return found


def has_calls(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether a conversation contains tool calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def knows_tools(chat_format: ChatFormat) -> bool:
    """Whether a model's chat template supports tools."""
    return "tool_use" in chat_format.names or "tools" in chat_format.variables()


def _spelled(calls: Sequence[dict[str, Any]], form: CallForm) -> str:
    """Calls in a form that writes JSON, or keywords as in Python; in the Hermes form for others."""
    form = form if form.style in ("json", "python") else HERMES
    words = []
    for function in (call["function"] for call in calls):
        head = form.head.format(name=function["name"], quoted=json.dumps(function["name"], ensure_ascii=False))
        arguments = function["arguments"]
        if form.style == "python" and isinstance(arguments, dict):
            written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        else:
            written = json.dumps(arguments, ensure_ascii=False)
        words.append(f"{head}{written}{form.tail.format()}")
    return join("", [form.opening, mark((form.between or "").join(words)), form.closing])


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content)
    return str(content or "")
