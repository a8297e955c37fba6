"""Structured output: JSON schemas, regular expressions and grammars as constraints, by llguidance.

Where a grammar allows only one string, its masks allow only the tokens that the tokenizer encodes it as, which are then
forced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from pystaged._core import Tokenizer
from pystaged.options.config import Grammar
from pystaged.platform.process import Child, ChildKilledError, ChildSilentError, Workers
from pystaged.sampling.constraint import Mask, allows, count_allowed
from pystaged.sampling.definitions import GrammarError, compiled
from pystaged.sampling.text import encode_continuation

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_KEPT = 16  # cached grammars, invalid ones included
_AT_ONCE = 2  # grammars that are compiled at the same time
_SILENT = 120.0  # longest wall time of a compilation, in seconds; its processor time is limited to 5 seconds
_MOST_FORCED = 1024  # characters of a forced string that are encoded at once
_UNCERTAIN = 16  # last tokens of a cut string, which may depend on the characters after it
_MOST_SHOWN = 100  # characters of an error's line, which may quote the grammar
_CONTROL = b"\xff"  # before the spelling of a control token
_T = TypeVar("_T")


class Grammars:
    """Compiles grammars for a vocabulary, and caches those used last.

    Raises:
        ModuleNotFoundError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import llguidance  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "json_schema, regex and grammar need llguidance: pip install llguidance", name=error.name
            ) from None
        self._ends = frozenset(tokenizer.end_tokens.tolist())
        if not self._ends:
            raise GrammarError("the model's vocabulary has no token that ends a text; a grammar needs one")
        ends = sorted(self._ends)
        self._workers = Workers("pystaged.sampling.definitions", _AT_ONCE)
        with self._workers.turn():  # starts the first child process meanwhile
            vocabulary = cast("llguidance.TokenizerWrapper", _Vocabulary(tokenizer, ends[0]))
            self._vocabulary = llguidance.LLTokenizer(vocabulary, eos_token=ends)
        self._known: dict[Grammar, LLMatcher | str] = {}  # matcher or error message; the last used are at the end
        self._lock = threading.Lock()

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """The constraint of a new sequence.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        found = self._look_up(grammar)
        if found is None:
            # The same grammar may have been compiled while this call waited for its turn.
            with self._workers.turn() as worker:
                found = self._look_up(grammar) or self._keep(grammar, self._compile(grammar, worker))
        if isinstance(found, str):
            raise GrammarError(found)
        return GrammarConstraint(found.deep_copy(), self._ends)

    def close(self) -> None:
        """Abort compilations."""
        self._workers.close()

    def _look_up(self, grammar: Grammar) -> LLMatcher | str | None:
        with self._lock:
            found = self._known.pop(grammar, None)
            if found is not None:
                self._known[grammar] = found
        return found

    def _keep(self, grammar: Grammar, found: LLMatcher | str) -> LLMatcher | str:
        with self._lock:
            self._known[grammar] = found
            while len(self._known) > _MOST_KEPT:
                del self._known[next(iter(self._known))]
        return found

    def _compile(self, grammar: Grammar, worker: Child) -> LLMatcher | str:
        """Compile a grammar in a child process, then here; returns a matcher at its beginning, or an error message."""
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
    """The grammar of one sequence.

    Raises:
        GrammarError: from `mask([])` and `advance`: the grammar became too complex.
    """

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher = matcher  # has read the sequence alone, as in plain decoding
        self._ends = ends
        self._after: bool | None = None  # cached is_complete
        self._guesser: LLMatcher | None = None  # a copy that has read a path after the sequence, too
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Mask | None] = {}  # by path after the sequence
        self._forced: list[int] | None = None

    @property
    def is_complete(self) -> bool:
        if self._after is None:
            try:
                mask = None if self._matcher.is_stopped() else self.mask([])
            except GrammarError:  # raised again by the next step, if there is one
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
        """Call `look` after an allowed path; None if the grammar is too complex there, as guesses must not raise."""
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
        raise GrammarError("no token is allowed here, so no text matches it")
    return mask


class _Vocabulary:
    """A vocabulary with the interface of llguidance's TokenizerWrapper."""

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
        """The tokens of a continuation; of a long one only the first tokens, which are enough."""
        tokens: list[int] = encode_continuation(self._tokenizer, text[:_MOST_FORCED], parse_special=False).tolist()
        return tokens if len(text) <= _MOST_FORCED else tokens[:-_UNCERTAIN]


def _one_line(words: str) -> str:
    """An error message in one line, without llguidance's marks of the position, and shortened."""
    lines = [line.strip()[:_MOST_SHOWN] for line in words.splitlines() if line.strip(" ^")]
    return " ".join(line for line in lines[:8] if not line.startswith("1 |")).rpartition("regex parse error: ")[2]


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        words = matcher.get_error().replace("<non-verbose/>", "").strip()
        raise GrammarError("no text matches it" if words.startswith("NoExtension") else words)
