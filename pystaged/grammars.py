"""Texts of a form: JSON schemas, regular expressions and grammars as constraints, by llguidance.

A grammar's masks also hold a text to the tokens that the vocabulary's own tokenizer would write where only one string
can follow, so what is forced is known token by token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from pystaged._core import Tokenizer
from pystaged.config import Grammar
from pystaged.decoding.constraint import Mask, allows
from pystaged.text import going_on

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_KEPT = 16  # compiled grammars
# As json.dumps writes it. White space that a schema leaves to the model is where small models lose themselves.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MOST_FORCED = 1024  # characters that are known to come, of which the tokens are looked for
_UNCERTAIN = 16  # tokens at the end of those, which what comes later may change
_LONGEST = 16384  # characters that a grammar may force at its beginning: what goes on for ever does
_MOST_RULES = 16384
_STACK = 64 << 20  # bytes; enough for so many rules, each in the one before
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
        self._compiled: dict[Grammar, LLMatcher] = {}
        self._lock = threading.Lock()

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """The constraint of a text that begins.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None) or self._compile(grammar)
            self._compiled[grammar] = compiled
            while len(self._compiled) > _MOST_KEPT:
                del self._compiled[next(iter(self._compiled))]
            return GrammarConstraint(compiled.deep_copy(), self._ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        import llguidance  # noqa: PLC0415

        limits = llguidance.LLParserLimits(verbose_errors=False)

        def build() -> LLMatcher:
            matcher = llguidance.LLMatcher(self._vocabulary, _definition(grammar), log_level=0, limits=limits)
            _check(matcher)
            return matcher

        try:
            matcher = _with_deep_stack(build) if grammar.option == "grammar" else build()
            if len(matcher.compute_ff_bytes()) > _LONGEST:
                raise GrammarError(f"it forces a text of more than {_LONGEST} characters")
            GrammarConstraint(matcher.deep_copy(), self._ends).mask([])
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
        self._guesser: LLMatcher | None = None  # a copy that has read a path after the text, too
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Mask | None] = {}  # of paths after the text
        self._forced: list[int] | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())

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
        self._path, self._masks, self._forced = [], {}, None
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
        tokens: list[int] = going_on(self._tokenizer, text[:_MOST_FORCED], parse_special=False).tolist()
        return tokens if len(text) <= _MOST_FORCED else tokens[:-_UNCERTAIN]


def _definition(grammar: Grammar) -> str:
    """A grammar in llguidance's own form."""
    from llguidance import LLMatcher  # noqa: PLC0415
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415

    if grammar.option == "json_schema":
        schema = json.loads(grammar.text)
        if not isinstance(schema, (dict, bool)):
            raise GrammarError(f"a schema is an object, not {grammar.text[:20]}")
        if schema is False or not has_end(schema):
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


def has_end(schema: Any) -> bool:
    """Whether a schema that refers to itself can be met by a value of finite size; True where that cannot be told."""
    finite: set[str] = set()
    references = _references(schema)
    known = -1
    while known < len(finite):
        known = len(finite)
        for reference in references - finite:
            if _is_finite(_target(schema, reference), finite):
                finite.add(reference)
    return _is_finite(schema, finite)


def _references(schema: Any) -> set[str]:
    """All pointers into the schema itself that it has."""
    if isinstance(schema, list):
        return set().union(*map(_references, schema))
    if not isinstance(schema, dict):
        return set()
    ref = schema.get("$ref")
    own = {ref} if isinstance(ref, str) and ref[:1] == "#" else set()
    return own.union(*map(_references, schema.values()))


def _target(schema: Any, ref: str) -> Any:
    for step in ref[1:].strip("/").split("/") if ref[1:] else []:
        name = step.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name, {}) if isinstance(schema, dict) else {}
    return schema


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Whether a value of finite size meets a schema, if those of these pointers have one."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    ref, properties = schema.get("$ref"), schema.get("properties")
    needed = [] if not isinstance(ref, str) or ref[:1] != "#" or ref in finite else [False]
    if schema.get("type") == "object" and isinstance(properties, dict) and isinstance(schema.get("required"), list):
        needed += [_is_finite(properties.get(name), finite) for name in schema["required"] if isinstance(name, str)]
    if schema.get("type") == "array" and isinstance(schema.get("minItems"), int) and schema["minItems"] > 0:
        needed.append(_is_finite(schema.get("items"), finite))
    for word, of in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if isinstance(schema.get(word), list) and schema[word]:
            needed.append(of(_is_finite(each, finite) for each in schema[word]))
    return all(needed)


def _one_line(words: str) -> str:
    """An error without its drawing of where it is, and not too much of the grammar."""
    lines = [line.strip()[:_MOST_SHOWN] for line in words.splitlines() if line.strip(" ^")]
    return " ".join(line for line in lines[:8] if not line.startswith("1 |"))


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        words = matcher.get_error().replace("<non-verbose/>", "").strip()
        raise GrammarError("no text meets it" if words.startswith("NoExtension") else words)


_starting = threading.Lock()  # a thread's stack is a setting of the process


def _with_deep_stack(build: Callable[[], _T]) -> _T:
    """What a function makes that recurs once for each rule that a rule refers to."""
    with _starting, ThreadPoolExecutor(1) as pool:
        before = threading.stack_size(_STACK)
        try:
            built = pool.submit(build)
        finally:
            threading.stack_size(before)
        return built.result()
