"""`pystaged chat --raw`: user and model continue a text in turns."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from pystaged.cli.options import read_text
from pystaged.cli.turns import Turns
from pystaged.config import TextOptions
from pystaged.result import Piece
from pystaged.streams import Stream


class Raw(Turns):
    """A text, as tokens, that each turn continues. Arguments as in Turns."""

    _about = "A line you type is added to the text, which the model then continues; an empty line only continues it.\n"
    _keeps_unanswered = True

    def say(self, text: str) -> None:
        self._turn(text)

    def _begun(self, said: str) -> list[int]:
        if not said:
            return list(self._so_far)
        begun = "\n" if self._so_far and not self._text().endswith("\n") else ""
        # A vocabulary's bos or space is added only at the beginning.
        return [*self._so_far, *self._engine.encode(begun + said, add_special=not self._so_far).tolist()]

    def _stream(self, begun: list[int], options: TextOptions) -> Stream:
        return self._engine.stream(begun, **options)

    def _ended(self, begun: list[int], pieces: Sequence[Piece]) -> list[int]:
        return [*begun, *(token for piece in pieces for token in piece.tokens)]

    def _text(self) -> str:
        """The text of the tokens, without an incomplete character at the end."""
        data = b"".join(map(self._engine.tokenizer.token_bytes, self._so_far))
        return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)

    def _saved(self) -> str:
        return self._text()

    def _load_from(self, path: Path) -> str:
        tokens = self._engine.encode(read_text(str(path)), add_special=True).tolist()
        self._begin(tokens, [*self._earlier, (self._so_far, self._asked)])
        return f"{len(tokens)} tokens"
