"""Check messages, and mark their text for chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pystaged.chat.marked import ANSWERS, join, mark

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

Message = Mapping[str, Any]
"""A message for chat templates: "role", "content" and other members that a template uses. An assistant's may have
"tokens", those that the model wrote as its content; see GenerationResult.message."""


def marked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Prepare messages for a template: mark all strings except roles; drop "tokens", and members that are None, which
    most templates do not expect.

    The content of message i has the mark chr(ANSWERS + i) if the message has tokens.

    Raises:
        TypeError: the messages are not a list of dictionaries of plain data.
        ValueError: no messages, an unknown role, content that is neither text nor parts of text, no content and no tool
            calls, or invalid Unicode.
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
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"{where} has no content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{where}: a part of its content is not text as in {{'type': 'text', 'text': ...}}")
    elif content is not None and not isinstance(content, str):
        raise TypeError(f"{where}: the content must be text, not {type(content).__name__}")
    rest = {
        key: value for key, value in message.items() if key not in ("role", "content", "tokens") and value is not None
    }
    found: dict[str, Any] = {"role": str(role)} | marked(rest, where)
    if content is not None:
        own = chr(ANSWERS + number) if isinstance(content, str) and message.get("tokens") else None
        found["content"] = mark(content, own) if own else marked(content, where)
    _check_text(content, where)
    return found


def with_joined_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marked messages with their text parts joined by line ends, as llama.cpp does."""
    return [
        message | {"content": join(mark("\n"), [part["text"] for part in message["content"]])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def marked(value: Any, where: str) -> Any:
    """Mark the strings of plain data. Raises ValueError and TypeError that name `where`."""
    try:
        made = mark(value)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    _check_text(made, where)
    return made


def _check_text(value: Any, where: str) -> None:
    try:
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, (list, tuple)):
            for each in value:
                _check_text(each, where)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                _check_text(key, where)
                _check_text(each, where)
    except UnicodeEncodeError:
        raise ValueError(f"{where} has text that is not valid Unicode: it cannot be written as UTF-8") from None
