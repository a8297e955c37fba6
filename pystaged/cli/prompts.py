"""The prompts for `generate`: one, or those of a file."""

from __future__ import annotations

import codecs
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pystaged.cli.console import read_prompt, report
from pystaged.platform.files import lines_of

_MOST_BYTES = 1 << 26  # of a file of prompts
_SHOWN = 40  # characters of a prompt that messages show
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_FIELDS = {"prompt", "messages"}  # of a line of JSON, one of them


@dataclass(frozen=True)
class Asked:
    """A prompt, or the messages of a conversation.

    where: its place in a file of prompts; "" for one from the command line.
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


def read_prompts(path: Path) -> list[Asked]:
    """Read the prompts of a file or pipe, - for standard input: one per line; in a .jsonl file, or a pipe that begins
    with an object, an object with a 'prompt' or 'messages' per line. Blank lines are skipped.

    Raises OSError, and ValueError where there are no prompts, the file is too large, or a line is not a prompt.
    """
    if str(path) == "-":
        name, data = "standard input", read_prompt("-").encode()
    else:
        with path.open("rb") as file:
            name, data = str(path), file.read(_MOST_BYTES + 1)
    first = _object(data.removeprefix(codecs.BOM_UTF8).lstrip().split(b"\n", 1)[0])
    in_json = path.suffix.lower() in _JSON_LINES or (not path.suffix and not first.keys().isdisjoint(_FIELDS))
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{name} is larger than {_MOST_BYTES / 1e6:.0f} MB")
    unused: set[str] = set()
    found = [_parsed(where, line, unused) if in_json else Asked(where, line) for where, line in lines_of(name, data)]
    if not found:
        raise ValueError(f"{name} has no prompts")
    if unused:
        report(f"{name}: only 'prompt' or 'messages' of a line is used, not {', '.join(map(repr, sorted(unused)))}")
    return found


def _object(line: bytes | str) -> dict[str, Any]:
    """The object that a line of JSON is; an empty one for another line."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        return found if isinstance(found, dict) else {}
    return {}


def _parsed(where: str, line: str, unused: set[str]) -> Asked:
    """Parse a line of JSON; names of unused fields are added to `unused`."""
    fields = _object(line)
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError(f"{where}: not a JSON object with a 'prompt' or 'messages'")
    unused |= fields.keys() - _FIELDS
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise ValueError(f"{where}: the prompt is not a string")
        return Asked(where, fields["prompt"])
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ValueError(f"{where}: the messages are not a list of objects with 'role' and 'content'")
    return Asked(where, messages=messages)
