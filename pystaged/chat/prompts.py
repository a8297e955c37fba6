"""Files of prompts: texts, and messages of conversations."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pystaged.chat.messages import marked_messages
from pystaged.platform.files import lines_of

_MOST_BYTES = 1 << 30
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_TEXTS = ("prompt", "question", "instruction", "text")  # names of a text in a line, the first one counts
_SHOWN = 40  # characters of a prompt that messages show


@dataclass(frozen=True)
class Asked:
    """A prompt, or the messages of a conversation.

    where: its place in a file of prompts; "" for one that is in no file. more: other members of its line.
    """

    where: str
    prompt: str = ""
    messages: list[dict[str, Any]] | None = None
    more: dict[str, Any] = field(default_factory=dict)

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
    with such an object, a line is a text, a list of messages, or an object with "messages", "prompt", "question",
    "instruction", "text", or Spec-Bench's "turns", of which the first one is asked. Blank lines are skipped.

    Args:
        report: called with a line that names the members that are not used.

    Raises OSError, and ValueError where there are no prompts, the file is too large, or a line is not a prompt.
    """
    if str(path) == "-":
        name, data = "standard input", sys.stdin.read().encode("utf-8", "surrogateescape")
    else:
        with path.open("rb") as file:
            name, data = str(path), file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{name} is larger than {_MOST_BYTES / 1e6:.0f} MB")
    first = _parsed(data.removeprefix(codecs.BOM_UTF8).lstrip().split(b"\n", 1)[0])
    begins = isinstance(first, dict) and not first.keys().isdisjoint(("messages", "turns", *_TEXTS))
    in_json = path.suffix.lower() in _JSON_LINES or (not path.suffix and begins)
    found = [_asked(where, line) if in_json else Asked(where, line) for where, line in lines_of(name, data)]
    if not found:
        raise ValueError(f"{name} has no prompts")
    if unused := {member for each in found for member in each.more}:
        report(f"{name}: only 'prompt' or 'messages' of a line is used, not {', '.join(map(repr, sorted(unused)))}")
    return found


def _parsed(line: bytes | str) -> Any:
    """The value of a line of JSON, None of another line."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _asked(where: str, line: str) -> Asked:
    value, more = _parsed(line), {}
    if isinstance(value, dict) and isinstance(value.get("turns"), list):
        value["messages"] = [{"role": "user", "content": turn} for turn in value.pop("turns")[:1]]
    if isinstance(value, dict):
        name = next((name for name in ("messages", *_TEXTS) if name in value), "")
        more = {member: each for member, each in value.items() if member != name}
        value = value.get(name)
        if name in _TEXTS and not isinstance(value, str):
            raise ValueError(f"{where}: the prompt is not a string")
        if name == "messages" and not isinstance(value, list):
            raise ValueError(f"{where}: the messages are not a list of objects with 'role' and 'content'")
    if isinstance(value, str):
        return Asked(where, value, more=more)
    if not isinstance(value, list):
        raise ValueError(f"{where}: not a JSON object with a 'prompt' or 'messages'")
    asked = Asked(where, messages=value, more=more)
    try:
        marked_messages(value)
    except (ValueError, TypeError) as error:
        raise asked.about(error) from None
    return asked
