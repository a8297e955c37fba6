"""Structured output: JSON schemas, regular expressions and grammars as constraints, by llguidance.

A grammar's masks also hold a text to the tokens that the vocabulary's own tokenizer would write where only one string
can follow, so what is forced is known token by token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from pystaged._core import Tokenizer
from pystaged.config import Grammar
from pystaged.decoding.constraint import Mask, allows, count_allowed
from pystaged.process import ProcessLock
from pystaged.text import encode_continuation

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_KEPT = 16  # compiled grammars
# As json.dumps writes it. White space that a schema leaves to the model is where small models lose themselves.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MOST_FORCED = 1024  # characters that are known to come, of which the tokens are looked for
_UNCERTAIN = 16  # tokens at the end of those, which what comes later may change
_LONGEST = 16384  # characters that a grammar may force at its beginning: what goes on for ever does
_MOST_RULES = 16384
_MOST_LEVELS = 16384  # of a schema, its references followed
_STACK = 256 << 20  # bytes; enough for so many rules, each in the one before
_MOST_SHOWN = 100  # characters of an error's line, which may quote the grammar
_CONTROL = b"\xff"  # before the spelling of a token that is no text
_T = TypeVar("_T")


class GrammarError(ValueError):
    """A grammar, schema or expression that is none, that no text meets, or that is too complex to follow."""


class Grammars:
    """Compiles grammars for a vocabulary, and keeps those used last.

    Raises:
        ModuleNotFoundError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import llguidance  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'json_schema, regex and grammar need llguidance: pip install "pystaged[grammar]"', name=error.name
            ) from None
        self._ends = frozenset(tokenizer.end_tokens.tolist())
        if not self._ends:
            raise GrammarError("the model's vocabulary has no token that ends a text; a grammar needs one")
        ends = sorted(self._ends)
        vocabulary = cast("llguidance.TokenizerWrapper", _Vocabulary(tokenizer, ends[0]))
        self._vocabulary = llguidance.LLTokenizer(vocabulary, eos_token=ends)
        # No lock is held while it compiles: others need not wait, and a child of fork() finds none that is held.
        self._compiled = lru_cache(_MOST_KEPT)(partial(_compiled, self._vocabulary, self._ends))

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """The constraint of a text that begins.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        return GrammarConstraint(self._compiled(grammar).deep_copy(), self._ends)


def _compiled(vocabulary: LLTokenizer, ends: frozenset[int], grammar: Grammar) -> LLMatcher:
    """A matcher that has read nothing. Raises GrammarError: the grammar cannot be used."""
    import llguidance  # noqa: PLC0415

    limits = llguidance.LLParserLimits(verbose_errors=False)

    def build() -> LLMatcher:
        matcher = llguidance.LLMatcher(vocabulary, _definition(grammar), log_level=0, limits=limits)
        _check(matcher)
        return matcher

    try:
        matcher = _with_deep_stack(build)
        if len(matcher.compute_ff_bytes()) > _LONGEST:
            raise GrammarError(f"it forces a text of more than {_LONGEST} characters")
        GrammarConstraint(matcher.deep_copy(), ends).mask([])
    except (ValueError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GrammarError(f"{grammar.option} cannot be used: {_one_line(words)}") from None
    return matcher


class GrammarConstraint:
    """The grammar of one text.

    Raises:
        GrammarError: the mask after the text, `advance`: the grammar became too complex to follow.
    """

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher = matcher  # has read the text alone, as in plain decoding
        self._ends = ends
        self._after: bool | None = None  # whether only the end of the text may follow it
        self._guesser: LLMatcher | None = None  # a copy that has read a path after the text, too
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Mask | None] = {}  # of paths after the text
        self._forced: list[int] | None = None

    @property
    def is_complete(self) -> bool:
        if self._after is None:
            try:
                mask = None if self._matcher.is_stopped() else self.mask([])
            except GrammarError:  # which ends a text that goes on, and only such a one
                return False
            self._after = mask is None or not count_allowed(mask, self._ends)
        return self._after

    def forced(self) -> list[int]:
        if self._forced is None:
            self._forced = self._guess([], lambda matcher: matcher.compute_ff_tokens()) or []
        return self._forced

    def mask(self, path: Sequence[int]) -> Mask | None:
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask_after(key) if key else _mask(self._matcher)
        return self._masks[key]

    def advance(self, tokens: Sequence[int]) -> None:
        if self._guesser is not None:
            self._guess(tokens, lambda _: None)
        self._path, self._masks, self._forced, self._after = [], {}, None, None
        self._matcher.consume_tokens(list(tokens))
        _check(self._matcher)

    def _mask_after(self, path: tuple[int, ...]) -> Mask | None:
        before = self.mask(path[:-1])
        if before is None or path[-1] in self._ends or not allows(before, path[-1]):
            return None
        return self._guess(path, _mask)

    def _guess(self, path: Sequence[int], look: Callable[[LLMatcher], _T]) -> _T | None:
        """What is found after a path that is allowed; None where that is too complex, which ends no text."""
        if self._guesser is None:
            self._guesser, self._path = self._matcher.deep_copy(), []
        try:
            self._go_to(self._guesser, path)
            found = look(self._guesser)
            _check(self._guesser)
        except GrammarError:
            self._guesser = None
            return None
        return found

    def _go_to(self, matcher: LLMatcher, path: Sequence[int]) -> None:
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        if common < len(self._path):
            matcher.rollback(len(self._path) - common)
        if common < len(path):
            matcher.consume_tokens(list(path[common:]))
        self._path = list(path)
        _check(matcher)


def _mask(matcher: LLMatcher) -> Mask:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    _check(matcher)
    if not mask.any():
        raise GrammarError("no token may follow: no text goes on from here")
    return mask


class _Vocabulary:
    """A vocabulary as llguidance reads it: what its TokenizerWrapper has."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.tokens = [
            (_CONTROL if tokenizer.is_control(token) else b"") + tokenizer.token_bytes(token, True)
            for token in range(tokenizer.num_tokens)
        ]

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that goes on with another; of a long one the first, which is all that is asked for."""
        tokens: list[int] = encode_continuation(self._tokenizer, text[:_MOST_FORCED], parse_special=False).tolist()
        return tokens if len(text) <= _MOST_FORCED else tokens[:-_UNCERTAIN]


def _definition(grammar: Grammar) -> str:
    """A grammar as llguidance writes it."""
    from llguidance import LLMatcher  # noqa: PLC0415
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415

    if grammar.option == "json_schema":
        schema = json.loads(grammar.text)
        if not isinstance(schema, (dict, bool)):
            raise GrammarError(f"a schema is an object, not {grammar.text[:20]}")
        _check_depth(schema)
        if schema is False or not has_finite_value(schema):
            raise GrammarError("no text of finite length meets it")
        return LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=_JSON_STYLE)
    if grammar.option == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.text.count("\n") >= _MOST_RULES:
        raise GrammarError(f"it has more than {_MOST_RULES} lines")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    except RecursionError:
        raise
    except Exception as error:  # which the converter raises as such
        raise GrammarError(str(error)) from None


def _check_depth(schema: Any) -> None:
    """Refuse what may recur too deeply: each reference leads at most through as many levels as the schema has."""
    references, deepest = set(), 0
    parts = [(schema, 1)]
    while parts:
        part, depth = parts.pop()
        deepest = max(deepest, depth)
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            references.add(part["$ref"])
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        parts += [(each, depth + 1) for each in inner if isinstance(each, (dict, list))]
    if (len(references) + 1) * deepest > _MOST_LEVELS:
        raise GrammarError(
            f"its {len(references)} references in {deepest} levels may nest more than {_MOST_LEVELS} levels deep"
        )


def has_finite_value(schema: Any) -> bool:
    """Whether a schema that refers to itself can be met by a value of finite size; True where that cannot be told."""
    targets: dict[str, Any] = {}
    missing: dict[int, int] = {}  # of each part that was seen, how many of its needs are not met yet
    waiting: dict[int, list[list[int]]] = {}  # by part, who needs it: lists of one, emptied once met
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
    """What a finite value of this part takes: of each list, one schema that has a finite value."""
    if "const" in part or "enum" in part:
        return []
    needs = []
    ref, properties, required = part.get("$ref"), part.get("properties"), part.get("required")
    if isinstance(ref, str) and ref[:1] == "#":
        if ref not in targets:
            targets[ref] = _target(schema, ref)
        needs.append([targets[ref]])
    if part.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        needs += [[properties.get(name)] for name in required if isinstance(name, str)]
    if part.get("type") == "array" and isinstance(part.get("minItems"), int) and part["minItems"] > 0:
        needs.append([part.get("items")])
    if isinstance(part.get("allOf"), list):
        needs += [[each] for each in part["allOf"]]
    needs += [part[word] for word in ("anyOf", "oneOf") if isinstance(part.get(word), list) and part[word]]
    return needs


def _target(schema: Any, ref: str) -> Any:
    """What a pointer into a schema names, None for nothing."""
    for step in ref[1:].strip("/").split("/") if ref[1:] else []:
        name = step.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _one_line(words: str) -> str:
    """An error without its drawing of where it is, and not too much of the grammar."""
    lines = [line.strip()[:_MOST_SHOWN] for line in words.splitlines() if line.strip(" ^")]
    return " ".join(line for line in lines[:8] if not line.startswith("1 |"))


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        words = matcher.get_error().replace("<non-verbose/>", "").strip()
        raise GrammarError("no text meets it" if words.startswith("NoExtension") else words)


_starting = ProcessLock()  # a thread's stack is a setting of the process


def _with_deep_stack(build: Callable[[], _T]) -> _T:
    """Call it in a thread with a deep stack: llguidance recurs once for each rule that refers to another."""
    with ThreadPoolExecutor(1) as pool:
        with _starting.here():
            before = threading.stack_size(_STACK)
            try:
                built = pool.submit(build)
            finally:
                threading.stack_size(before)
        return built.result()
