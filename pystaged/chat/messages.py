"""What a conversation may consist of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pystaged.chat.marked import ANSWERS, join, mark

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

Message = Mapping[str, Any]
"""A message as chat templates read it: "role", "content" and what else a template knows of. An assistant's may have
"tokens", as GenerationResult.message has: its content as the model wrote it."""


def marked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a template gets them: plain data, its strings marked as no template's, roles aside; without tokens,
    and without what is None, which most templates do not expect.

    The content of the message with number i has the mark chr(ANSWERS + i) if there are tokens for it.

    Raises:
        TypeError: no list of dictionaries of plain data.
        ValueError: no messages, an unknown role, a content that is neither text nor parts of text, none without calls
            of tools, or broken Unicode.
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
                raise ValueError(f"{where}: a part of its content is none of text, {{'type': 'text', 'text': ...}}")
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
    """Marked messages, with parts of text as one text, each on lines of its own, as llama.cpp joins them."""
    return [
        message | {"content": join(mark("\n"), [part["text"] for part in message["content"]])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def marked(value: Any, where: str) -> Any:
    """Plain data, its strings marked. Raises ValueError and TypeError that say where."""
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
