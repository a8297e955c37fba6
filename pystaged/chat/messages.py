"""Check messages, and mark their text for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pystaged.chat.history import begun_json
from pystaged.chat.marked import ANSWERS, join, mark

REASONING = ("reasoning_content", "thinking", "reasoning")  # its names in clients and templates
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

Message = Mapping[str, Any]
"""A message for chat templates: "role", "content" and other members that a template uses. An assistant's may have
"tokens", those that the model wrote as its content; see GenerationResult.message."""


def marked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Prepare messages for a template: mark all strings except roles; read the arguments of calls, which are JSON text
    in OpenAI's form; drop "tokens", empty "tool_calls", and members that are None, which most templates do not expect.

    The content of message i has the mark chr(ANSWERS + i) if the message has tokens.

    Raises:
        TypeError: the messages are not a list of dictionaries of plain data.
        ValueError: no messages, an unknown role, content that is neither text nor parts of text, no content and no tool
            calls, calls that are no list of dictionaries, or invalid Unicode.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of dictionaries, not {type(messages).__name__}")
    if not messages:
        raise ValueError("there are no messages; give at least one, such as {'role': 'user', 'content': 'Hello'}")
    return [_marked(message, number) for number, message in enumerate(messages)]


def _marked(message: Message, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise TypeError(f"{where} must be a dictionary with 'role' and 'content', not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}; the roles are {', '.join(ROLES)}")
    content = message.get("refusal") if message.get("content") is None else message["content"]  # OpenAI's
    calls = _read_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if content is None and not calls:
        if role not in ("system", "developer") and "tool_calls" not in message and not message.get("reasoning_content"):
            raise ValueError(f"{where} has no content")
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content = [_part(part) for part in content]
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                shown = "is not text as in {'type': 'text', 'text': ...}; images are not supported"
                raise ValueError(f"{where}: a part of its content {shown}")
    elif content is not None and not isinstance(content, str):
        raise TypeError(f"{where}: the content must be text, not {type(content).__name__}")
    rest = {
        key: value
        for key, value in message.items()
        if key not in ("role", "content", "tokens", "tool_calls") and value is not None
    }
    if told := [rest[name] for name in REASONING if isinstance(rest.get(name), str)]:
        rest = {"thinking": told[0], "reasoning_content": told[0]} | rest
    if calls:
        rest["tool_calls"] = calls
    found: dict[str, Any] = {"role": str(role)} | marked(rest, where)
    if content is not None:
        found["content"] = marked(content, where)
        if isinstance(content, str) and message.get("tokens"):
            found["content"] = mark(content, chr(ANSWERS + number))
    return found


def _part(part: Any) -> Any:
    """A part of a message; OpenAI's refusals are text."""
    is_refusal = isinstance(part, Mapping) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def _read_calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, but with their arguments as data."""
    found = []
    for call in given if isinstance(given, (list, tuple)) else [given] if given else []:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(f"{where} must be a list of {{'function': {{'name': ..., 'arguments': ...}}}}")
        function = {**function, "arguments": _arguments(function.get("arguments"))}
        own = call if "function" in call else {"type": "function"}
        found.append({key: value for key, value in own.items() if value is not None} | {"function": function})
    return found


def _arguments(given: Any) -> Any:
    """The arguments of a call, an object. Of JSON that was cut it is what can be read; what is no object becomes the
    only member of one, because many templates can write nothing else."""
    if not isinstance(given, str):
        return {} if given is None else given if isinstance(given, Mapping) else {"arguments": given}
    try:
        value = begun_json(given or "{}")
        # Halves of surrogate pairs, which JSON can spell, are no text.
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        value = given
    return {} if value is None else value if isinstance(value, dict) else {"arguments": value}


def completed(message: dict[str, Any]) -> dict[str, Any]:
    """A marked message with content; without reasoning beside text and calls, which gpt-oss's template refuses."""
    left_out = REASONING if message.get("content") and "tool_calls" in message else ()
    return {"content": mark("")} | {key: each for key, each in message.items() if key not in left_out}


def with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A marked message with its text parts joined by line ends, as llama.cpp does."""
    return message | {"content": join(mark("\n"), [part["text"] for part in message["content"]])}


def is_answer(messages: Sequence[Message]) -> bool:
    """Whether the last message is an answer without calls, which can be continued."""
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant" and not last.get("tool_calls")


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A marked message with its text as a part, for templates that write nothing else."""
    content = message.get("content")
    return message | {"content": mark([{"type": "text", "text": content}])} if isinstance(content, str) else message


def marked(value: Any, where: str) -> Any:
    """Mark the strings of plain data. Raises ValueError and TypeError that name `where`."""
    try:
        made = mark(value)
        json.dumps(made, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} has text that is not valid Unicode: it cannot be written as UTF-8") from None
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    return made
