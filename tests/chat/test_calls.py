"""Answers split into reasoning, text and calls, in every form, however they arrive."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import table
from support.random_models import RandomModel, write

from pystaged._core import Tokenizer
from pystaged.chat import calls
from pystaged.chat.call_grammar import call_grammar
from pystaged.chat.calls import FORMS, HERMES, CallForm, form_of
from pystaged.chat.source import Parser, Source
from pystaged.chat.turn import CHANNELS, Dialect, Thinking, TurnReader, quoted
from pystaged.decoding.stop_strings import TextBuffer
from pystaged.options.config import Grammar
from pystaged.result import GenerationResult
from pystaged.sampling.definitions import GrammarError
from pystaged.sampling.grammars import Grammars
from pystaged.stats import GenerationStats

TEMPLATES = Path(__file__).parent / "templates"
SEED, XML, MINICPM, FUNCTIONARY, GEMMA4, GEMMA3, MISTRAL, OLD_MISTRAL, GRANITE, NEMOTRON, APRIEL, GIGACHAT = FORMS[:12]
GLM, _, HARMONY, LFM2, LLAMA = FORMS[12:]
THINK = Thinking("<think>", "</think>")
SCHEMAS: dict[str, Any] = {
    "write": {"properties": {"path": {"type": "string"}, "size": {"type": "integer"}, "extra": {}}},
    "time": {},
}
Part = tuple[Any, ...]
Controlled = Callable[[dict[int, str]], Tokenizer]


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Controlled:
    """A function that makes a vocabulary of bytes with some control tokens."""

    def make(names: dict[int, str]) -> Tokenizer:
        model = RandomModel("llama", width=32, heads=2, layers=1, vocab_size=320, marks=names)
        return Tokenizer(str(write(tmp_path_factory.mktemp("vocabulary") / "model.gguf", model)))

    return make


def read(pieces: list[str], **options: Any) -> list[Part]:
    reader = TurnReader(**{"schemas": SCHEMAS} | options)
    told = [(block.index, text) for piece in pieces for block, text in reader.push(piece)]
    told += [(block.index, text) for block, text in reader.finish()]
    for block in reader.blocks:
        assert "".join(text for index, text in told if index == block.index) == block.text
    assert [index for index, _ in told] == sorted(index for index, _ in told)
    return [
        (block.name, block.text, block.is_whole) if block.kind == "call" else (block.kind, block.text)
        for block in reader.blocks
    ]


def split(text: str, **options: Any) -> list[Part]:
    """The blocks of a text, which are the same however it is cut."""
    whole = read([text], **options)
    assert read(list(text), **options) == whole
    chooses = random.Random(text)
    for _ in range(20):
        cuts = sorted(chooses.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(pieces, **options) == whole
    return whole


WRITE = ("write", '{"path": "a.txt", "size": 3}', True)
TIME = ("time", "{}", True)
NAMES: list[list[str]] = [[], ["write"], ["write", "time"]]
# Behind a line with its form's name each, the text up to the next one.
AS_WRITTEN: list[tuple[CallForm, str]] = [
    (globals()[name], text.removesuffix("\n"))
    for name, _, text in (
        part.partition("\n") for part in (Path(__file__).parent / "calls.txt").read_text("utf-8").split("=== ")[1:]
    )
]


@pytest.mark.parametrize(("form", "text"), AS_WRITTEN)
def test_parallel_calls_after_text(form: CallForm, text: str) -> None:
    text_part, write, time = split(text, form=form)
    assert text_part == ("text", "I look.")
    assert (write[0], json.loads(write[1]), write[2]) == ("write", json.loads(WRITE[1]), True)
    assert time == TIME
    assert split(text) == [("text", text)]  # without tools nothing is read


@pytest.mark.parametrize(("form", "text"), AS_WRITTEN)
def test_arguments_that_are_cut(form: CallForm, text: str) -> None:
    cut = text[: text.index("a.t") + 3]
    assert split(cut, form=form)[1][::2] == ("write", False)
    assert split(cut, form=form)[1][1].endswith('"a.t')


@pytest.mark.parametrize(("form", "text"), AS_WRITTEN)
def test_nothing_of_a_text_that_is_cut_is_lost(form: CallForm, text: str) -> None:
    """What is no call yet is text; a mark behind a call, or in its arguments, is none."""
    for at in range(len("I look."), len(text) + 1):
        reader = TurnReader(form=form, schemas=SCHEMAS)
        reader.push(text[:at])
        reader.finish(is_cut=True)
        said, *called = reader.blocks
        called = [block for block in called if block.kind == "call"]
        assert [each.name for each in called] in NAMES, text[:at]
        if not called:
            assert said.text == text[:at]
        elif len(called) == 1:
            assert said.text.rstrip() == "I look."
        for block, (_, arguments, _) in zip(called, (WRITE, TIME), strict=False):
            assert not block.is_whole or json.loads(block.text) == json.loads(arguments)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "text",
    ["if a <", "a [", "{", '{"na', '{"title": "Ro', "hi <tool_call>\n", 'hi <tool_call>\n{"name": "wea', "<think"],
)
def test_a_text_that_is_cut_where_a_call_may_begin(form: CallForm, text: str) -> None:
    reader = TurnReader(THINK, form=form, schemas=SCHEMAS)
    reader.push(text)
    reader.finish(is_cut=True)
    assert [(block.kind, block.text) for block in reader.blocks] == [("text", text)]


@pytest.mark.parametrize("value", ["a <b> & c\n", "</param>", "</param><param", "]]>", "", "<![CDATA", "]]></param>x"])
def test_cdata(value: str) -> None:
    """MiniCPM5's template writes a value with marks or line ends in it so."""
    path = f'<param name="path"><![CDATA[{value}]]></param>'
    text = f'<function name="write">{path}<param name="size">3</param></function>'
    assert split(text, form=MINICPM) == [("write", json.dumps({"path": value, "size": 3}), True)]


@pytest.mark.parametrize(("text", "expected"), table("channels"))
def test_channels(text: str, expected: list[list[Any]]) -> None:
    parts: list[Part] = [tuple(part) for part in expected]
    assert split(text, form=HARMONY, thinking=CHANNELS) == parts
    if WRITE not in parts:
        assert split(text, thinking=CHANNELS) == parts


def test_channels_are_not_quoted() -> None:
    answer = "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.\n"  # as it is shown
    assert split(answer, thinking=CHANNELS) == [("reasoning", "Hm."), ("text", "Yes.\n")]
    assert quoted(answer) == "Yes.\n"
    assert quoted("a <|channel|> b") == "a <|channel|> b"


def test_the_template_decides_about_channels(controlled: Controlled) -> None:
    dialect = Dialect.of((TEMPLATES / "gpt-oss.jinja").read_text(), controlled({300: "<|end|>"}))
    assert (dialect.form, dialect.thinking, dialect.controls) == (HARMONY, CHANNELS, {"<|end|>": 300})
    assert CHANNELS.closing == "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_calls_after_reasoning() -> None:
    call = '<tool_call>{"name": "time"}</tool_call>'
    text = f'<think>\nHm, <think> or {call}?\n</think>\n\nSo:\n{call} Then {{"</think>": "<think>"}}.\n'
    expected = [
        ("reasoning", f"Hm, <think> or {call}?"),
        ("text", "So:"),
        TIME,
        ("text", 'Then {"</think>": "<think>"}.\n'),
    ]
    assert split(text, form=HERMES, thinking=THINK) == expected
    assert split(text.removeprefix("<think>"), form=HERMES, thinking=THINK, begun="thinking") == expected
    assert split("no <think>a</think>", thinking=THINK) == [("text", "no <think>a</think>")]
    assert split("<think>\n\n</think>\n\nYes ", thinking=THINK) == [("text", "Yes ")]
    assert split("<think>on and on </thi", thinking=THINK) == [("reasoning", "on and on </thi")]
    assert split("<thin", thinking=THINK) == [("text", "<thin")]
    channel = Thinking("<|channel>thought", "<channel|>")
    assert split("<|channel>thought\nhm\n<channel|>Yes", thinking=channel) == [("reasoning", "hm"), ("text", "Yes")]


@pytest.mark.parametrize(
    "path", ["</tool_call>", "}\n</tool_call>{", "<tool_call>", "<think>", '\\"]}', "[ARGS]", "é\u2028"]
)
def test_marks_within_strings_are_text(path: str) -> None:
    arguments = json.dumps({"path": path, "extra": [{"a": "}"}]})
    text = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
    assert split(text, form=HERMES, thinking=THINK) == [("write", arguments, True)]
    assert split(f"[TOOL_CALLS]write[ARGS]{arguments}", form=MISTRAL) == [("write", arguments, True)]


def test_line_ends_within_strings_are_escaped() -> None:
    text = '<tool_call>{"name": "write", "arguments": {\n"path": "a\n\tb\\n"}}</tool_call>'
    assert split(text, form=HERMES) == [("write", '{\n"path": "a\\n\\tb\\n"}', True)]


def test_backslashes_within_strings_are_escaped() -> None:
    text = r'<tool_call>{"name": "time", "arguments": {"pattern": "\d+\\.\n\"\ "}}</tool_call>'
    [(_, arguments, is_whole)] = split(text, form=HERMES)
    assert is_whole
    assert json.loads(arguments) == {"pattern": '\\d+\\.\n"\\ '}


def test_text_after_a_call_whose_end_was_forgotten_is_kept() -> None:
    text = '<tool_call>\n{"name": "time", "arguments": {}}\n\nI wait for the time.'
    kept = [TIME, ("text", "I wait for the time.")]
    assert split(text, form=HERMES) == kept
    assert split(f"{text}\n{text}", form=HERMES) == [*kept, *kept]


@pytest.mark.parametrize("value", ['"' + "long and " * 400, "long" * 900])
def test_long_values_are_not_read_again_with_each_piece(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, num_read = calls._GEMMA_TOKEN, 0

    class Counted:
        def match(self, text: str) -> Any:
            nonlocal num_read
            num_read += len(text)
            return pattern.match(text)

    monkeypatch.setattr(calls, "_GEMMA_TOKEN", Counted())
    found = read(list(f"<|tool_call>call:time{{place:{value}"), form=GEMMA4)
    assert found[0][0] == "time"
    assert 0 < num_read < 2 * len(value)


@pytest.mark.parametrize("value", table("python_values"))
def test_values_in_python_are_read_as_python_reads_them(value: str) -> None:
    text = f"<|tool_call_start|>[write(extra={value}, size = 2,), time( )]<|tool_call_end|> So."
    (name, arguments, is_whole), *rest = split(text, form=LFM2)
    assert (name, is_whole, rest) == ("write", True, [TIME, ("text", "So.")])
    expected = json.loads(json.dumps(ast.literal_eval(value)).encode())  # tuples are lists
    assert json.loads(arguments) == {"extra": expected, "size": 2}


@pytest.mark.parametrize(("written", "value"), table("nearly_python"))
def test_values_that_are_nearly_python(written: str, value: Any) -> None:
    ((name, arguments, is_whole),) = split(f"<|tool_call_start|>[write(extra={written})]<|tool_call_end|>", form=LFM2)
    assert (name, is_whole, json.loads(arguments)) == ("write", True, {"extra": value})


def test_arguments_as_text_have_the_types_of_their_schema() -> None:
    code = 'if a < b:\n    print("</tool_call>")\n'
    values = {"path": code, "size": "12", "extra": "True", "else": '[1, "x"]', "free": "1 2"}
    members = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    ((name, arguments, _),) = split(f"<tool_call>\n<function=write>\n{members}</function>\n</tool_call>", form=XML)
    expected = {"path": code, "size": 12, "extra": True, "else": [1, "x"], "free": "1 2"}
    assert (name, json.loads(arguments)) == ("write", expected)
    given = 'extra:{a:[true,<|"|>"}<|"|>,-1.5e3],b-c:null},path:<|"|>x<tool_call|><|"|>'
    text = f"<|tool_call>call:write{{{given}}}<tool_call|>"
    ((name, arguments, _),) = split(text, form=GEMMA4)
    assert json.loads(arguments) == {"extra": {"a": [True, '"}', -1500.0], "b-c": None}, "path": "x<tool_call|>"}


OPTIONAL = [
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/text"}]},
    {"allOf": [{"type": ["string", "null", "number"]}, {"type": ["null", "string"]}]},
    {"$ref": "#/$defs/optional"},
    {"enum": ["1.10", "12e4", "true", '{"a": 1}', '"quoted"', "a", None]},
]
TEXTS = {"text": {"type": "string"}, "optional": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}}


def spelled(form: CallForm, **members: str) -> str:
    """A call of write with arguments as text."""
    told = "".join(form.member.format(key=key) + value + form.member_end for key, value in members.items())
    return form.head.format(name="write") + told + form.tail


@pytest.mark.parametrize("form", [XML, GLM])
@pytest.mark.parametrize("schema", OPTIONAL)
@pytest.mark.parametrize(
    ("words", "value"),
    [*((text, text) for text in ("1.10", "12e4", "true", '{"a": 1}', '"quoted"', "a")), ("null", None), ("None", None)],
)
def test_optional_strings_are_no_other_values(form: CallForm, schema: dict[str, Any], words: str, value: Any) -> None:
    parameters = {"properties": {"path": schema}, "$defs": TEXTS}
    for whole in (
        parameters,
        {"$ref": "#/$defs/all", "$defs": TEXTS | {"all": parameters}},
        {"allOf": [parameters], "$defs": TEXTS},
        {"anyOf": [parameters, {"properties": {"size": {}}, "additionalProperties": False}], "$defs": TEXTS},
    ):
        ((_, arguments, _),) = split(spelled(form, path=words), form=form, schemas={"write": whole})
        assert json.loads(arguments) == {"path": value}
        jsonschema.validate(json.loads(arguments), whole)


@pytest.mark.parametrize(("schema", "words", "value"), table("values"))
def test_values_are_what_their_schema_allows(schema: dict[str, Any], words: str, value: Any) -> None:
    parameters = {"properties": {"path": schema}, "$defs": TEXTS}
    for form in (XML, GLM):
        ((_, arguments, _),) = split(spelled(form, path=words), form=form, schemas={"write": parameters})
        assert arguments == json.dumps({"path": value})
    if not words.startswith(("[", "{", '"')):
        called = f"<|tool_call>call:write{{path:{words}}}<tool_call|>"
        for form, text in ((GEMMA4, called), (LFM2, f"<|tool_call_start|>[write(path={words})]")):
            ((_, arguments, _),) = split(text, form=form, schemas={"write": parameters})
            assert json.loads(arguments) == {"path": value}


@pytest.mark.parametrize("form", [XML, GLM])
@pytest.mark.parametrize("words", ["x {} y", "line 1\n{}\nline 3", "{}{} {}x", "{}", "a{}\n\n", "<a>{}</a>\n  {} <b>"])
def test_a_mark_that_ends_nothing_is_text(form: CallForm, words: str) -> None:
    text = words.format(*[form.member_end.strip()] * 3)
    text += "." if text.endswith(form.member_end.strip()) else ""
    for key in ("path", "extra"):
        (call, *rest) = split(spelled(form, **{key: text, "size": "3"}) + " So.", form=form)
        assert (json.loads(call[1]), rest) == ({key: text, "size": 3}, [("text", "So.")])


def test_a_quote_that_ends_nothing_is_text() -> None:
    text = '<|tool_call>call:write{path:<|"|>a <|"|> b<|"|> ,extra:[<|"|>c<|"|>]}<tool_call|>So.'
    (_, arguments, is_whole), rest = split(text, form=GEMMA4)
    assert (json.loads(arguments), is_whole, rest) == ({"path": 'a <|"|> b', "extra": ["c"]}, True, ("text", "So."))


@pytest.mark.parametrize(("form", "text", "expected"), table("nearly_calls"))
def test_calls_that_are_nearly_right(form: str, text: str, expected: list[Any]) -> None:
    """An end that is missing, or comes too early; a list that is none."""
    assert split(text, form=globals()[form]) == [tuple(part) for part in expected]


@pytest.mark.parametrize(("form", "text"), table("no_calls"))
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    pieces = split(text, form=globals()[form])
    assert "".join(words for _, words in pieces) == text
    assert {kind for kind, _ in pieces} <= {"text"}


FRAGMENTS = table("fragments")


@settings(max_examples=150)
@given(st.sampled_from(FORMS), st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join), st.booleans())
def test_no_answer_is_lost_or_read_differently_in_pieces(form: CallForm, text: str, thinks: bool) -> None:
    options: dict[str, Any] = {"form": form, "thinking": THINK if thinks else None}
    options["begun"] = "thinking" if thinks and len(text) % 2 else None
    for kind, *rest in split(text, **options):
        if kind in ("reasoning", "text"):
            assert rest[0]
        elif rest[1] and form.style != "json":
            assert isinstance(json.loads(rest[0]), dict)
    if not any(mark in text for mark in (*form.begins, "{", "think>")):
        assert "".join(words for _, words in split(text, form=form)) == text


@settings(max_examples=150)
@given(
    st.sampled_from([HERMES, XML, GEMMA4, HARMONY, LLAMA, LFM2]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join),
    st.sampled_from(["x", "\n", "1.5", "é ", "}", "<", "tool", "path", "\n x", "True1.5"]),
    st.lists(st.integers(1, 9)),
)
def test_a_stop_string_ends_the_text_that_is_shown(form: CallForm, text: str, stop: str, sizes: list[int]) -> None:
    options: dict[str, Any] = {"form": form, "thinking": CHANNELS if form is HARMONY else THINK, "schemas": SCHEMAS}
    buffer, told, data = TextBuffer((stop,), TurnReader(**options)), "", text.encode()
    while data and buffer.met is None:
        size = sizes.pop() if sizes else 1
        told, data = told + buffer.push(data[:size]), data[size:]
    told += buffer.finish()
    assert text.startswith(told)
    whole, found = read([text], **options), read([told], **options)
    place = next((i for i, part in enumerate(whole) if part[0] == "text" and stop in part[1]), None)
    if place is None:
        assert (told, buffer.met) == (text, None)
        return
    shown = whole[place][1].partition(stop)[0]
    assert buffer.met == stop
    assert text[len(told) :].startswith(stop)
    assert found[:place] == whole[:place]
    assert "".join(part[1] for part in found[place:]).strip() == shown.strip()


def test_text_is_passed_on_at_once() -> None:
    reader = TurnReader(THINK, False, HERMES)
    told = [[text for _, text in reader.push(piece)] for piece in ("Hel", "lo ", "you", " <tool", "s>")]
    assert told == [["Hel"], ["lo"], [" you"], [], [" <tools>"]]


def test_the_template_decides_the_form() -> None:
    forms = dict.fromkeys(("qwen2.5", "qwen3", "gemma3", "phi3", "granite4"), HERMES)
    forms |= {"mistral": OLD_MISTRAL, "llama3": LLAMA, "qwen3.5": XML, "gpt-oss": HARMONY, "gemma4": GEMMA4}
    forms |= {"lfm2": LFM2, "lfm2.5": LFM2}
    for name, form in forms.items():
        assert form_of((TEMPLATES / f"{name}.jinja").read_text()) is form, name
    assert form_of("<tool_call>\n<function=f>\n<parameter=x>") is XML
    assert form_of("<|tool_call>call:") is GEMMA4
    assert form_of("[TOOL_CALLS]name[ARGS]") is MISTRAL
    assert form_of("") is HERMES


ARGUMENTS: dict[str, Any] = table("call_arguments")[0]


@pytest.mark.parametrize("form", [form for form in FORMS if form.style != "json"])
def test_arguments_that_cannot_be_read_back_open_no_others(form: CallForm, controlled: Controlled) -> None:
    dialect = Dialect.of("".join(form.template), controlled({}))
    unreadable = {"type": "object", "properties": {"a=b:c>": {"type": "integer"}}}
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    found, expected = (call_grammar(dialect, {"f": schema}, several=False) for schema in (unreadable, none))
    assert found == expected


def drawn(grammars: Grammars, tokenizer: Tokenizer, form: CallForm, grammar: str, seed: int) -> str:
    """A text of a grammar, chosen at random among the allowed tokens; "" if it went on for too long."""
    constraint, chooses, text = grammars.constraint(Grammar("grammar", grammar)), random.Random(seed), b""
    words = [tokenizer.token_bytes(token, special=True) for token in range(tokenizer.num_tokens)]
    ends = set(tokenizer.end_tokens.tolist())
    ending = b""  # bytes of a mark that ends a string, which chance alone would not write
    while len(text) < 4000:
        mask = constraint.mask([])
        assert mask is not None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(words)]).tolist()
        plain = {words[token]: token for token in allowed if token not in ends}
        if len(plain) < len(allowed) and (not plain or chooses.random() < 0.5):
            return text.decode("utf-8", "replace")
        if not ending and len(plain) > 30 and chooses.random() < 0.2:
            ending = (form.member_end if form.style == "xml" else form.quote).encode()
        word = chooses.choice(list(plain))
        for size in (1, len(ending)):
            word = ending[:size] if ending[:size] in plain else word
        ending = ending.removeprefix(word)
        text += word
        constraint.advance([plain[word]])
    return ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_controls", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_grammar_allows_calls_that_are_read_and_nothing_else(
    form: CallForm, has_controls: bool, controlled: Controlled
) -> None:
    names = {300 + i: mark for i, mark in enumerate(dict.fromkeys(form.marks))} if has_controls else {}
    tokenizer = controlled(names)
    dialect = Dialect.of("".join(form.template), tokenizer)
    assert dialect.form is form
    assert dialect.controls == {mark: token for token, mark in names.items()}
    schemas: dict[str, Any] = {"open.file": ARGUMENTS, "time": {}, "any": {"type": "object"}}
    grammars = Grammars(tokenizer)

    seen: set[str] = set()
    for seed in range(8):
        text = drawn(grammars, tokenizer, form, call_grammar(dialect, schemas, several=seed % 2 == 0), seed)
        if not text:  # it went on for too long
            continue
        found = split(text, form=form, schemas=schemas)
        assert len(found) == 1 or (seed % 2 == 0 and form.between is not None)
        for name, arguments, is_whole in found:
            assert is_whole
            seen.add(name)
            found = json.loads(arguments)
            if name == "time":
                assert found == {}
            if name == "open.file":
                assert {"path", "mode", "size"} <= found.keys() <= ARGUMENTS["properties"].keys()
                assert isinstance(found["path"], str)
                assert found["mode"] in ("read", "write")
                assert isinstance(found["size"], int)
                assert form.style == "gemma" or set(found.get("tags", [])) <= {"a"}
    assert "time" in seen
    grammars.close()


PARAMETERS: dict[str, dict[str, Any]] = dict(table("parameters"))


@pytest.mark.parametrize(
    "form", [HERMES, XML, GEMMA4, GLM, LFM2, *(pytest.param(each, marks=pytest.mark.slow) for each in FORMS)]
)
def test_calls_that_must_be_meet_their_schema(form: CallForm, controlled: Controlled) -> None:
    tokenizer = controlled({300 + i: mark for i, mark in enumerate(dict.fromkeys(form.marks))})
    dialect, grammars = Dialect.of("".join(form.template), tokenizer), Grammars(tokenizer)
    for name, schema in PARAMETERS.items():
        for seed in range(2):
            text = drawn(grammars, tokenizer, form, call_grammar(dialect, {"f": schema}, several=False), seed)
            if not text:
                continue
            ((called, arguments, is_whole),) = split(text, form=form, schemas={"f": schema})
            assert (called, is_whole) == ("f", True), (name, text)
            assert isinstance(json.loads(arguments), dict)
            jsonschema.validate(json.loads(arguments), schema)
    grammars.close()


@pytest.mark.parametrize(("schema", "words"), table("no_parameters"))
def test_parameters_that_cannot_be_held_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match=f"the parameters of f: .*{words}"):
        call_grammar(Dialect(XML, None, {}), {"f": schema}, several=True)


@pytest.mark.parametrize("form", [HERMES, XML, GEMMA4, LFM2])
@pytest.mark.parametrize("values", [None, 5, "ab", {"a": 1}, []])
def test_a_list_of_values_that_is_none_is_ignored(form: CallForm, values: Any) -> None:
    dialect = Dialect(form, None, {})
    texts = [
        call_grammar(dialect, {"f": {"properties": {"a": {"type": "string"} | more}}}, several=True)
        for more in ({}, {"enum": values})
    ]
    assert form in (HERMES, LFM2) or texts[0] == texts[1]


@pytest.mark.parametrize(("form", "name"), [(XML, "a>"), (GEMMA4, "at most"), (LFM2, "a=b")])
def test_required_arguments_that_cannot_be_read_back_are_refused(form: CallForm, name: str) -> None:
    schema = {"properties": {name: {"type": "integer"}}, "required": [name]}
    with pytest.raises(GrammarError, match=f"argument '{name}'; rename it"):
        call_grammar(Dialect(form, None, {}), {"f": schema}, several=True)


def test_arguments_with_spaces_in_their_names() -> None:
    text = "<|tool_call_start|>[write(at most=3, path ='a')]<|tool_call_end|>"
    assert split(text, form=LFM2) == [("write", '{"at most": 3, "path": "a"}', True)]


@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        (HERMES, "So.", "<tool_call>"),  # before a mark
        (LLAMA, "", "{"),  # before a call without one
        (LFM2, "<|tool_call_start|>[write(path='a'", ")]"),  # behind a quote, which may be within the string
        (HERMES, "<think>", "</think>"),
    ],
)
def test_white_space_is_not_read_again_with_each_piece(
    form: CallForm, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest, more = 0, Source.more

    def counted(source: Source) -> Parser[bool]:
        nonlocal longest
        longest = max(longest, len(source.text))
        return (yield from more(source))

    monkeypatch.setattr(Source, "more", counted)
    read([before, *" \n" * 500, after], form=form, thinking=THINK)
    assert longest < 100  # characters that the next piece is read with


def test_definitions_are_repeated_only_where_they_are_needed() -> None:
    shared = {"$defs": {"long": {"type": "integer", "description": "long " * 1000}}}
    plain = {"properties": {f"a{i}": {"type": "integer"} for i in range(2000)}} | shared
    assert len(call_grammar(Dialect(XML, None, {}), {"f": plain}, several=True)) < 1_000_000
    one = {"properties": {"a": {"$ref": "#/$defs/long"}, "b": {"type": "integer"}}} | shared
    assert call_grammar(Dialect(XML, None, {}), {"f": one}, several=True).count("long " * 1000) == 1
    many = {"properties": {f"a{i}": {"$ref": "#/$defs/long"} for i in range(2000)}} | shared
    with pytest.raises(GrammarError, match="more than 8 MB"):
        call_grammar(Dialect(XML, None, {}), {"f": many}, several=True)


def test_calls_of_a_result_are_whole_and_valid() -> None:
    def called(arguments: str) -> str:
        return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'

    good = '{"city": "Köln", "days": 2}'
    bad = ('{"x": NaN}', '{"x": 1e999}', '{"x": "\\ud800"}')
    text = "".join(map(called, (good, *bad, "{}")))[:-14]
    result = GenerationResult(text, [1, 2], "stop", 0, GenerationStats(), [], [])
    call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": good}}
    assert result.tool_calls[0] == call
    assert [json.loads(each["function"]["arguments"]) for each in result.tool_calls] == [json.loads(good), {}]
    assert result.message == {"role": "assistant", "content": text, "tokens": [1, 2]}


@pytest.mark.parametrize("stop", ["\n", '"', "name"])
def test_a_stop_string_is_no_part_of_a_call_that_is_cut(stop: str) -> None:
    buffer = TextBuffer((stop,), TurnReader(form=HERMES))
    assert buffer.push(b'<tool_call>\n{"name') == ""
    buffer.finish(cut=True)
    assert buffer.met is None


@pytest.mark.parametrize(("stop", "text"), [("\n", "Hi\n"), (" ", "Hi "), ("<", "Hi<"), ("}", "Hi}\n")])
def test_a_cut_answer_has_no_stop_string(stop: str, text: str) -> None:
    buffer = TextBuffer((stop,), TurnReader(form=HERMES))
    pieces = [buffer.push(each.encode()) for each in text]
    assert "".join([*pieces, buffer.finish(cut=True)]) == "Hi"
