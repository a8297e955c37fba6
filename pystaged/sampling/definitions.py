"""Conversion of grammars for llguidance and their trial in a child process: a grammar of a few bytes can take all
memory, and only the end of the process stops that."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pystaged.platform import process
from pystaged.sampling.gbnf import lark_of
from pystaged.sampling.schema import target

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

# The style of json.dumps. With free white space, small models emit it without end.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST = 16384  # most characters that a grammar may force at its beginning; an endless text forces more
_MOST_RULES = 16384
_MOST_LEVELS = 16384  # levels of a schema, with its references followed
_MOST_MULTIPLE = 100_000  # largest multipleOf, in units of its last digit: each remainder is a state
_LARGEST_INTEGER = 2**53
_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Bounds that no integer of 64 bits meets if they are large, and their signs then.
_BEYOND_INTEGERS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_STACK = 256 << 20  # bytes; enough for _MOST_RULES rules nested in each other
_SECONDS = 5  # processor time
_ROOM = _STACK + (256 << 20)  # bytes of address space
_NAMED_TOKEN = re.compile(r"<\[\^?[0-9]+\]>")
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_T = TypeVar("_T")


class GrammarError(ValueError):
    """A grammar, schema or expression is invalid, matches no text, or is too complex."""


def main() -> int:
    """Run the child process, which answers calls."""
    process.serve(process.parent(), _Host())
    return 0


class _Host:
    def __init__(self) -> None:
        import llguidance  # noqa: PLC0415

        # A vocabulary of bytes is enough: the time to compile a grammar does not depend on the vocabulary.
        self._vocabulary = llguidance.LLTokenizer(cast("TokenizerWrapper", _Bytes()))

    def define(self, option: str, text: str) -> str:
        """Convert a grammar and compile it within the limits; returns the definition for llguidance. Raises ValueError,
        RecursionError."""
        with process.limits(_SECONDS, _ROOM):
            definition = _definition(option, text)
            # The trial knows bytes alone; one token stands for all that a grammar names by their ids.
            matcher = compiled(self._vocabulary, _NAMED_TOKEN.sub(f"<[{_Bytes.eos_token_id + 1}]>", definition))
            if not matcher.is_error():
                if len(matcher.compute_ff_bytes()) > _LONGEST:
                    raise GrammarError(f"it forces a text of more than {_LONGEST} characters")
                matcher.compute_bitmask()
        return definition


class _Bytes:
    """A vocabulary of bytes with the interface of llguidance's TokenizerWrapper."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()
    eos_token_id = 256
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>", b"\xff<token>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def compiled(vocabulary: LLTokenizer, definition: str) -> LLMatcher:
    """Compile a definition; returns a matcher at its beginning, which is in error for an invalid definition."""
    import llguidance  # noqa: PLC0415

    limits = llguidance.LLParserLimits(verbose_errors=False)
    return _with_deep_stack(partial(llguidance.LLMatcher, vocabulary, definition, log_level=0, limits=limits))


def _definition(option: str, text: str) -> str:
    """Convert a grammar to llguidance's format."""
    from llguidance import LLMatcher  # noqa: PLC0415

    if option == "json_schema":
        schema = json.loads(text)
        if not isinstance(schema, (dict, bool)):
            raise GrammarError(f"a schema is an object, not {text[:20]}")
        check_schema(schema)
        return LLMatcher.grammar_from_json_schema(text if isinstance(schema, dict) else "{}", defaults=_JSON_STYLE)
    if option == "regex":
        return LLMatcher.grammar_from_regex(text)
    if text.count("\n") >= _MOST_RULES:
        raise GrammarError(f"it has more than {_MOST_RULES} lines")
    return LLMatcher.grammar_from_lark(text if _LARK.search(text) else lark_of(text))


def check_schema(schema: Any) -> None:
    """Check that a schema can be held.

    Raises:
        GrammarError: it may nest too deeply, as each reference can add all levels of the schema; it has a multipleOf
            or integers that are too large; or no finite text matches it.
    """
    references, deepest = set(), 0
    parts = [(schema, 1)]
    while parts:
        part, depth = parts.pop()
        deepest = max(deepest, depth)
        if isinstance(part, dict):
            _check_multiples(part)
            _check_numbers(part)
            if isinstance(part.get("$ref"), str):
                references.add(part["$ref"])
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        parts += [(each, depth + 1) for each in inner if isinstance(each, (dict, list))]
    if (len(references) + 1) * deepest > _MOST_LEVELS:
        raise GrammarError(
            f"its {len(references)} references in {deepest} levels may nest more than {_MOST_LEVELS} levels deep"
        )
    if schema is False or not has_finite_value(schema):
        raise GrammarError("no text of finite length matches it")


def _check_numbers(part: dict[str, Any]) -> None:
    """Refuse numbers that llguidance would change, in values at any depth: it reads integers as doubles, errs in the
    last of many digits, and takes the largest integer for a bound beyond it."""
    from llguidance import LLMatcher  # noqa: PLC0415

    waiting = [part[word] for word in _NUMBERS if word in part]
    for word, sign in _BEYOND_INTEGERS.items():
        bound = part.get(word)
        if part.get("type") == "integer" and isinstance(bound, float) and bound * sign > _LARGEST_INTEGER:
            waiting.append(int(bound) if math.isfinite(bound) else bound)
    while waiting:
        each = waiting.pop()
        if isinstance(each, (dict, list)):
            waiting += each.values() if isinstance(each, dict) else each
        elif isinstance(each, int) and abs(each) > _LARGEST_INTEGER:
            raise GrammarError(f"the integer {each} cannot be held exactly: it is beyond 2**53")
        elif isinstance(each, float):
            text = f'{{"const": {each}}}'
            made = LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE) if math.isfinite(each) else ""
            if not made or json.loads(made)["grammars"][0]["json_schema"]["const"] != each:
                raise GrammarError(f"the number {each} cannot be held exactly; write fewer digits")


def _check_multiples(part: dict[str, Any]) -> None:
    """Refuse a part whose multipleOf, combined with those of its allOf, is too large."""
    both = part.get("allOf")
    parts = [part, *(each for each in (both if isinstance(both, list) else ()) if isinstance(each, dict))]
    given = [each.get("multipleOf") for each in parts]
    numbers = [
        Fraction(str(each))
        for each in given
        if isinstance(each, (int, float)) and not isinstance(each, bool) and 0 < each < math.inf
    ]
    unit = math.lcm(*(number.denominator for number in numbers))
    least = math.lcm(*(int(number * unit) for number in numbers))
    if least > _MOST_MULTIPLE:
        raise GrammarError(f"its multipleOf comes to more than {_MOST_MULTIPLE} units of the last digit")


def has_finite_value(schema: Any) -> bool:
    """Whether a value of finite size can match a schema that refers to itself; True if that cannot be decided."""
    targets: dict[str, Any] = {}
    missing: dict[int, int] = {}  # for each visited part, number of its needs that are not met yet
    waiting: dict[int, list[list[int]]] = {}  # by part, the parts that need it: lists of one, emptied once met
    met: list[int] = []
    parts = [schema]
    while parts:
        part = parts.pop()
        if id(part) in missing or not isinstance(part, dict):
            continue
        needs = [need for need in _needs(part, schema, targets) if all(isinstance(each, dict) for each in need)]
        missing[id(part)] = len(needs)
        met += [] if needs else [id(part)]
        for need in needs:
            owner = [id(part)]
            for each in need:
                waiting.setdefault(id(each), []).append(owner)
            parts += need
    finite = set(met)
    while met:
        for owner in waiting.get(met.pop(), ()):
            if owner:
                has_it = owner.pop()
                missing[has_it] -= 1
                if not missing[has_it]:
                    finite.add(has_it)
                    met.append(has_it)
    return not isinstance(schema, dict) or id(schema) in finite


def _needs(part: dict[str, Any], schema: Any, targets: dict[str, Any]) -> list[list[Any]]:
    """The needs of a finite value of this part: of each list, one schema must have a finite value."""
    if "const" in part or "enum" in part:
        return []
    needs = []
    ref, properties, required = part.get("$ref"), part.get("properties"), part.get("required")
    if isinstance(ref, str) and ref[:1] == "#":
        if ref not in targets:
            targets[ref] = target(schema, ref)
        needs.append([targets[ref]])
    if part.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        needs += [[properties.get(name)] for name in required if isinstance(name, str)]
    if part.get("type") == "array" and isinstance(part.get("minItems"), int) and part["minItems"] > 0:
        needs.append([part.get("items")])
    if isinstance(part.get("allOf"), list):
        needs += [[each] for each in part["allOf"]]
    needs += [part[word] for word in ("anyOf", "oneOf") if isinstance(part.get(word), list) and part[word]]
    return needs


_starting = threading.Lock()  # threading.stack_size is a setting of the whole process
if hasattr(os, "register_at_fork"):  # so that no child of fork() finds it locked
    os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def _with_deep_stack(build: Callable[[], _T]) -> _T:
    """Call `build` in a thread with a deep stack, because llguidance recurses into each rule that a rule refers to."""
    with ThreadPoolExecutor(1) as pool:
        with _starting:
            before = threading.stack_size(_STACK)
            try:
                built = pool.submit(build)
            finally:
                threading.stack_size(before)
        return built.result()
