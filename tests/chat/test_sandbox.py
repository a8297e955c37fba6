"""Templates of hostile files: they come to an end, and reach nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chat import chat_format
from support.conversations import says
from support.paths import table

from pystaged._core import Tokenizer
from pystaged.chat import ChatTemplateError, format

SPIN = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# Every third is fast.
DEEP = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"
ENDLESS_TEMPLATES = [*table("endless_templates"), DEEP, "{# " + "a" * (1 << 20) + "#}"]


@pytest.mark.parametrize(
    "template", [pytest.param(each, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, each in enumerate(ENDLESS_TEMPLATES)]
)
def test_it_comes_to_an_end(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(format, "_SECONDS", 0.1)
    with pytest.raises(ChatTemplateError, match="does not come to an end, or writes far more than its messages"):
        chat_format(template, tokenizer).render([says("user", "Hello")])


def test_what_it_writes_has_a_bound_besides_memory(tokenizer: Tokenizer) -> None:
    for template in ("{{ 'x' * 1100000 }}", "{{ ('%(a)s' * 8) % {'a': 'x' * 1000000} }}"):
        with pytest.raises(ChatTemplateError, match="writes far more than its messages"):
            chat_format(template, tokenizer).render([says("user", "Hello")])
    with pytest.raises(ChatTemplateError, match=r"refuses these messages, line 1: x{100}") as error:
        chat_format("{{ raise_exception('x' * 100000) }}", tokenizer).render([says("user", "Hello")])
    assert len(str(error.value)) < 11_000


def test_after_one_that_was_ended_comes_another(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% if messages[0].content == 'spin' %}" + SPIN + "{% endif %}{{ messages[0].content }}"
    chat = chat_format(source, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(format, "_SECONDS", 0.1)
        with pytest.raises(ChatTemplateError, match="does not come to an end"):
            chat.render([says("user", "spin")])
    assert chat.render([says("user", "Hello")]) == "Hello"


@pytest.mark.parametrize("template", table("forbidden_templates"))
def test_it_reaches_nothing(tokenizer: Tokenizer, template: str) -> None:
    messages = [says("user", "Hello")]
    with pytest.raises(ChatTemplateError, match="fails for these messages"):
        chat_format(template, tokenizer).render(messages)
    assert messages == [says("user", "Hello")]


def test_a_long_conversation_is_no_attack(tokenizer: Tokenizer) -> None:
    template = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text("utf-8")
    messages = [says(role, "word " * 1000) for _ in range(500) for role in ("user", "assistant")]
    text = chat_format(template, tokenizer).render(messages)
    assert text.count("word ") == 1_000_000
