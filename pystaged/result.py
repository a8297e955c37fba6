"""What a generation gives back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DeviceError
from pystaged.chat.tools import split_tool_calls
from pystaged.decoding.tree import Stage, TokenTree
from pystaged.stats import GenerationStats

if TYPE_CHECKING:
    from pystaged.receipt import Origin, Receipt

FinishReason = Literal["stop", "length", "loop", "cancelled"]


class DeviceLostError(DeviceError):
    """A device failed in the middle of a generation. prompt, text and tokens: what there was by then; tokens are the
    new ones."""

    def __init__(self, message: str, prompt: str | list[int], text: str, tokens: list[int]) -> None:
        super().__init__(message)
        self.prompt = prompt
        self.text = text
        self.tokens = tokens

    def __reduce__(self) -> tuple[type[DeviceLostError], tuple[str, str | list[int], str, list[int]]]:
        return type(self), (str(self), self.prompt, self.text, self.tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model itself found a token: unfiltered, at temperature 1, before any penalty or bias.

    token: its id. text: the same as text, with U+FFFD where it is a part of a character. logprob: natural. top: the
    likeliest tokens at its place, best first, themselves without `top`.
    """

    token: int
    text: str
    logprob: float
    top: list[TokenLogprob] = field(default_factory=list)


class Piece(str):
    """Text as it comes from a stream: a string that knows the new tokens it came with, and who proposed each; the tree
    that was verified for it, and the accepted nodes of that, root first; and, if that was asked for, how likely the
    model found each token.

    A character is never split over two pieces, so a piece may be empty while its tokens are not.
    """

    __slots__ = ("logprobs", "path", "stages", "tokens", "tree")
    tokens: tuple[int, ...]
    stages: tuple[Stage, ...]
    tree: TokenTree
    path: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None

    def __new__(
        cls,
        text: str,
        tokens: tuple[int, ...],
        stages: tuple[Stage, ...],
        tree: TokenTree,
        path: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None = None,
    ) -> Piece:
        piece = super().__new__(cls, text)
        piece.tokens, piece.stages, piece.tree, piece.path = tokens, stages, tree, path
        piece.logprobs = logprobs
        return piece

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.tokens, self.stages, self.tree, self.path, self.logprobs

    @property
    def text(self) -> str:
        """The text as a plain string."""
        return str(self)


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds a text.

    tokens: its token ids. pieces: the bytes of each, as the vocabulary spells it. logprobs: float64[n], the natural log
    of each token's probability after those before it, unfiltered at temperature 1; NaN for the first.
    """

    tokens: list[int]
    pieces: list[bytes]
    logprobs: NDArray[np.float64]

    @property
    def total(self) -> float:
        """Sum of the log-probabilities."""
        return float(np.nansum(self.logprobs))

    def _repr_html_(self) -> str:
        from pystaged.notebook import score_html  # noqa: PLC0415

        return score_html(self.pieces, self.logprobs, self.total)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A generation; its str() is its text, and notebooks show it in the colours of the stages.

    text: without the prompt and without the stop string. tokens: the new ones only, end of text left out; stages: who
    proposed each of them; pieces: the bytes of each. Where a text is cut inside a character, the tokens have its
    beginning and the text has not.
    finish_reason: "stop" for end of text or a stop string, "length" for max_tokens or a full context, "loop" for a text
    that repeats itself (see stop_loops), "cancelled" for a stream that was closed early.
    seed: of the sampling, given or drawn.
    logprobs: of each token, None where they were not asked for; prompt_logprobs: of each of the prompt's but the first.
    origin: what the text was made of, for `receipt`; None for a result that no Engine made.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    seed: int
    stats: GenerationStats = field(repr=False)
    stages: list[Stage] = field(repr=False)
    pieces: list[bytes] = field(repr=False)
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)
    prompt_logprobs: list[TokenLogprob] | None = field(default=None, repr=False)
    origin: Origin | None = field(default=None, repr=False, compare=False)

    @property
    def receipt(self) -> Receipt:
        """What another machine needs to make the same text and compare; the model's file is read for it, once.

        Raises:
            ValueError: the text was cancelled, or not written by an Engine.
            OSError: the model's file cannot be read, or is another one than was loaded.
        """
        from pystaged.receipt import Receipt  # noqa: PLC0415

        if self.origin is None:
            raise ValueError("only texts that an Engine has written have receipts")
        return Receipt.of(self.origin, self.text, self.tokens, self.finish_reason)

    @property
    def message(self) -> dict[str, Any]:
        """The text as an answer in a conversation, with its tokens, so that going on reads nothing again."""
        return {"role": "assistant", "content": self.text, "tokens": list(self.tokens)}

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools in an answer of the Hermes form, as OpenAI's interface has them; see split_tool_calls."""
        return split_tool_calls(self.text)[1]

    def json(self) -> Any:
        """The value that a text written to a JSON schema spells. Raises ValueError where it was cut, or is no JSON."""
        return json.loads(self.text)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from pystaged.notebook import result_html  # noqa: PLC0415

        figures = f"{self.stats}; finish_reason {self.finish_reason!r}, seed {self.seed}"
        return result_html(self.text, self.pieces, self.stages, self.stats, figures)


class Results(list[GenerationResult]):
    """Several generations: a list that notebooks show as they show each."""

    def _repr_html_(self) -> str:
        return "<hr>".join(each._repr_html_() for each in self)
