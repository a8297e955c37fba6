"""Answers of an engine: the same with and without drafts, and nothing of a conversation is read twice."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import paths
from support.chat import write_chat
from support.commands import run_python
from support.conversations import says

import pystaged

TURNS = ["Hello! I am Ada.", "What is the capital of France?", "And what is it known for?", "Thank you."]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[pystaged.Engine]:
    with pystaged.load(paths.smollm2(), n_ctx=1024, report=lambda _: None) as engine:
        yield engine


@pytest.mark.slow
def test_four_turns_read_nothing_again(smollm2: pystaged.Engine) -> None:
    messages: list[dict[str, Any]] = []
    there = 0
    for question in TURNS:
        messages.append(says("user", question))
        result = smollm2.chat(messages, temperature=0.7, top_p=0.9, seed=11)
        assert result.finish_reason == "stop"
        assert result.text.strip()
        assert result.stats.reused_tokens >= there  # one more where the end of the turn was guessed
        there = result.stats.prompt_tokens + len(result.tokens)
        messages.append(result.message)
    answers = [message["content"] for message in messages[1::2]]
    assert "Paris" in answers[1]


def test_several_answers_are_those_of_their_seeds(random_gguf: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "stop": "e"}
    with pystaged.load(random_gguf("Q8_0", context=256), draft=None, report=lambda _: None) as engine:
        asked = [says("user", TURNS[0])]
        answers = engine.chat(asked, n=3, seed=2**64 - 1, **options)
        alone = [engine.chat(asked, seed=seed, **options) for seed in (2**64 - 1, 0, 1)]
        for one, other in zip(answers, alone, strict=True):
            assert (one.text, one.tokens, one.seed) == (other.text, other.tokens, other.seed)
        assert [each.text for each in engine.chat(asked, n=1, **options)] == [engine.chat(asked, **options).text]
        assert engine.chat(TURNS[0], n=3, seed=2**64 - 1, **options)[0].tokens == answers[0].tokens
        assert engine.stream_chat(TURNS[0], **options).finish().tokens == alone[1].tokens
        with pytest.raises(ValueError, match="n must be at least 1"):
            engine.chat(asked, n=0)


def test_answers_in_an_event_loop(random_gguf: Callable[..., Path]) -> None:
    questions = [[says("user", question)] for question in TURNS]

    async def ask(engine: pystaged.Engine) -> list[list[int]]:
        streams = [engine.astream_chat(question, max_tokens=12) for question in questions]
        return [result.tokens for result in await asyncio.gather(*(stream.finish() for stream in streams))]

    with pystaged.load(random_gguf(context=512), draft=None, report=lambda _: None) as engine:
        alone = [engine.chat(question, max_tokens=12).tokens for question in questions]
        assert asyncio.run(ask(engine)) == alone
        with pytest.raises(ValueError, match="there are no messages"):
            engine.astream_chat([])


def test_threads_share_a_format(random_gguf: Callable[..., Path]) -> None:
    said: list[str] = []
    with pystaged.load(random_gguf(), draft=None, report=said.append) as engine, ThreadPoolExecutor(8) as threads:
        formats = list(threads.map(lambda _: engine.chat_format, range(8)))
    assert len(set(map(id, formats))) == 1
    assert sum("no chat template" in line for line in said) == 1


def test_without_a_template_it_warns() -> None:
    with pystaged.load("bundled", draft=None) as engine:
        with pytest.warns(UserWarning, match="no chat template; conversations are written as ChatML") as warned:
            first = engine.chat([says("user", "a = 1")], max_tokens=8, stop="\n")
        assert [each.filename for each in warned] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = engine.chat([says("user", "a = 1"), first.message, says("user", "b = 2")], max_tokens=8)
    assert second.stats.reused_tokens >= first.stats.prompt_tokens


def test_templates_of_a_file(tmp_path: Path) -> None:
    long = "{{ messages[0].content }}" + "x" * 5000
    templates = [{"name": "default", "template": long}, {"name": "rag", "template": "\u00e9"}]
    path = write_chat(tmp_path / "model.gguf", templates)
    with pystaged.load(path, draft=None, report=lambda _: None) as engine:
        assert engine.chat_format.names == ["default", "rag"]
        assert engine.chat_format.render([says("user", "a")]) == "a" + "x" * 5000
        assert engine.chat_format.render([says("user", "a")], template="rag") == "\u00e9"


def test_it_is_as_long_as_there_is_room(random_gguf: Callable[..., Path]) -> None:
    with pystaged.load(random_gguf(context=96), draft=None, report=lambda _: None) as engine:
        result = engine.chat([says("user", "x")])
        assert result.stats.prompt_tokens + len(result.tokens) in (engine.n_ctx, engine.n_ctx + 1)
        with pytest.raises(pystaged.ContextFullError, match="the context holds 96"):
            engine.chat([says("user", "x" * 200)])
        for ask in (engine.generate, engine.stream, engine.astream):
            with pytest.raises(TypeError, match="messages are answered by chat and stream_chat"):
                ask([says("user", "x")])  # type: ignore[operator]
        with pytest.raises(TypeError, match="there is no option 'nonsense'"):
            engine.chat([says("user", "x")], nonsense=1)  # type: ignore[call-arg]
        with pytest.raises(pystaged.ChatTemplateError, match="there is no chat template 'x'; the model has default"):
            engine.chat([says("user", "x")], template="x")


def test_jinja_is_not_imported_before_it_is_needed() -> None:
    code = "import sys; import pystaged.engine, pystaged.cli.generate; sys.exit('jinja2' in sys.modules)"
    assert run_python(code).returncode == 0
