"""The steps that decoding yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.tree import Stage, TokenTree

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities at the position of a token, from the model's unmodified logits at temperature 1.

    of_token: that of the token itself. top: the likeliest tokens and their log-probabilities, best first.
    """

    of_token: float
    top: list[tuple[int, float]]

    @staticmethod
    def of(of_tokens: NDArray[np.float32], best: NDArray[np.int32], of_best: NDArray[np.float32]) -> list[Logprobs]:
        """Convert the arrays that Session.verify returns."""
        tops = zip(best.tolist(), of_best.tolist(), strict=True)
        return [Logprobs(own, list(zip(*top, strict=True))) for own, top in zip(of_tokens.tolist(), tops, strict=True)]


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens that one step adds to a sequence.

    tokens: emitted tokens; stages: the stage that proposed each. tree: the verified tree; path: its accepted nodes,
    root first. verify_seconds: wall time of the verify pass; speedup: estimate over plain decoding of the same tokens
    in the same batch, 0 without measured costs. pass_rows: rows of the whole pass; pass_texts: sequences that took a
    step in it. logprobs: those of each token; None if not asked for.
    finish_reason: in the last step "stop" for an end token, "length" for max_tokens or a full context, else None.
    """

    tokens: list[int]
    stages: list[Stage]
    tree: TokenTree
    path: list[int]
    verify_seconds: float
    speedup: float
    pass_rows: int
    pass_texts: int
    finish_reason: FinishReason | None = None
    logprobs: list[Logprobs] | None = None
