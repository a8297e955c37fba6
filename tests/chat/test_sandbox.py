"""Templates of hostile files: they come to an end, and reach nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chat import chat_format, write_vocabulary
from support.conversations import says

from pystaged._core import Tokenizer
from pystaged.chat import ChatTemplateError, format

MILLION = "{% set x = 'a' * 1000000 %}"
SPIN = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{{% set ns = namespace(x={0}) %}}{{% for i in range(60) %}}{{% set ns.x = {1} %}}{{% endfor %}}"
LISTS = DOUBLED.format("[]", "[ns.x, ns.x]")
TUPLES = DOUBLED.format("()", "(ns.x, ns.x)")


# Every third is fast.
ENDLESS_TEMPLATES = [
    SPIN,
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** 9 * 'a' }}",
    "{{ ([1] * 10 ** 9) | length }}",
    "{{ 9 ** (9 ** 9) }}",
    DOUBLED.format("9", "ns.x * ns.x"),
    DOUBLED.format("'a'", "ns.x ~ ns.x"),
    DOUBLED.format("'a'", "ns.x + ns.x"),
    DOUBLED.format("messages[0].content", "ns.x * 2"),
    DOUBLED.format("[1]", "ns.x + ns.x"),
    LISTS + "{{ ns.x }}",
    LISTS + "{{ ns.x | tojson }}",
    LISTS + "{{ ns.x ~ '' }}",
    LISTS + "{{ '%s' % ns.x }}",
    LISTS + "{{ '{}'.format(ns.x) }}",
    LISTS + "{{ ns.x | string }}",
    LISTS.replace("ns", "other") + LISTS + "{{ ns.x == other.x }}",
    TUPLES + "{{ {ns.x: 1} | length }}",
    TUPLES + "{{ {}.get(ns.x) }}",
    TUPLES + "{{ {}[ns.x] }}",
    MILLION + "{{ x.replace('a', x) }}",
    MILLION + "{{ x | replace('a', x) }}",
    MILLION + "{{ x.join(x) }}",
    MILLION + "{{ x | join(x) }}",
    MILLION + "{{ x.replace('a', '\n') | indent(100000, true, true) }}",
    "{{ range(100000) | list | tojson(indent=100000) }}",
    "{{ 'x' | center(10 ** 8) }}",
    "{{ 'x'.ljust(10 ** 8) }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%0999999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=10 ** 9) }}",
    "{{ (7).to_bytes(10 ** 10, 'big') }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{# " + "a" * (1 << 20) + "#}",
    "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
    "{{ ('%(a)s' * 100000) | format(a='x' * 1000000) }}",
    "{{ ('{a}' * 100000).format(a='x' * 1000000) }}",
    "{{ ('%99999d' * 10000) | format(*range(10000)) }}",
    "{{ ('%99999d' * 10000) % ((1,) * 10000) }}",
    "{{ raise_exception('%(a)s' * 100000 % {'a': 'x' * 1000000}) }}",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "model.gguf", "sentencepiece")


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


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ ('%s' | attr('format_map'))(messages).__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ messages[0].content.encode().decode() }}",
        "{{ messages[0].content.translate({65: 'b'}) }}",
    ],
)
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
