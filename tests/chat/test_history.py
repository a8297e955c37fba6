"""Histories in OpenAI's form: what each template's prompt makes of calls, results, roles and tools."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.chat import chat_format, write_vocabulary
from support.conversations import TEMPLATES, says
from support.paths import table

from pystaged._core import Tokenizer
from pystaged.chat.history import begun_json

KNOW_CALLS = ("gemma4", "gpt-oss", "granite4", "lfm2.5", "llama3", "mistral", "qwen2.5", "qwen3", "qwen3.5")
ALL = tuple(name for name in TEMPLATES if name != "odd")  # which leaves messages out by itself
ONE_SYSTEM = ("gemma3", "mistral", "qwen3.5")
# As DeepSeek's, which adds the arguments to other text.
OF_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ' ' + "
    "c.function.arguments + ']' }}{% endfor %}{{ m.content }}{% endfor %}{{ tools }}"
)
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
WEATHER = {"type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "model.gguf", "byte pairs")


def call(key: str | None, value: Any, name: str = "weather") -> dict[str, Any]:
    arguments = value if isinstance(value, str) and value[:1] in ("", "{", "[", '"') else json.dumps({"a": value})
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*given: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return says("assistant", content, tool_calls=list(given))


def result(key: str | None, content: str, **more: Any) -> dict[str, Any]:
    return says("tool", content, tool_call_id=key, **more)


def written(name: str, tokenizer: Tokenizer, messages: list[Any], **options: Any) -> str:
    """The prompt by a template, without its first system message, which may contain anything."""
    given = {"template_options": {"date_string": "1 Jan 2026"}, **options}
    text = chat_format(TEMPLATES.get(name, name), tokenizer).render(messages, **given)
    assert isinstance(text, str)
    return text


def order(text: str, *words: str) -> list[str]:
    """Words in the order in which a text has them, which it has once."""
    assert all(text.count(word) == 1 for word in words), text
    return sorted(words, key=text.index)


ASKED = says("user", "QUESTION")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("keys", [("c", "c"), ("", ""), (None, None), ("c", "d")])
def test_results_follow_their_calls_turn_by_turn(name: str, keys: tuple[str | None, ...], tokenizer: Tokenizer) -> None:
    messages = [
        *(ASKED, calls(call(keys[0], "x1")), result(keys[0], "ONE")),
        *(calls(call(keys[1], "x2")), result(keys[1], "TWO"), says("user", "NEXT")),
    ]
    text = written(name, tokenizer, messages)
    assert order(text, "QUESTION", "x1", "ONE", "x2", "TWO", "NEXT") == ["QUESTION", "x1", "ONE", "x2", "TWO", "NEXT"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("keys", "results"), table("call_results"))
def test_results_stand_in_the_order_of_calls(name: str, keys: Any, results: Any, tokenizer: Tokenizer) -> None:
    messages = [
        *(ASKED, calls(call(keys[0], "x1"), call(keys[1], "x2", "clock"))),
        *(result(key, content, name=of) for key, content, of in results),
        says("user", "NEXT"),
    ]
    text = written(name, tokenizer, messages)
    single = name in ("llama3", "gpt-oss")
    expected = ["x1", "ONE", "x2", "TWO"] if single else ["x1", "x2", "ONE", "TWO"]
    assert order(text, "x1", "x2", "ONE", "TWO", "NEXT") == [*expected, "NEXT"]
    if name == "mistral" and keys[0] != keys[1]:
        ids = re.findall(r'"(?:id|call_id)": "(\w{9})"', text)
        assert ids[:2] == ids[2:]


@pytest.mark.parametrize("name", KNOW_CALLS)
def test_results_that_come_late_or_not_at_all(name: str, tokenizer: Tokenizer) -> None:
    messages = [
        *(ASKED, calls(call("c", "x1"), call("d", "x2"), call("e", "x3")), result("e", "THREE"), says("user", "WAIT")),
        *(result("c", "ONE"), says("assistant", "WELL"), says("user", "AND")),
        *(calls(call("c", "x4")), result("c", "FOUR"), result("d", "TWO")),
    ]
    words = ["x1", "ONE", "x2", "TWO", "x3", "THREE", "WAIT", "WELL", "AND", "x4", "FOUR"]
    if name not in ("llama3", "gpt-oss"):
        words = ["x1", "x2", "x3", "ONE", "TWO", "THREE", *words[6:]]
    assert order(written(name, tokenizer, messages), *words) == words


@pytest.mark.parametrize("name", [*KNOW_CALLS, OF_TEXT])
@pytest.mark.parametrize(("arguments", "shown"), table("cut_arguments"))
def test_arguments_that_were_cut_or_are_no_object(name: str, arguments: str, shown: Any, tokenizer: Tokenizer) -> None:
    messages = [ASKED, calls(call("c", arguments)), result("c", "ONE"), says("user", "NEXT")]
    text = written(name, tokenizer, messages)
    assert order(text, "ONE", "NEXT") == ["ONE", "NEXT"]
    assert shown is None or shown in text
    given = json.loads(json.dumps(messages))  # an object means the same as its text
    given[1]["tool_calls"][0]["function"]["arguments"] = {"a": "x"}
    told = [ASKED, calls(call("c", "x")), *messages[2:]]
    assert written(name, tokenizer, given) == written(name, tokenizer, told)


def test_text_is_given_to_templates_that_want_text(tokenizer: Tokenizer) -> None:
    assert '[weather {"a": "x"}]' in written(OF_TEXT, tokenizer, [ASKED, calls(call("c", "x"))])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_every_instruction_reaches_the_model(name: str, role: str, tokenizer: Tokenizer) -> None:
    more = says("assistant", "Well"), says(role, "THEN"), says("user", "NEXT")
    messages = [says("system", "FIRST"), says(role, "SECOND"), ASKED, *more]
    text = written(name, tokenizer, messages)
    later = ["FIRST", "SECOND", "THEN", "QUESTION"] if name in ONE_SYSTEM else ["FIRST", "SECOND", "QUESTION", "THEN"]
    if name == "mistral":  # which writes its system message before the last question
        later = ["QUESTION", "FIRST", "SECOND", "THEN"]
    assert order(text, "FIRST", "SECOND", "QUESTION", "THEN", "NEXT") == [*later, "NEXT"]
    assert "developer" not in text or name == "gpt-oss"
    parts = [{"type": "text", "text": each} for each in ("ONE", "TWO")]
    assert order(written(name, tokenizer, [says(role, parts), ASKED]), "ONE", "TWO") == ["ONE", "TWO"]
    assert written(name, tokenizer, [says(role, "ONLY")]).count("ONLY") == 1
    assert "QUESTION" in written(name, tokenizer, [says(role, []), ASKED])
    only, following = says(role, "ONLY"), says("user", "NEXT")
    for first in ([only, ASKED], [ASKED, only], [ASKED, only, following]):
        text = written(name, tokenizer, first)
        assert text.count("ONLY") == text.count("QUESTION") == 1
        assert ("NEXT" in text) == (len(first) == 3)


@pytest.mark.parametrize("name", ALL)
def test_answers_in_a_row(name: str, tokenizer: Tokenizer) -> None:
    """As they are where a system message stood between them."""
    answers = says("assistant", "ONE"), says("system", "BE"), says("assistant", "TWO")
    text = written(name, tokenizer, [ASKED, *answers, says("user", "NEXT")])
    assert order(text, "QUESTION", "ONE", "TWO", "NEXT") == ["QUESTION", "ONE", "TWO", "NEXT"]


def test_a_developer_is_one_where_the_template_says_so(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [says("developer", "a"), ASKED]
    assert written(template, tokenizer, messages) == "<system>a<user>QUESTION"
    assert written(template + "{# developer #}", tokenizer, messages) == "<developer>a<user>QUESTION"


@pytest.mark.parametrize("name", ALL)
def test_tools_need_no_description(name: str, tokenizer: Tokenizer) -> None:
    for more in (FUNCTION, {}, {"description": None, "parameters": None}, {"description": "", "parameters": {}}):
        tools = [{"type": "function", "function": {"name": "weather", **more}}]
        assert "weather" in written(name, tokenizer, [ASKED], tools=tools)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("none", [[], None])
def test_no_calls_are_none(name: str, none: Any, tokenizer: Tokenizer) -> None:
    plain = [ASKED, says("assistant", "y"), says("user", "NEXT")]
    messages = [ASKED, says("assistant", "y", tool_calls=none, function_call=None), says("user", "NEXT")]
    assert written(name, tokenizer, messages) == written(name, tokenizer, plain)
    for content, whole in ((None, "REFUSED"), ([{"type": "refusal", "refusal": "REFUSED"}], none)):
        refused = says("assistant", content, refusal=whole, tool_calls=none)
        assert written(name, tokenizer, [ASKED, refused, says("user", "NEXT")]).count("REFUSED") == 1
    answers = says("assistant", None, tool_calls=[]), says("assistant", "")
    empty, plain = (written(name, tokenizer, [ASKED, answer, says("user", "NEXT")]) for answer in answers)
    assert empty == plain


@pytest.mark.parametrize("given", ["x", [3], {"function": 3}, [{"function": "f"}]])
def test_calls_that_are_none_are_named(given: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\]\.tool_calls must be a list of"):
        written("qwen3", tokenizer, [ASKED, says("assistant", "y", tool_calls=given)])


@pytest.mark.parametrize("name", ["gemma3", "phi3"])
def test_a_template_without_tools_has_all_in_text(name: str, tokenizer: Tokenizer) -> None:
    messages = [
        *(says("developer", "FIRST"), ASKED, calls(call("a", "x1"), call("b", "x2"), content="I look.")),
        *(result("b", "TWO"), result("a", "ONE"), says("user", "NEXT"), says("assistant", "y"), says("user", "LAST")),
    ]
    words = ["FIRST", "# Tools", "QUESTION", "I look.", "x1", "x2", "ONE", "TWO", "NEXT", "LAST"]
    assert order(written(name, tokenizer, messages, tools=[WEATHER]), *words) == words


@pytest.mark.parametrize("text", ['{"a": "b\\n\\"c\\" {", "d": [1, {"e": null}], "f": "\\u00e9\\\\"}', '[[], {}, "x"]'])
def test_json_is_read_as_far_as_it_was_written(text: str) -> None:
    def is_part(part: Any, whole: Any) -> bool:
        if isinstance(part, dict):
            return isinstance(whole, dict) and all(key in whole and is_part(part[key], whole[key]) for key in part)
        if isinstance(part, list):
            return isinstance(whole, list) and all(map(is_part, part, whole))
        return part == whole or (isinstance(part, str) and str(whole).startswith(part))

    whole, longest = json.loads(text), 0
    for end in range(1, len(text) + 1):
        found = begun_json(text[:end])
        assert is_part(found, whole), text[:end]
        longest, before = len(json.dumps(found)), longest
        assert longest >= before - 4  # a comma may be lost
    assert found == whole
    with pytest.raises(ValueError, match="no JSON"):
        begun_json("no JSON")
