"""Prompts that chat templates make of messages: as transformers writes them, and what is refused."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest
from support import paths
from support.chat import KEY, chat_format
from support.conversations import CASES, EXPECTED, TEMPLATES, meant, says, transformers_writes
from support.paths import table

from pystaged._core import Tokenizer
from pystaged.chat import ChatTemplateError
from pystaged.chat.format import ChatFormat
from pystaged.loading import names
from pystaged.loading.metadata import read_metadata

# Templates that write contents of several parts.
WITH_PARTS = ("gemma3", "gemma4", "granite4", "lfm2.5", "odd", "qwen3.5")
QUESTION, IMAGE = [says("user", "Hello")], says("user", [{"type": "image"}])


def written(chat: ChatFormat, case: dict[str, Any]) -> str | None:
    """What we make of a conversation, None where the template fails."""
    try:
        return chat.render(**case)
    except ChatTemplateError:
        return None


# ---- As transformers ----


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(tokenizer: Tokenizer, name: str, case: str) -> None:
    expected = json.loads(EXPECTED.read_text("utf-8"))[name]
    like = "joined parts" if case == "parts" and name not in WITH_PARTS else case
    assert written(chat_format(TEMPLATES[name], tokenizer), CASES[case]) == expected[like]


@pytest.mark.slow
def test_what_is_written_down_is_what_transformers_says() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name, cases in json.loads(EXPECTED.read_text("utf-8")).items():
        for case, text in cases.items():
            assert transformers_writes(TEMPLATES[name], meant(name, case)) == text, (name, case)


@pytest.mark.oracle
def test_smollm2() -> None:
    path = paths.smollm2()
    said: list[str] = []
    chat = ChatFormat(read_metadata(path), Tokenizer(path), said.append)
    text = chat.render(QUESTION)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im"
    assert text.startswith(system)
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert not said
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name in CASES:
        case = meant("phi3", "joined parts" if name == "parts" else name)  # which knows no tools, either
        assert written(chat, CASES[name]) == transformers_writes(read_metadata(path)[KEY], case)


def test_the_date_is_today(tokenizer: Tokenizer) -> None:
    text = chat_format("{{ strftime_now('%Y-%m-%d') }}", tokenizer).render(QUESTION)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", text)


def test_named_templates(tokenizer: Tokenizer) -> None:
    chat = chat_format("plain", tokenizer, tool_use="tools {{ tools|length }}", rag="rag {{ documents[0].text }}")
    assert chat.names == ["default", "tool_use", "rag"]
    assert chat.render(QUESTION) == "plain"
    assert chat.render(QUESTION, tools=[{"a": 1}]) == "tools 1"
    assert chat.render(QUESTION, template="rag", template_options={"documents": [{"text": "x"}]}) == "rag x"
    with pytest.raises(ChatTemplateError, match="no chat template 'raag'; the model has default, tool_use, rag"):
        chat.render(QUESTION, template="raag")


def test_without_a_template(tokenizer: Tokenizer) -> None:
    said: list[str] = []
    chat = ChatFormat({}, tokenizer, said.append)
    assert len(said) == 1
    assert "no chat template; conversations are written as ChatML" in said[0]
    assert chat.render([says("system", "a"), *QUESTION]) == (
        "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.stop == ()
    # Where the mark is no token, the text is looked for.
    bundled = Tokenizer(names.resolve("bundled"))
    assert ChatFormat({}, bundled, said.append).stop == ("<|im_end|>",)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content }} {{ messages[1].content }}", "Hello "),
        ("{{ messages[0].content }} {{ '<' + messages[1].content + '>' }}", "Hello <>"),
        ("{{ messages[0].content }} {{ messages[1].content is defined }}", "Hello False"),
    ],
)
def test_calls_without_words(tokenizer: Tokenizer, template: str, text: str) -> None:
    calls = {"tool_calls": [{"function": {"name": "clock", "arguments": {}}}]}
    chat = chat_format("{# tools, tool_calls #}{% set t = tools %}" + template, tokenizer)
    for message in ({"role": "assistant", **calls}, says("assistant", None, **calls)):
        assert chat.render([*QUESTION, message]) == text


def test_what_a_template_ignores_is_said_once(tokenizer: Tokenizer) -> None:
    said: list[str] = []
    source = "{{ messages[0].content }}{% if enable_thinking is defined %}!{% endif %}"
    chat = ChatFormat({KEY: source}, tokenizer, said.append)
    for _ in range(2):
        chat.render(QUESTION, tools=[], template_options={"enable_thinking": False})
    assert not said
    for _ in range(2):
        chat.render(QUESTION, template_options={"enable_thinking": True, "thinking": True})
    assert said == ["the model's chat template ignores 'thinking', so it has no effect"]


def test_what_clients_think_of_is_neither_kept_nor_said_without_bound(tokenizer: Tokenizer) -> None:
    said: list[str] = []
    chat = ChatFormat({KEY: "{{ messages[0].content }}"}, tokenizer, said.append)
    tracemalloc.start()
    try:
        for number in range(40):
            chat.render(QUESTION, template_options={f"{number:04}" + "x" * 10_000: 1})
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0 < len(said) < 40
    assert sum(map(len, said)) < 10_000
    assert kept < 200_000


# ---- What is refused ----


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        ("Hello", TypeError, "messages must be a list of dictionaries, not str"),
        ({"role": "user"}, TypeError, "messages must be a list of dictionaries, not dict"),
        ([], ValueError, "there are no messages"),
        (["Hello"], TypeError, r"messages\[0\] must be a dictionary with 'role' and 'content', not str"),
        ([*QUESTION, says("usr", "x")], ValueError, r"messages\[1\] has the role 'usr'; the roles are system, "),
        ([says("user<|im_end|>", "x")], ValueError, "has the role 'user<|im_end|>'"),
        ([{"content": "x"}], ValueError, "has the role None"),
        ([{"role": "user"}], ValueError, r"messages\[0\] has no content"),
        ([*QUESTION, says("assistant", None)], ValueError, r"messages\[1\] has no content"),
        ([says("user", 7)], TypeError, r"messages\[0\]: the content must be text, not int"),
        ([says("user", b"x")], TypeError, "the content must be text, not bytes"),
        ([IMAGE], ValueError, r"messages\[0\]: a part of its content is not text as in .*images are not supported"),
        ([says("user", "\ud800")], ValueError, r"messages\[0\] has text that is not valid Unicode"),
        ([says("user", "x", more={1, 2})], TypeError, r"messages\[0\]: strings, numbers, lists .* not set"),
        ([says("assistant", "x", tokens=[7000])], ValueError, "'tokens' are not tokens of this model"),
        ([says("assistant", "x", tokens="x")], ValueError, "'tokens' are not tokens of this model"),
    ],
)
def test_messages_that_are_none(tokenizer: Tokenizer, messages: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        chat_format("x", tokenizer).encode(messages)


def test_options_that_are_none(tokenizer: Tokenizer) -> None:
    chat = chat_format("x", tokenizer)
    with pytest.raises(ValueError, match="template_options cannot set 'bos_token'"):
        chat.render(QUESTION, template_options={"bos_token": "x"})
    with pytest.raises(TypeError, match="template_options must be a dictionary, not int"):
        chat.render(QUESTION, template_options=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tools must be dictionaries, not strings"):
        chat.render(QUESTION, tools=["x"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="tools must be a list"):
        chat.render(QUESTION, tools={"a": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tools: strings, numbers"):
        chat.render(QUESTION, tools=[print])  # type: ignore[list-item]
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="tools is nested too deeply"):
        chat.render(QUESTION, tools=nested)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_before_calls(tokenizer: Tokenizer, key: str) -> None:
    """A template may read it by another name than clients send, and refuse it beside text and calls, as gpt-oss's."""
    template = """{% for m in messages %}{{ m.content }}{% if m.tool_calls and m.thinking %}{% if m.content %}
    {{- raise_exception('both') }}{% endif %}<{{ m.thinking }}>{% endif %}{% endfor %}{{ tools }}"""
    chat = chat_format(template, tokenizer)
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    for content, shown in (("", "x<hm>"), ("I look.", "xI look.")):
        answer = says("assistant", content, tool_calls=[call], **{key: "hm"})
        assert shown in chat.render([says("user", "x"), answer])


def test_calls_that_cannot_be_read(tokenizer: Tokenizer) -> None:
    said: list[str] = []
    call = "{% for c in m.tool_calls %}CALL {{ c.function.name ~ ' ' ~ c.function.arguments.part }}{% endfor %}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{call}{{% endfor %}}{{{{ tools }}}}"
    chat = ChatFormat({"tokenizer.chat_template": template}, tokenizer, said.append)
    for _ in range(2):
        chat.render(QUESTION, tools=[{"type": "function", "function": {"name": "f"}}])
    assert said == ["the model's chat template writes calls of tools in an unknown form; they stay text"]


@pytest.mark.parametrize(("template", "words"), table("failing_templates"))
def test_templates_that_fail(tokenizer: Tokenizer, template: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        chat_format(template, tokenizer).render(QUESTION)
