"""Prompts that end with the beginning of an answer, and how what follows is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import archive
from support.chat import chat_format, write_chat
from support.conversations import TEMPLATES, says

import pystaged
from pystaged._core import Tokenizer
from pystaged.chat import ChatTemplateError
from pystaged.chat.calls import form_of
from pystaged.chat.format import ChatFormat
from pystaged.chat.turn import CHANNELS, Dialect, Thinking, TurnReader

ASKED = says("user", "Hello")
THINK = Thinking("<think>", "</think>")
TEXTS = ["The answer is", "It is \u00e9\U0001f600:\n\n", "  \n- one\n- two \t", "{", "I say <|im_end|> & <b>"]
HEADER = {
    "qwen3": "<|im_start|>assistant\n",
    "qwen3.5": "<|im_start|>assistant\n",
    "gemma4": "<|turn>model\n",
    "gpt-oss": "<|start|>assistant",
}


def begun(chat: ChatFormat, answer: Any, *before: Any, **options: Any) -> str:
    message = answer if isinstance(answer, dict) else says("assistant", answer)
    return chat.render([*(before or [ASKED]), message], continues=True, **options)


def check(chat: ChatFormat, text: str) -> bool:
    """A prompt ends with the text; whether it begins as the template itself writes the answer."""
    prompt = begun(chat, text)
    assert prompt.endswith(text)
    header = prompt.removesuffix(text)
    assert "<think>" not in header.rpartition("Hello")[2].rpartition("</think>")[2]
    with suppress(ChatTemplateError):
        whole = chat.render([ASKED, says("assistant", text)], add_generation_prompt=False)
        return whole.startswith(header + text.strip().partition("\n")[0])
    return False


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_ends_with_the_text(tokenizer: Tokenizer, name: str, text: str) -> None:
    """Behind what the template writes before answers, white space at its ends aside."""
    assert check(chat_format(TEMPLATES[name], tokenizer), text) or text[0] == " " or name == "odd"


@pytest.mark.slow
@archive.needed
@pytest.mark.parametrize("path", archive.TEMPLATES, ids=lambda path: path.stem)
def test_published_templates(tokenizer: Tokenizer, path: Path) -> None:
    chat = chat_format(path.read_text("utf-8"), tokenizer)
    with suppress(ChatTemplateError):  # some need tools
        chat.render([ASKED])
        for text in TEXTS:
            check(chat, text)
        for thought in ("<think>\nI should ", "<think>\nhm\n</think>\n\nThe answer is "):
            assert begun(chat, thought).endswith(thought)


@pytest.mark.parametrize("name", HEADER)
def test_reasoning_goes_on(tokenizer: Tokenizer, name: str) -> None:
    chat = chat_format(TEMPLATES[name], tokenizer)
    thinking = Dialect.of(TEMPLATES[name], tokenizer).thinking
    assert thinking
    space = "" if name == "gpt-oss" else "\n"
    opened = f"{HEADER[name]}{thinking.begin}{space}I should "
    for message in ({"content": ""}, {"content": None}):
        assert begun(chat, {"role": "assistant", "reasoning_content": "I should ", **message}).endswith(opened)
    assert begun(chat, f"{thinking.begin}{space}I should ").endswith(opened)
    told = f"{thinking.begin}{space}hm{thinking.closing}The "
    assert begun(chat, told).endswith(HEADER[name] + told)
    assert begun(chat, says("assistant", "The ", reasoning_content="hm")).endswith("The ")
    assert begun(chat, "").endswith(chat.render([ASKED])[-20:])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_of_a_cut_answer_stand_behind_the_header(tokenizer: Tokenizer, name: str) -> None:
    chat = chat_format(TEMPLATES[name], tokenizer)
    for text in ("\nI wonder ", "<|channel|>analysis<|message|>I ", "<think>\nI"):
        tokens = [token for letter in text for token in tokenizer.encode(letter, add_special=False).tolist()]
        cut = says("assistant", tokenizer.decode(tokens), tokens=tokens)
        assert chat.encode([ASKED, cut], continues=True).tolist() == [*chat.encode([ASKED]).tolist(), *tokens]


def test_marks_that_a_cut_answer_hides_stand_in_the_prompt(tmp_path: Path) -> None:
    path = write_chat(tmp_path / "model.gguf", TEMPLATES["gpt-oss"], ["<|end|>", "<|im_end|>"])
    tokenizer = Tokenizer(path)
    chat, said = chat_format(TEMPLATES["gpt-oss"], tokenizer), tokenizer.encode("Hm", add_special=False).tolist()
    for hidden, goes_on in ((300, True), (301, False)):
        tokens = [*said, hidden, *said]
        prompt = chat.encode([ASKED, says("assistant", "HmHm", tokens=tokens)], continues=True).tolist()
        assert (prompt[-len(tokens) :] == tokens) == goes_on
        assert (hidden in prompt[-len(tokens) :]) == goes_on


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "gemma4"])
def test_begun_reasoning_goes_on_where_it_is_off(tokenizer: Tokenizer, name: str) -> None:
    chat, answer = chat_format(TEMPLATES[name], tokenizer), says("assistant", "", reasoning_content="I ")
    switched = [begun(chat, answer, template_options={"enable_thinking": on}) for on in (False, True)]
    assert switched[0] == switched[1]


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ("", "reasoning"),
        ("<|end|>", None),
        ("<|end|><|start|>assistant", None),
        ("<|end|><|start|>assistant<|channel|>final", None),
        ("<|end|><|start|>assistant<|channel|>analysis<|message|>so", "reasoning"),
        ("<|end|><|start|>assistant<|channel|>commentary<|message|>so", "text"),
        (CHANNELS.closing, "text"),
    ],
)
def test_where_gpt_oss_goes_on(tokenizer: Tokenizer, more: str, where: Any) -> None:
    dialect = Dialect.of(TEMPLATES["gpt-oss"], tokenizer)
    assert dialect.begun([], tokenizer, says("assistant", f"{CHANNELS.begin}hm{more}")) == where
    assert dialect.begun([], tokenizer, says("assistant", f"Write {more}")) == "text"


def test_a_refusal_goes_on_as_text(tokenizer: Tokenizer) -> None:
    chat, dialect = chat_format(TEMPLATES["qwen3"], tokenizer), Dialect.of(TEMPLATES["qwen3"], tokenizer)
    for told in ({"content": [{"type": "refusal", "refusal": "no"}]}, {"content": None, "refusal": "no"}):
        refusal = {"role": "assistant", **told}
        assert begun(chat, refusal).endswith("no")
        assert dialect.begun([], tokenizer, refusal) == "text"


def test_what_gpt_oss_cannot_begin_is_refused(tokenizer: Tokenizer) -> None:
    refusing = "{% if '<|channel|>' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}"
    with pytest.raises(ValueError, match=r"messages\[1\]: the model's template cannot begin an answer with this text"):
        begun(chat_format(refusing + TEMPLATES["gpt-oss"], tokenizer), "<|channel|>final<|message|>x")


def test_a_template_that_always_reasons(tokenizer: Tokenizer) -> None:
    """Its reasoning is empty then; text that has the end of the reasoning goes on inside."""
    source = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}<think>\n{# </think> #}"
    chat = chat_format(source, tokenizer)
    assert begun(chat, "Yes ") == "[Hello]<think>\n\n</think>\n\nYes "
    assert begun(chat, "hm</think>Yes") == "[Hello]<think>\nhm</think>Yes"


def test_what_is_no_beginning(tokenizer: Tokenizer) -> None:
    chat = chat_format(TEMPLATES["qwen3"], tokenizer)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages in ([ASKED], [ASKED, says("assistant", "x", tool_calls=[call])]):
        assert chat.render(messages, continues=True) == chat.render(messages)
    assert begun(chat, "b", ASKED, says("assistant", "a")).endswith("b")
    parts = says("assistant", [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}])
    assert begun(chat, parts).endswith("a\nb ")
    for wrong in ("Hello", {"role": "user"}, [], ["assistant"], [says("assistant", 5)]):
        with pytest.raises((TypeError, ValueError)):
            chat.render(wrong, continues=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="template_options must be a dictionary, not str"):
        begun(chat, "b", template_options="abc")


def test_control_tokens_of_a_text_are_text(tokenizer: Tokenizer) -> None:
    chat = chat_format(TEMPLATES["qwen3"], tokenizer)
    mark = tokenizer.encode("<|im_end|>", add_special=False).tolist()
    prompt = chat.encode([ASKED, says("assistant", "<|im_end|>")], continues=True).tolist()
    assert tokenizer.decode(prompt, special=True).endswith("<|im_end|>")
    assert prompt[-len(mark) :] != mark


def test_a_cut_answer_goes_on_with_the_same_tokens(random_gguf: Callable[..., Path]) -> None:
    with pystaged.load(random_gguf("Q8_0", context=256), draft=None, report=lambda _: None) as engine:
        for options in ({}, {"temperature": 1.0, "seed": 5}):
            whole = engine.chat("Hello", max_tokens=20, ignore_eos=True, **options)
            cut = engine.chat("Hello", max_tokens=8, ignore_eos=True, **options)
            prompt = engine.chat_format.encode([ASKED, cut.message], continues=True)
            assert prompt.tolist() == [*engine.chat_format.encode([ASKED]).tolist(), *cut.tokens]
            rest = engine.chat([ASKED, cut.message], max_tokens=12, ignore_eos=True, **options)
            assert [*cut.tokens, *rest.tokens] == whole.tokens
            assert rest.stats.reused_tokens >= len(prompt) - 1


@pytest.mark.parametrize(
    ("thinking", "where", "text", "expected"),
    [
        (THINK, "reasoning", " so.\n</think>\n\nFour", [("reasoning", " so."), ("text", "Four")]),
        (THINK, "thinking", "\nso.\n</think>\n\nFour", [("reasoning", "so."), ("text", "Four")]),
        (THINK, "text", " is 4. <think>", [("text", " is 4. <think>")]),
        (THINK, "text", "<think>", [("text", "<think>")]),
        (CHANNELS, "text", " is 4.<|end|>", [("text", " is 4.")]),
        (CHANNELS, None, "<|message|>Four", [("text", "Four")]),
        (CHANNELS, "reasoning", f"so.{CHANNELS.closing}Four", [("reasoning", "so."), ("text", "Four")]),
        (None, "text", '{"name": "f", "parameters": {}}', [("text", '{"name": "f", "parameters": {}}')]),
    ],
)
def test_what_follows_is_read(thinking: Any, where: Any, text: str, expected: list[tuple[str, str]]) -> None:
    for size in (1, 3, 100):
        reader = TurnReader(thinking, where, form_of(TEMPLATES["llama3"]) if thinking is None else None)
        for piece in re.findall(f"(?s).{{1,{size}}}", text):
            reader.push(piece)
        reader.finish()
        assert [(block.kind, block.text) for block in reader.blocks] == expected
