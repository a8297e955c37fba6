"""Prompts that a distillation's target answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pystaged.distill.prompts import Questions, prose, read_prompts

MANY = '"a question"\n' * 25


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("few.txt", "one\ntwo\n\n", "few.txt has 2 prompts, one a line; at least 20 are needed"),
        ("bad.jsonl", MANY + "{", "bad.jsonl, line 26: "),
        ("bad.jsonl", MANY + "3\n", "line 26: not a JSON object with a 'prompt' or 'messages'"),
        ("bad.jsonl", MANY + '{"answer": "x"}\n', "line 26: not a JSON object with a 'prompt' or 'messages'"),
        ("bad.jsonl", MANY + '[{"role": "assistant", "content": "x"}]\n', "line 26: there is no text to answer"),
        ("bad.jsonl", MANY + '{"messages": [{"role": "user"}]}', "line 26: messages[0] has no content"),
        ("bad.txt", b"\xff\xfe", "bad.txt, line 1: not UTF-8"),
    ],
)
def test_prompts_that_cannot_be(tmp_path: Path, name: str, text: str | bytes, words: str) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=name) as failure:
        read_prompts(tmp_path / name)
    assert words in str(failure.value)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have no names among files there")
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no regular file"):
        read_prompts(tmp_path / "pipe")


def test_prompts_of_every_form(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    lines = ["a", {"prompt": "b"}, {"question": "c"}, {"messages": talk}, talk[:2]]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines * 4)))
    found = read_prompts(tmp_path / "all.jsonl")
    assert len(found) == 20
    assert [messages[-1]["content"] for messages in found[:5]] == ["a", "b", "c", "u", "u"]
    assert found[3] == found[4] == talk[:2]
    (tmp_path / "lines.txt").write_text("a {line}\n\n" * 20)
    assert read_prompts(tmp_path / "lines.txt") == [[{"role": "user", "content": "a {line}"}]] * 20


@pytest.mark.slow
def test_questions_are_of_many_kinds_and_the_same_again() -> None:
    questions = Questions()
    found = questions.draw(200, 3)
    assert found == questions.draw(200, 3) != questions.draw(200, 4)
    assert len(set(found)) > 150
    assert all(any(word in each for each in found) for word in ("ummar", "ranslate", "Python", "[1]"))
    assert any("an earlier answer" in each for each in questions.draw(50, 3, ["an earlier answer of the model"]))
    assert list(prose("words " * 50, 200))
    assert not list(prose("1234 + " * 50, 200))


def test_only_line_ends_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '"one\u2028text\u0085"\r\n'.encode() * 20 + b"{\r\n")
    with pytest.raises(ValueError, match="line 21"):
        read_prompts(path)
    path.write_bytes(path.read_bytes()[:-3])
    assert [each[0]["content"] for each in read_prompts(path)] == ["one\u2028text\u0085"] * 20
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\r"))  # as old editors write
    assert [each[0]["content"] for each in read_prompts(path)] == ["one\u2028text\u0085"] * 20
