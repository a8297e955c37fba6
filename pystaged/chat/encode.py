"""Encode rendered templates as tokens: control tokens that messages spell are plain text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence

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
        tokens = _Parts(self._tokenizer)
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
                tokens.add(text[at:where], plain=spells_one(at, where))
                tokens.take(written)
                at = where + len(self._tokenizer.decode(written))
            tokens.add(text[at:begin], plain=spells_one(at, begin))
            tokens.add(text[begin:end], plain=False)
            at = end
        return self._begun(tokens.done())

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


class _Parts:
    """Tokens of a text that is added in parts. Parts with control tokens are encoded together, because a vocabulary
    may let a control token absorb the white space after it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._waiting = ""
        self._goes_on = False  # directly after an answer, so no space may be inserted

    def add(self, text: str, *, plain: bool) -> None:
        """Add text. plain: encode it without control tokens, even if it spells some."""
        if not plain:
            self._waiting += text
            return
        self._flush()
        self._tokens += self._encode(text, parse_special=False)

    def take(self, tokens: Sequence[int]) -> None:
        """Add tokens unchanged."""
        self._flush()
        self._tokens += tokens
        self._goes_on = True

    def done(self) -> list[int]:
        """All tokens."""
        self._flush()
        return self._tokens

    def _flush(self) -> None:
        if self._waiting:
            self._tokens += self._encode(self._waiting, parse_special=True)
        self._waiting = ""

    def _encode(self, text: str, *, parse_special: bool) -> list[int]:
        goes_on, self._goes_on = self._goes_on, False
        if goes_on:
            tokens = encode_continuation(self._tokenizer, text, parse_special=parse_special)
        else:
            tokens = self._tokenizer.encode(text, add_special=False, parse_special=parse_special)
        return list(map(int, tokens))
