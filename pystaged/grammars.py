"""Texts of a form: JSON schemas, regular expressions and grammars as constraints, by llguidance.

A grammar's masks also hold a text to the tokens that the vocabulary's own tokenizer would write where only one string
can follow, so what is forced is known token by token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
_CONTROL = b"\xff"  # before the spelling of a token that is no text


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
        self._vocabulary = llguidance.LLTokenizer(_Vocabulary(tokenizer, ends[0]), eos_token=ends)
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
        try:
            matcher = llguidance.LLMatcher(self._vocabulary, _definition(grammar), log_level=0, limits=limits)
            _check(matcher)
            GrammarConstraint(matcher.deep_copy(), self._ends).mask([])
        except (ValueError, RecursionError) as error:
            words = str(error) or "it is nested too deeply"
            raise GrammarError(f"{grammar.option} cannot be used: {words}") from None
        return matcher


class GrammarConstraint:
    """The grammar of one text.

    Raises:
        GrammarError: every member, where the grammar became too complex to follow.
    """

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._path: list[int] = []  # tokens after the text that the matcher has read
        self._masks: dict[tuple[int, ...], Mask | None] = {}  # of paths after the text
        self._forced: list[int] | None = None

    @property
    def is_complete(self) -> bool:
        self._go_to([])
        return bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        if self._forced is None:
            self._go_to([])
            self._forced = self._matcher.compute_ff_tokens()
            _check(self._matcher)
        return self._forced

    def mask(self, path: Sequence[int]) -> Mask | None:
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask(key)
        return self._masks[key]

    def advance(self, tokens: Sequence[int]) -> None:
        self._go_to(tokens)
        self._path, self._masks, self._forced = [], {}, None

    def _mask(self, path: tuple[int, ...]) -> Mask | None:
        if path:
            before = self.mask(path[:-1])
            if before is None or path[-1] in self._ends or not allows(before, path[-1]):
                return None
        self._go_to(path)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        _check(self._matcher)
        if not mask.any():
            raise GrammarError("no token may follow: no text goes on from here")
        return mask

    def _go_to(self, path: Sequence[int]) -> None:
        """Have the matcher read a path that is allowed, and no more."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
        if common < len(path):
            self._matcher.consume_tokens(list(path[common:]))
        self._path = list(path)
        _check(self._matcher)


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
        tokens: list[int] = going_on(self._tokenizer, text, parse_special=False).tolist()
        return tokens


def _definition(grammar: Grammar) -> str:
    """A grammar in llguidance's own form."""
    from llguidance import LLMatcher  # noqa: PLC0415
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark  # noqa: PLC0415

    if grammar.option == "json_schema":
        found = LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON_STYLE)
    elif grammar.option == "regex":
        found = LLMatcher.grammar_from_regex(grammar.text)
    else:
        try:
            found = LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
        except GbnfToLarkError as error:
            raise GrammarError(str(error)) from None
    return str(found)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
