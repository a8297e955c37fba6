"""Structured output: JSON schemas, regular expressions and grammars as constraints, by llguidance.

A grammar's masks also hold a text to the tokens that the vocabulary's own tokenizer would write where only one string
can follow, so what is forced is known token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from pystaged._core import Tokenizer
from pystaged.config import Grammar
from pystaged.decoding.constraint import Mask, allows, count_allowed
from pystaged.definitions import GrammarError, compiled
from pystaged.process import Child, ChildKilledError, ChildSilentError, ProcessLock, Workers
from pystaged.text import encode_continuation

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_KEPT = 16  # compiled grammars, those that cannot be used too
_AT_ONCE = 2  # that are compiled
_SILENT = 120.0  # seconds by the clock of a process that may take 5 of the processor
_MOST_FORCED = 1024  # characters that are known to come, of which the tokens are looked for
_UNCERTAIN = 16  # tokens at the end of those, which what comes later may change
_MOST_SHOWN = 100  # characters of an error's line, which may quote the grammar
_CONTROL = b"\xff"  # before the spelling of a token that is no text
_T = TypeVar("_T")


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
        self._workers = Workers("pystaged.definitions", _AT_ONCE)
        with self._workers.turn():  # the first begins meanwhile
            vocabulary = cast("llguidance.TokenizerWrapper", _Vocabulary(tokenizer, ends[0]))
            self._vocabulary = llguidance.LLTokenizer(vocabulary, eos_token=ends)
        self._known: dict[Grammar, LLMatcher | str] = {}  # compiled, or why not; those used last at the end
        self._lock = ProcessLock()

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """The constraint of a text that begins.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        found = self._look_up(grammar)
        if found is None:
            # Others that are compiled already need not wait; the same one may have been compiled meanwhile.
            with self._workers.turn() as worker:
                found = self._look_up(grammar) or self._keep(grammar, self._compile(grammar, worker))
        if isinstance(found, str):
            raise GrammarError(found)
        return GrammarConstraint(found.deep_copy(), self._ends)

    def close(self) -> None:
        """End what is being compiled."""
        self._workers.close()

    def _look_up(self, grammar: Grammar) -> LLMatcher | str | None:
        with self._lock.here():
            found = self._known.pop(grammar, None)
            if found is not None:
                self._known[grammar] = found
        return found

    def _keep(self, grammar: Grammar, found: LLMatcher | str) -> LLMatcher | str:
        with self._lock.here():
            self._known[grammar] = found
            while len(self._known) > _MOST_KEPT:
                del self._known[next(iter(self._known))]
        return found

    def _compile(self, grammar: Grammar, worker: Child) -> LLMatcher | str:
        """A matcher that has read nothing, or why there is none."""
        try:
            definition = worker.call("define", grammar.option, grammar.text, timeout=_SILENT)
            matcher = compiled(self._vocabulary, definition)
            _check(matcher)
            GrammarConstraint(matcher.deep_copy(), self._ends).mask([])
        except (ValueError, RecursionError, MemoryError, ChildKilledError, ChildSilentError) as error:
            if isinstance(error, RecursionError):
                words = "it is nested too deeply"
            elif isinstance(error, ValueError):
                words = str(error)
            else:
                words = "it takes too much time or memory"
            return f"{grammar.option} cannot be used: {_one_line(words)}"
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


def _one_line(words: str) -> str:
    """An error without its drawing of where it is, and not too much of the grammar."""
    lines = [line.strip()[:_MOST_SHOWN] for line in words.splitlines() if line.strip(" ^")]
    return " ".join(line for line in lines[:8] if not line.startswith("1 |"))


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        words = matcher.get_error().replace("<non-verbose/>", "").strip()
        raise GrammarError("no text meets it" if words.startswith("NoExtension") else words)
