"""Texts of a form: what they are, whatever drafts and whoever shares their passes; and what no text can be."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.children import stuck
from support.commands import run_python
from support.gbnf import llama_cpp_accepts
from support.paths import table
from support.scheduling import wait_until
from support.schemas import schema_of

import pystaged
from pystaged import Engine, GrammarError
from pystaged.options.config import GenerationConfig, Grammar
from pystaged.platform.process import Child
from pystaged.sampling.constraint import Mask, allows
from pystaged.sampling.definitions import _Host, compiled, has_finite_value
from pystaged.sampling.grammars import GrammarConstraint, Grammars

SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["alpha", "beta"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "person": {"json_schema": PERSON},
    "text": {"json_schema": json.dumps(PERSON)},
    "nested": {"json_schema": schema_of(8, 1)},
    "regex": {"regex": r"(cat|dog)(, (cat|dog)){1,3}\."},
    "digits": {"regex": r"\d{3}-\d{4}"},
    "empty": {"regex": ""},
    "lark": {"grammar": 'start: "yes" | "no, because " /[a-z ]{3,20}/ "."'},
    "left recursion": {"grammar": 'start: start "a" | "b" start "c" | "d"'},
    "gbnf": {"grammar": 'root ::= "yes" | item ("," item)*\nitem ::= [0-9]+'},
    "catastrophic": {"regex": "((a+)+|(a|aa)+)+b"},
}
# What texts of some forms must match besides.
EXPRESSIONS = {
    "lark": "yes|no, because [a-z ]{3,20}[.]",
    "left recursion": "b*d[ac]*",
    "gbnf": "yes|[0-9]+(,[0-9]+)*",
    "catastrophic": "a+b",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with pystaged.load("bundled", n_ctx=512) as engine:
        yield engine


def check(form: dict[str, Any], text: str) -> None:
    """A finished text has its form, by another's judgement where there is one."""
    if "json_schema" in form:
        schema = form["json_schema"]
        jsonschema.validate(json.loads(text), json.loads(schema) if isinstance(schema, str) else schema)
    else:
        expression = [each for name, each in EXPRESSIONS.items() if form is FORMS[name]] or [form["regex"]]
        assert re.fullmatch(expression[0], text)
        assert form is not FORMS["left recursion"] or text.count("b") == text.count("c")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_text_has_its_form_however_it_is_drafted(engine: Engine, form: dict[str, Any]) -> None:
    for sampling in SAMPLINGS if "json_schema" in form else SAMPLINGS[:2]:
        plain = engine.generate("The answer is ", max_tokens=60, speculate=False, **form, **sampling)
        assert plain.stats.steps in (len(plain.tokens), len(plain.tokens) + 1)
        if plain.finish_reason == "stop":
            check(form, plain.text)
        for _ in range(2):
            staged = engine.generate("The answer is ", max_tokens=60, **form, **sampling)
            assert (staged.tokens, staged.text) == (plain.tokens, plain.text)
            assert staged.finish_reason == plain.finish_reason


@pytest.mark.slow
def test_texts_of_several_forms_in_a_crowd_are_what_they_are_alone(engine: Engine) -> None:
    names = [*FORMS, "free"]
    options = [FORMS.get(name, {}) | SAMPLINGS[i % 3] | {"max_tokens": 60} for i, name in enumerate(names)]
    alone = [engine.generate("The answer is ", **each) for each in options]
    streams = [engine.stream("The answer is ", **each) for each in options]
    for stream in streams:
        next(stream, None)  # from here on they share passes
    together = [stream.finish() for stream in streams]
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
    several = engine.generate(["The answer is "] * 3, n=2, temperature=1.0, max_tokens=60, **FORMS["person"])
    for seed, result in zip([0, 1] * 3, several, strict=True):
        expected = engine.generate("The answer is ", temperature=1.0, max_tokens=60, seed=seed, **FORMS["person"])
        assert result.text == expected.text


@pytest.mark.parametrize("options", table("ruled_forms"), ids=str)
def test_a_text_ends_where_its_form_does_whatever_rules_exclude_after_it(
    engine: Engine, options: dict[str, Any]
) -> None:
    plain = engine.generate("Once upon a time", speculate=False, **options)
    staged = engine.generate("Once upon a time", **options)
    assert plain.finish_reason == staged.finish_reason == "stop"
    assert (staged.tokens, staged.text, staged.logprobs) == (plain.tokens, plain.text, plain.logprobs)


def test_what_a_text_cannot_begin_with_is_refused_before_anything_is_written(engine: Engine) -> None:
    passes = engine.passes.passes
    for options in (
        {"regex": "12X", "logit_bias": {"1": -math.inf, "12": -math.inf}},
        {"regex": "1?", "ignore_eos": True, "logit_bias": {"1": -math.inf}},
    ):
        with pytest.raises(ValueError, match="exclude all first tokens"):
            engine.stream("Once upon a time", **options)
    assert engine.passes.passes == passes


def test_rules_that_leave_nothing_of_a_form_fail_however_it_is_drafted(engine: Engine) -> None:
    for speculate in (False, True):
        stream = engine.stream("Once upon a time", regex="(12){9}X", logit_bias={"X": -math.inf}, speculate=speculate)
        with pytest.raises(ValueError, match="together exclude all tokens"):
            stream.finish()
        assert stream.result.text == "12" * 9


def test_streams_and_chat_take_them_too(engine: Engine) -> None:
    async def collected() -> str:
        return "".join([piece.text async for piece in engine.astream("The answer is ", **FORMS["person"])])

    expected = engine.generate("The answer is ", **FORMS["person"])
    assert expected.json() == json.loads(expected.text)
    for given, words in (({"max_tokens": 3}, "it was cut at max_tokens"), ({"stop": ":"}, "Expecting ':' delimiter")):
        cut = engine.generate("The answer is ", **FORMS["person"] | given)
        with pytest.raises(ValueError, match=f"text of {len(cut.tokens)} tokens is no whole JSON: {words}"):
            cut.json()
    assert "".join(engine.stream("The answer is ", **FORMS["person"])) == expected.text
    assert asyncio.run(collected()) == expected.text
    with pytest.warns(UserWarning, match="no chat template"):
        answer = engine.chat([{"role": "user", "content": "Who?"}], **FORMS["person"])
    check(FORMS["person"], answer.text)


def test_what_is_forced_costs_no_steps_of_its_own() -> None:
    properties = {f"a_rather_long_name_{i}": {"enum": [1, 2]} for i in range(6)}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    # With a fixed policy it does not matter what the passes of a busy machine seem to cost.
    with pystaged.load("bundled", policy=pystaged.FixedPolicy(1, 1, 1)) as engine:
        result = engine.generate("The answer is ", json_schema=schema, max_tokens=200)
    certain = result.stats.stages["grammar"]
    check({"json_schema": schema}, result.text)
    assert certain.accepted == certain.drafted == result.stages.count(pystaged.Stage.GRAMMAR)
    assert certain.accepted > len(result.tokens) * 2 // 3
    assert result.stats.steps <= 14


def test_the_end_of_text(engine: Engine) -> None:
    for speculate in (False, True):
        whole = engine.generate("The answer is ", speculate=speculate, **FORMS["person"])
        for max_tokens in (len(whole.tokens) - 1, len(whole.tokens), len(whole.tokens) + 1):
            cut = engine.generate("The answer is ", max_tokens=max_tokens, speculate=speculate, **FORMS["person"])
            assert cut.tokens == whole.tokens[:max_tokens]
            assert cut.finish_reason == ("length" if max_tokens < len(whole.tokens) else "stop")
    for context in engine._contexts._idle:
        context.account.left = 1e6
    empty = engine.generate("The answer is ", regex="")
    assert all(context.account.left > 0 for context in engine._contexts._idle)
    assert (empty.text, empty.tokens, empty.finish_reason) == ("", [], "stop")
    stopped = engine.generate("The answer is ", stop=", ", **FORMS["person"])
    assert whole.text.startswith(stopped.text + ", ")


def test_a_schema_fixes_white_space_unless_it_says_otherwise(engine: Engine) -> None:
    text = engine.generate("The answer is ", json_schema=PERSON).text
    assert text == json.dumps(json.loads(text), ensure_ascii=False)
    compact = PERSON | {"x-guidance": {"item_separator": ",", "key_separator": ":"}}
    text = engine.generate("The answer is ", json_schema=compact).text
    assert text == json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("schema", [{}, True, "true", {"type": "array"}, {"type": ["string", "null"]}], ids=str)
def test_schemas_that_say_little(engine: Engine, schema: Any) -> None:
    result = engine.generate("The answer is ", json_schema=json.dumps(schema) if schema is True else schema)
    assert result.finish_reason == "length" or json.loads(result.text) is not NotImplemented


REFUSED: list[tuple[dict[str, Any], str]] = [
    *map(tuple, table("no_grammars")),
    ({"json_schema": '{"properties":{"a":' * 50_000 + "{}" + "}}" * 50_000}, "json_schema cannot be used"),
    ({"json_schema": {"enum": [f"value number {i}" for i in range(100_000)]}}, "too big"),
    ({"regex": "(" * 10_000 + ")" * 10_000}, "regex cannot be used"),
    ({"grammar": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000}, "nested too deeply"),
    ({"grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000}, "too deeply nested"),
    ({"grammar": 'start: "a"\n' + "\n" * 20_000}, "more than 16384 lines"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_met_is_refused_before_anything_is_written(
    engine: Engine, options: dict[str, Any], words: str
) -> None:
    passes = engine.passes.passes
    with pytest.raises(GrammarError, match=words) as error:
        engine.stream("The answer is ", **options)
    assert len(str(error.value)) < 1000
    assert engine.passes.passes == passes


# ---- llama.cpp's notation ----


@pytest.mark.parametrize(("grammar", "texts"), table("gbnf"))
def test_grammars_of_llama_cpp_allow_what_llama_cpp_allows(grammar: str, texts: list[str]) -> None:
    accepts, host = llama_cpp_accepts(grammar), _Host()
    definition = host.define("grammar", grammar)
    for text in texts:
        matcher = compiled(host._vocabulary, definition)  # whose tokens are bytes
        is_allowed = matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()
        assert is_allowed == accepts(text), text


def test_tokens_in_grammars_of_llama_cpp(engine: Engine) -> None:
    ids = engine.tokenizer.encode("ab", add_special=False).tolist()
    grammar = f"root ::= <[{ids[0]}]> !<[{ids[0]}]> "
    llama_cpp_accepts(grammar)
    tokens = engine.generate("x", grammar=grammar, max_tokens=5, logit_bias={ids[0]: 100}).tokens
    assert (tokens[0], len(tokens)) == (ids[0], 2)
    assert tokens[1] != ids[0]


@pytest.mark.parametrize(("grammar", "words"), table("no_gbnf"))
def test_what_is_no_grammar_of_llama_cpp(engine: Engine, grammar: str, words: str) -> None:
    with pytest.raises(GrammarError, match=f"grammar cannot be used: .*{words}"):
        engine.stream("x", grammar=grammar)


# ---- Schemas with numbers that cannot be held ----


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**64 - 1},
        {"enum": [1, {"a": [-(2**53) - 1]}]},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "array", "items": {"anyOf": [{"type": "integer", "exclusiveMaximum": 2**53 + 1}]}},
        {"type": "integer", "minimum": 1e19},
        {"type": "integer", "exclusiveMaximum": -1e19},
        {"const": 123456789.12345679},  # would be ....5678
        {"enum": [{"a": math.inf}]},
    ],
)
def test_numbers_that_would_change_are_refused(engine: Engine, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"the (integer|number) [\dinf.-]+ cannot be held exactly"):
        engine.stream("x", json_schema=schema)


@pytest.mark.parametrize("number", [2**53, -(2**53), 0.30000000000000004, 1e22])
def test_numbers_that_are_held(engine: Engine, number: float) -> None:
    schema = {"const": number, "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}
    assert engine.generate("x", json_schema=schema | {"examples": [2**70]}, max_tokens=40).json() == number


def multiples(*numbers: float) -> dict[str, Any]:
    return {"json_schema": {"type": "number", "allOf": [{"type": "number", "multipleOf": each} for each in numbers]}}


BOTTOMLESS: list[dict[str, Any]] = [
    {"json_schema": {"type": "integer", "multipleOf": 223092870}},
    {"json_schema": {"properties": {"a": {"items": {"type": "integer", "multipleOf": 223092870}}}}},
    {"json_schema": {"type": "number", "multipleOf": 22.3092870}},
    {"json_schema": {"type": "integer", "multipleOf": 30030, "allOf": [{"multipleOf": 7429}]}},
    multiples(2, 3, 5, 7, 11, 13, 17, 19, 23),
    multiples(0.2, 0.03, 0.5, 0.7, 1.1, 1.3, 17, 19, 23),
]


@pytest.mark.parametrize("options", BOTTOMLESS, ids=str)
def test_multiples_of_too_much_are_refused(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="its multipleOf comes to more than 100000 units of the last digit"):
        engine.stream("The answer is ", **options)


@pytest.mark.parametrize("options", [multiples(5, 0.5, 100), multiples(0.01), multiples(1e-7)], ids=str)
def test_multiples_of_what_is_usual(engine: Engine, options: dict[str, Any]) -> None:
    result = engine.generate("The answer is ", max_tokens=30, **options)
    if result.finish_reason == "stop":
        check(options, result.text)


# Texts whose length is a multiple of each, by intersections alone, which no number tells.
INTERSECTED = "start: A\nA: " + " & ".join(f"/([ab]{{{each}}})*/" for each in (2, 3, 5, 7, 11, 13, 17, 19, 23))


@pytest.mark.slow
def test_what_takes_all_memory_is_ended_and_not_tried_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = 'start: a\na: %json {"type": "integer", "multipleOf": 223092870}'
    for grammar in (INTERSECTED, hidden):
        with pytest.raises(GrammarError, match="grammar cannot be used: it takes too much time or memory"):
            engine.stream("The answer is ", grammar=grammar)
        with monkeypatch.context() as patch:
            patch.setattr(Child, "call", None)
            with pytest.raises(GrammarError, match="it takes too much time or memory"):
                engine.stream("The answer is ", grammar=grammar)
        assert engine.generate("The answer is ", regex=f"after {len(grammar)}").text == f"after {len(grammar)}"


def test_closing_ends_what_is_compiled(engine: Engine) -> None:
    grammars, found = Grammars(engine.tokenizer), list[BaseException]()

    def compile_it() -> None:
        try:
            grammars.constraint(Grammar("grammar", INTERSECTED))
        except GrammarError as error:
            found.append(error)

    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    workers = grammars._workers._here
    wait_until(lambda: found or any(child._is_asked for here in workers.values() for child in list(here.busy)))
    grammars.close()
    thread.join(600)
    assert len(found) == 1


def test_a_grammar_is_compiled_once_for_all_who_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, honest, asked = Grammars(engine.tokenizer), Child.call, []

    def call(self: Child, name: str, *args: object, timeout: float) -> Any:
        asked.append(args)
        return honest(self, name, *args, timeout=timeout)

    monkeypatch.setattr(Child, "call", call)
    for option, text in (("regex", "a{30}"), ("regex", "(a")):
        with ThreadPoolExecutor(8) as pool:
            tried = [pool.submit(grammars.constraint, Grammar(option, text)) for _ in range(20)]
        assert {isinstance(each.exception(), GrammarError) for each in tried} == {text == "(a"}
    assert len(asked) <= 4  # two at once


def test_grammars_are_kept_up_to_a_bound(engine: Engine) -> None:
    grammars = Grammars(engine.tokenizer)
    for i in range(20):
        grammars.constraint(Grammar("regex", "0"))
        grammars.constraint(Grammar("regex", f"a{i}"))
    assert [grammar.text for grammar in grammars._known] == [*(f"a{i}" for i in range(5, 19)), "0", "a19"]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"regex": "a", "grammar": 'start: "a"'}, TypeError, "give one of regex, grammar"),
    ({"json_schema": 3}, TypeError, "json_schema must be a dictionary or JSON text, not int"),
    ({"json_schema": {"const": object()}}, ValueError, "json_schema cannot be written as JSON"),
    ({"regex": re.compile("a")}, TypeError, "regex must be a string, not Pattern"),
    ({"grammar": b"start: /a/"}, TypeError, "grammar must be a string, not bytes"),
    ({"regex": "\ud800"}, ValueError, "regex is not valid Unicode text"),
]


@pytest.mark.parametrize(("options", "kind", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_options_of_the_wrong_kind(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        GenerationConfig(**options)


def test_rules_within_rules_do_not_end_the_process(engine: Engine) -> None:
    count = 10_000
    rules = [f"r{i}: r{i + 1}" for i in range(count)]
    grammar = "\n".join(["start: r0", *rules, f'r{count}: "the end"'])
    assert engine.generate("The answer is ", grammar=grammar).text == "the end"


IN_A_SMALL_THREAD = """
import json, sys, threading
import pystaged

def chain(count):
    rules = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": rules | {f"a{count}": {"type": "null"}}}

forms = [
    {"json_schema": chain(3000)},
    {"json_schema": chain(50_000)},
    {"json_schema": '{"type":"array","items":' * 60 + "{}" + "}" * 60},
    {"regex": "(" * 200 + "a" + ")*" * 200},
]

def use():
    with pystaged.load("bundled", n_ctx=64) as engine:
        for form in forms:
            try:
                engine.stream("The answer is ", **form)
                print("usable")
            except pystaged.GrammarError as error:
                print(error)

threading.stack_size(256 << 10)
thread = threading.Thread(target=use)
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_forms_within_forms_do_not_end_the_process() -> None:
    done = run_python(IN_A_SMALL_THREAD)
    assert done.returncode == 0, done.stderr
    chain, long, nested, _ = done.stdout.splitlines()
    assert (chain, nested) == ("usable", "usable")
    assert long.startswith("json_schema cannot be used: its 50001 references in 4 levels may nest")


@pytest.mark.slow
def test_what_needs_much_of_much_is_told_to_end_at_once() -> None:
    """Each of many needs all after it: a hundred thousand needs."""
    names = [f"a{i}" for i in range(450)]
    rules = {
        name: {"type": "object", "properties": {other: {"$ref": f"#/$defs/{other}"} for other in names[i + 1 :]}}
        | {"required": names[i + 1 :]}
        for i, name in enumerate(names)
    }
    schema: dict[str, Any] = {"$ref": "#/$defs/a0", "$defs": rules}
    assert has_finite_value(schema)
    rules["a449"] = {"$ref": "#/$defs/a0"}
    assert not has_finite_value(schema)


def test_a_grammar_that_is_compiled_does_not_keep_others_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(engine.tokenizer)
    with stuck(monkeypatch, Grammars, "_compile", lambda: grammars.constraint(Grammar("regex", "a"))):
        fast = threading.Thread(target=grammars.constraint, args=[Grammar("regex", "b")], daemon=True)
        fast.start()
        fast.join(600)
        assert not fast.is_alive()


def test_more_is_forced_than_is_asked_for(engine: Engine) -> None:
    result = engine.generate("The answer is ", max_tokens=80, regex="(ab){3000}c")
    assert len(result.tokens) == 80
    assert result.text == "ab" * (len(result.text) // 2)
    assert result.stats.steps <= 3
    plain = engine.generate("The answer is ", max_tokens=80, speculate=False, regex="(ab){3000}c")
    assert plain.tokens == result.tokens


def test_without_the_extra_the_error_says_what_to_install(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(engine, "_grammars", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install llguidance")):
        engine.stream("The answer is ", regex="a")


def test_masks_do_not_depend_on_what_was_asked_before(engine: Engine) -> None:
    """So neither on which trees were drafted."""
    rng = random.Random(1)
    grammars = Grammars(engine.tokenizer)

    def tokens_of(mask: Mask) -> list[int]:
        found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        return found

    for grammar in (Grammar("json_schema", json.dumps(PERSON)), Grammar("regex", FORMS["regex"]["regex"])):
        text: list[int] = []
        asked = grammars.constraint(grammar)
        while not asked.is_complete and len(text) < 40:
            for _ in range(rng.randrange(4)):  # elsewhere in the tree
                path: list[int] = []
                while len(path) < 5 and (mask := asked.mask(path)) is not None:
                    path.append(rng.choice(tokens_of(mask)))
                if rng.random() < 0.5:
                    asked.forced()
            fresh = grammars.constraint(grammar)
            fresh.advance(text)
            mask, expected = asked.mask([]), fresh.mask([])
            assert mask is not None
            np.testing.assert_array_equal(mask, expected)
            assert asked.forced() == fresh.forced()
            step = asked.forced()[:2]
            if not step:
                step = [rng.choice([token for token in tokens_of(mask) if not engine.tokenizer.is_end(token)])]
            asked.advance(step)
            text += step


def test_what_is_forced_is_all_that_its_masks_allow(engine: Engine) -> None:
    constraint = Grammars(engine.tokenizer).constraint(Grammar("json_schema", json.dumps(PERSON)))
    forced = constraint.forced()
    assert engine.tokenizer.decode(forced).startswith('{"name":')
    for i, token in enumerate(forced):
        mask = constraint.mask(forced[:i])
        assert mask is not None
        assert np.unpackbits(mask.view(np.uint8)).sum() == 1
        assert allows(mask, token)


class Fragile:
    """A matcher for which texts of more than two tokens are too complex, for ever."""

    def __init__(self, matcher: Any, length: int = 0) -> None:
        self._matcher, self._length, self._broken = matcher, length, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def consume_tokens(self, tokens: list[int]) -> None:
        self._matcher.consume_tokens(tokens)
        self._length += len(tokens)
        self._broken |= self._length > 2

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._length -= count

    def is_error(self) -> bool:
        return self._broken or bool(self._matcher.is_error())

    def get_error(self) -> str:
        return "too complex"

    def deep_copy(self) -> Fragile:
        return Fragile(self._matcher.deep_copy(), self._length)


def test_a_guess_that_is_too_complex_ends_no_text(engine: Engine) -> None:
    compiled = Grammars(engine.tokenizer).constraint(Grammar("regex", "[ab]{9}c"))
    ends = frozenset(engine.tokenizer.end_tokens.tolist())
    constraint = GrammarConstraint(Fragile(compiled._matcher), ends)  # type: ignore[arg-type]
    a, b = (int(engine.tokenizer.encode(letter, add_special=False)[-1]) for letter in "ab")
    expected = constraint.mask([a, b])
    assert expected is not None
    assert constraint.mask([a, b, a]) is None
    assert constraint.mask([a, b, a, b]) is None
    assert constraint.mask([b, a]) is not None
    constraint.advance([a, b])
    assert not constraint.is_complete
    assert constraint.forced() == []
    np.testing.assert_array_equal(constraint.mask([]), expected)  # type: ignore[arg-type]
    assert constraint.mask([a]) is None
    with pytest.raises(GrammarError, match="too complex"):
        constraint.advance([a])


@pytest.mark.parametrize(("schema", "ends"), table("endless_schemas"))
def test_schemas_with_and_without_an_end(schema: dict[str, Any], ends: bool) -> None:
    assert has_finite_value(schema) is ends
