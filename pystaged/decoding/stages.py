"""Display of stages: their names and colours, and the spans of a text that each proposed."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pystaged.decoding.tree import Stage

if TYPE_CHECKING:
    from pystaged.stats import GenerationStats

STAGE_NAMES = {
    Stage.TARGET: "target",
    Stage.DRAFT: "draft",
    Stage.NGRAM: "n-gram",
    Stage.CONFIRMED: "confirmed",
    Stage.GRAMMAR: "grammar",
}
STAGE_COLORS = {
    Stage.TARGET: None,
    Stage.DRAFT: "green",
    Stage.NGRAM: "yellow",
    Stage.CONFIRMED: "magenta",
    Stage.GRAMMAR: "cyan",
}


def shown_stages(stats: GenerationStats) -> list[Stage]:
    """The stages to show: grammar only if it forced tokens, confirmed n-grams only if there were any."""
    usual = Stage.TARGET, Stage.DRAFT, Stage.NGRAM
    return [stage for stage in STAGE_NAMES if stage in usual or stats.stages[stage.name.lower()].drafted]


class StageSpans:
    """Assigns parts of a text to the tokens they came from, although text may lag behind tokens."""

    def __init__(self) -> None:
        # Decodes as the stream does; a character belongs to the token that completes it.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting: deque[tuple[str, Stage]] = deque()
        self._last = Stage.TARGET

    def split(self, text: str, words: Iterable[bytes], stages: Iterable[Stage]) -> Iterator[tuple[str, Stage]]:
        """Split the next part of a text by token; yields each token's text and stage.

        Args:
            words: the bytes of the tokens that came with it.
            stages: the stage that proposed each token.
        """
        for word, stage in zip(words, stages, strict=True):
            self._last = stage
            self._waiting.append((self._decoder.decode(word), stage))
        while text:
            if not self._waiting:
                # The replacement of bytes that never became a character.
                yield text, self._last
                return
            new, stage = self._waiting.popleft()
            if len(new) > len(text):
                self._waiting.appendleft((new[len(text) :], stage))
            if taken := text[: len(new)]:
                yield taken, stage
            text = text[len(taken) :]
