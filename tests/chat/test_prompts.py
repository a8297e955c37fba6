"""Files of prompts."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from pystaged.chat.prompts import read_prompts

HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("value", "prompt", "messages", "unused"),
    [
        ("Hello", "Hello", None, []),
        ([HELLO], "", [HELLO], []),
        ({"prompt": "Hello", "id": 1, "question": "?"}, "Hello", None, ["id", "question"]),
        ({"text": "Hello"}, "Hello", None, []),
        ({"messages": [HELLO], "text": "?"}, "", [HELLO], ["text"]),
        ({"question": "Hello"}, "", [HELLO], []),
        ({"instruction": "Hello", "text": "?"}, "", [HELLO], ["text"]),
        ({"turns": ["Hello", "?"], "category": "qa"}, "", [HELLO], ["category"]),
    ],
    ids=str,
)
def test_what_a_line_asks(tmp_path: Path, value: Any, prompt: str, messages: Any, unused: list[str]) -> None:
    path, said = tmp_path / "a.jsonl", list[str]()
    path.write_text(json.dumps(value))
    (asked,) = read_prompts(path, said.append)
    assert (asked.prompt, asked.messages) == (prompt, messages)
    named = ", ".join(map(repr, unused))
    assert said == ([f"{path}: members of its lines that are not used: {named}"] if unused else [])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"prompt": "a", "messages": [HELLO]}, "only one of 'prompt', 'messages' and 'turns' can be asked"),
        ({"turns": ["a"], "messages": [HELLO]}, "only one of 'prompt', 'messages' and 'turns' can be asked"),
        ({"turns": []}, "the first turn is not a string"),
        ({"question": None}, "the question is not a string"),
        ({"": "a"}, "not a JSON object with a 'prompt' or 'messages'"),
        (None, "not a JSON object with a 'prompt' or 'messages'"),
        ({"messages": "a"}, "the messages are not a list of objects with 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\] has no content"),
    ],
    ids=str,
)
def test_what_no_line_can_ask(tmp_path: Path, value: Any, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'"a"\n{json.dumps(value)}\n')
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: {words}"):
        read_prompts(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_file_without_a_suffix_may_be_of_objects(tmp_path: Path, end: str) -> None:
    line = '{"prompt": "a"}'
    for name, prompts in (("a", ["a", "a"]), ("a.txt", [line, line])):
        (tmp_path / name).write_bytes(f"\ufeff{end}{line}{end}{line}{end}".encode())
        assert [each.prompt for each in read_prompts(tmp_path / name)] == prompts


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("Hello\n")
    tracemalloc.start()
    read_prompts(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
