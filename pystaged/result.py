"""Results of a generation."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DeviceError
from pystaged.chat.turn import calls_of
from pystaged.decoding.tree import Stage, TokenTree
from pystaged.stats import GenerationStats

if TYPE_CHECKING:
    from pystaged.decoding.origin import Origin
    from pystaged.receipts.receipt import Receipt

# By finish_reason, what ended a text before its end.
_CUT = {
    "length": "it was cut at max_tokens or by a full context",
    "loop": "it was cut where it repeats itself (stop_loops)",
    "cancelled": "it was cancelled",
}
FinishReason = Literal["stop", "length", "loop", "cancelled"]


class DeviceLostError(DeviceError):
    """A device failed during a generation. prompt: as given; text, tokens: the new text and tokens so far."""

    def __init__(self, message: str, prompt: str | list[int], text: str, tokens: list[int]) -> None:
        super().__init__(message)
        self.prompt = prompt
        self.text = text
        self.tokens = tokens

    def __reduce__(self) -> tuple[type[DeviceLostError], tuple[str, str | list[int], str, list[int]]]:
        return type(self), (str(self), self.prompt, self.text, self.tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The model's log-probability of a token: unfiltered, at temperature 1, before any penalty or bias.

    token: its id. text: its text, with U+FFFD for parts of a character. logprob: natural logarithm. top: the likeliest
    tokens at its position, best first, whose own `top` is empty.
    """

    token: int
    text: str
    logprob: float
    top: list[TokenLogprob] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All but `top`, for JSON."""
        return {"token": self.token, "text": self.text, "logprob": self.logprob}


class Piece(str):
    """The text of one step of a stream, a string with attributes. tokens: the step's new tokens; stages: the stage that
    proposed each. tree: the verified tree; path: its accepted nodes, root first. logprobs: those of the tokens; None if
    not asked for.

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
    """A model's log-probabilities of a text.

    tokens: ids of its n tokens. pieces: the bytes of each token. logprobs: float64[n], the natural log of each token's
    probability after the tokens before it, unfiltered, at temperature 1; NaN for the first.
    """

    tokens: list[int]
    pieces: list[bytes]
    logprobs: NDArray[np.float64]

    @property
    def total(self) -> float:
        """Sum of the log-probabilities."""
        return float(np.nansum(self.logprobs))

    def _repr_html_(self) -> str:
        from pystaged.integrations.notebook import score_html  # noqa: PLC0415

        return score_html(self.pieces, self.logprobs, self.total)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The result of a generation; its str() is its text, and notebooks show it in the colours of the stages.

    text: the new text, without the stop string. tokens: ids of the new tokens, without the end token; stages: the stage
    that proposed each; pieces: the bytes of each. If a text is cut inside a character, `tokens` has the character's
    beginning and `text` has not.
    finish_reason: "stop" for an end token or a stop string, "length" for max_tokens or a full context, "loop" for a
    text that repeats itself (see stop_loops), "cancelled" for a stream that was closed early.
    seed: given or drawn.
    logprobs: one per token, None if not asked for; prompt_logprobs: one per prompt token from prompt_logprobs_start on,
    except the prompt's first, or None.
    origin: inputs of the text, for `receipt`; None for a result that no Engine made.
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
        """Inputs of the text, to generate it again elsewhere and compare. The first one reads the model's file.

        Raises:
            ValueError: the text was cancelled, or not generated by an Engine.
            OSError: the model's file cannot be read, or was changed since it was loaded.
        """
        from pystaged.receipts.receipt import Receipt  # noqa: PLC0415

        if self.origin is None:
            raise ValueError("only texts generated by an Engine have receipts")
        return Receipt.of(self.origin, self.text, self.tokens, self.finish_reason)

    @property
    def message(self) -> dict[str, Any]:
        """The text as a message for the next `chat`, with its tokens, so that they are not prefilled again."""
        return {"role": "assistant", "content": self.text, "tokens": list(self.tokens)}

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The whole tool calls in an answer of the Hermes format, in OpenAI's format."""
        return [
            {"id": f"call_{i}", "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for i, call in enumerate(calls_of(self.text))
        ]

    def to_dict(self) -> dict[str, Any]:
        """The text with tokens, stages and figures, for JSON; and the tokens' log-probabilities if it has them."""
        fields = {name: getattr(self, name) for name in ("text", "tokens", "finish_reason", "seed")}
        fields |= {"stages": [stage.name.lower() for stage in self.stages], "stats": self.stats.to_dict()}
        if self.logprobs is not None:
            fields["logprobs"] = [
                each.to_dict() | {"top": [top.to_dict() for top in each.top]} for each in self.logprobs
            ]
        return fields

    def json(self) -> Any:
        """Parse the text as JSON, such as one with a json_schema.

        Raises:
            ValueError: it is no JSON; the message says what cut it.
        """
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            why = _CUT.get(self.finish_reason, error)
            raise ValueError(f"the text of {len(self.tokens)} tokens is no whole JSON: {why}") from None

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from pystaged.integrations.notebook import result_html  # noqa: PLC0415

        figures = f"{self.stats}; finish_reason {self.finish_reason!r}, seed {self.seed}"
        return result_html(self.text, self.pieces, self.stages, self.stats, figures)


class Results(list[GenerationResult]):
    """A list of results, with HTML for notebooks."""

    def _repr_html_(self) -> str:
        return "<hr>".join(each._repr_html_() for each in self)
