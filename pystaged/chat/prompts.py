"""Files of prompts: texts, and messages of conversations."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pystaged.chat.messages import marked_messages
from pystaged.platform.files import lines_of

_MOST_BYTES = 1 << 30
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_MEMBERS = ("messages", "turns", "prompt", "question", "instruction", "text")  # the first that a line has is asked
_ALONE = {"messages", "turns", "prompt"}
_TEXTS = ("", "prompt", "text")  # others are a user's message
_SHOWN = 40  # characters of a prompt that messages show


@dataclass(frozen=True)
class Asked:
    """A prompt, or the messages of a conversation.

    where: its place in a file of prompts; "" for one that is in no file.
    """

    where: str
    prompt: str = ""
    messages: list[dict[str, Any]] | None = None

    def about(self, error: ValueError | TypeError) -> ValueError:
        """The error with the prompt's place."""
        return ValueError(f"{self.where}: {error}" if self.where else str(error))

    def named(self) -> str:
        """The prompt, shortened to part of a line."""
        text = self.prompt if self.messages is None else str(self.messages[-1].get("content"))
        return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {"prompt": self.prompt} if self.messages is None else {"messages": self.messages}

    def conversation(self) -> list[dict[str, Any]]:
        """The messages; of a prompt, the user's message that it is."""
        return self.messages or [{"role": "user", "content": self.prompt}]


def read_prompts(path: Path, report: Callable[[str], None] = lambda _: None) -> list[Asked]:
    """Read the prompts of a file or pipe, - for standard input: one per line. In a .jsonl file, or a pipe that begins
    with such an object, a line is a text, a list of messages, or an object with one of them as "prompt" or "text" or as
    "messages", or with a user's message: "question", "instruction", or the first of Spec-Bench's "turns". Blank lines
    are skipped.

    Args:
        report: called with a line that names the members that are not used.

    Raises OSError, and ValueError where there are no prompts, the file is too large, or a line is not a prompt.
    """
    if str(path) == "-":
        name, data = "standard input", sys.stdin.read().encode("utf-8", "surrogateescape")
    else:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            is_small = stat.S_ISREG(about.st_mode) and about.st_size <= _MOST_BYTES  # else reading takes so much memory
            name, data = str(path), file.read(-1 if is_small else _MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{name} is larger than {_MOST_BYTES / 1e6:.0f} MB")
    lines = list(lines_of(name, data))
    if not lines:
        raise ValueError(f"{name} has no prompts")
    first = None if path.suffix else _parsed(lines[0][1])
    begins = isinstance(first, dict) and not first.keys().isdisjoint(_MEMBERS)
    if not begins and path.suffix.lower() not in _JSON_LINES:
        return [Asked(where, line) for where, line in lines]
    unused = set[str]()
    found = [_asked(where, line, unused) for where, line in lines]
    if unused:
        report(f"{name}: members of its lines that are not used: {', '.join(map(repr, sorted(unused)))}")
    return found


def _parsed(line: str) -> Any:
    """The value of a line of JSON, None of another line."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _asked(where: str, line: str, unused: set[str]) -> Asked:
    """The prompt in a line of JSON. The names of members that are not used are added to `unused`."""
    value, name = _parsed(line), ""
    if isinstance(value, dict):
        if len(_ALONE & value.keys()) > 1:
            raise ValueError(f"{where}: only one of 'prompt', 'messages' and 'turns' can be asked")
        name = next((member for member in _MEMBERS if member in value), "")
        unused |= value.keys() - {name}
        value = value[name] if name else None
    if name == "turns":
        name, value = "first turn", value[0] if isinstance(value, list) and value else None
    if isinstance(value, str) and name != "messages":
        if name in _TEXTS:
            return Asked(where, value)
        value = [{"role": "user", "content": value}]
    elif name not in ("", "messages"):
        raise ValueError(f"{where}: the {name} is not a string")
    if name and not isinstance(value, list):
        raise ValueError(f"{where}: the messages are not a list of objects with 'role' and 'content'")
    if not isinstance(value, list):
        raise ValueError(f"{where}: not a JSON object with a 'prompt' or 'messages'")
    asked = Asked(where, messages=value)
    try:
        marked_messages(value)
    except (ValueError, TypeError) as error:
        raise asked.about(error) from None
    return asked
