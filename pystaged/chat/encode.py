"""Encode rendered templates as tokens: control tokens that messages spell are plain text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from pystaged._core import Tokenizer
from pystaged.chat.marked import MESSAGE, TEMPLATE, marks_of
from pystaged.sampling.text import encode_continuation

_WRITTEN = re.compile(f"{TEMPLATE}+")
_COMES_IN = re.compile(f"[^{TEMPLATE}]+")


class Encoder:
    """Encodes rendered templates as tokens of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Control tokens and the unknown token have no bytes of their own.
        spelled = [
            tokenizer.token_bytes(token, True).decode("utf-8", "replace")
            for token in range(tokenizer.num_tokens)
            if not tokenizer.token_bytes(token)
        ]
        longest_first = sorted(filter(None, spelled), key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._control, self._anywhere = re.compile(pattern), re.compile(f"(?=({pattern}))")

    def encode(self, text: str, answers: Mapping[str, Sequence[int]]) -> list[int]:
        """Encode a rendered template; the tokens begin with one bos token if the vocabulary or the template wants one.

        If no message spells a control token, the text is encoded as a whole. If one does, the stretch between two of
        the template's control tokens that contains it is encoded without control tokens.

        Args:
            text: with marks; a plain string counts as the template's.
            answers: the tokens that the model wrote, by their text's mark; used where the template left that text
                unchanged.
        """
        parts: list[tuple[bool | None, Any]] = []
        marks, at = marks_of(text), 0
        text = str.__str__(text)
        controls = [
            match.span()
            for written in _WRITTEN.finditer(marks)
            for match in self._control.finditer(text, written.start(), written.end())
        ]
        forged = sorted(
            place
            for match in self._anywhere.finditer(text)
            if marks[match.start(1) : match.end(1)].strip(TEMPLATE)
            for place in (match.start(1), match.end(1) - 1)
        )

        def spells_one(begin: int, end: int) -> bool:
            return bisect_left(forged, begin) < bisect_left(forged, end)

        for begin, end in [*controls, (len(text), len(text))]:
            for where, written in self._answers(text, marks, at, begin, answers):
                parts += [(spells_one(at, where), text[at:where]), (None, written)]
                at = where + len(self._tokenizer.decode(written))
            parts += [(spells_one(at, begin), text[at:begin]), (False, text[begin:end])]
            at = end
        return self._begun(self._encoded(parts))

    def _encoded(self, parts: Sequence[tuple[bool | None, Any]]) -> list[int]:
        """The tokens of texts, which are plain (True) or not, and of tokens (None). Texts with control tokens are
        encoded together, because a vocabulary may let a control token absorb the white space after it."""
        tokens: list[int] = []
        goes_on = False  # directly after an answer, so no space may be inserted
        for plain, group in groupby(parts, key=itemgetter(0)):
            if plain is None:
                tokens.extend(token for _, written in group for token in written)
                goes_on = True
            elif text := "".join(part for _, part in group):
                if goes_on:
                    found = encode_continuation(self._tokenizer, text, parse_special=not plain)
                else:
                    found = self._tokenizer.encode(text, add_special=False, parse_special=not plain)
                tokens += found.tolist()
                goes_on = False
        return tokens

    def _answers(
        self, text: str, marks: str, begin: int, end: int, answers: Mapping[str, Sequence[int]]
    ) -> list[tuple[int, Sequence[int]]]:
        """Find the answers between two offsets; returns the offset and tokens of each."""
        found: list[tuple[int, Sequence[int]]] = []
        at = begin
        for run in _COMES_IN.finditer(marks, begin, end) if answers else ():
            mark = run.group()[-1]
            if mark not in answers or mark == MESSAGE:
                continue
            words = self._tokenizer.decode(answers[mark])
            where = run.end() - len(words)  # a template may write the space that an answer begins with
            if where >= at and text.startswith(words, where):
                found.append((where, answers[mark]))
                at = run.end()
        return found

    def _begun(self, tokens: list[int]) -> list[int]:
        """The tokens with one bos token in front, however many a template wrote."""
        bos = self._tokenizer.bos
        begun = 0
        while bos >= 0 and tokens[begun : begun + 1] == [bos]:
            begun += 1
        return [bos, *tokens[begun:]] if begun or self._tokenizer.adds_bos else tokens
