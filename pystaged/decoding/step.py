"""What the loop yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.tree import Stage, TokenTree

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities at the place of a token, as the model has them: logits as they are, at temperature 1.

    of_token: its own. top: the likeliest tokens there, best first, and theirs.
    """

    of_token: float
    top: list[tuple[int, float]]

    @staticmethod
    def of(of_tokens: NDArray[np.float32], best: NDArray[np.int32], of_best: NDArray[np.float32]) -> list[Logprobs]:
        """As Session.verify has them."""
        tops = zip(best.tolist(), of_best.tolist(), strict=True)
        return [Logprobs(own, list(zip(*top, strict=True))) for own, top in zip(of_tokens.tolist(), tops, strict=True)]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step adds to a text.

    tokens; stages: who proposed each. tree: what was verified; path: its accepted nodes, root first. verify_seconds: of
    the verify pass; speedup: over plain decoding of the same tokens in the same batch by the measured costs, 0 where
    none are. pass_rows: of the pass, others' too; pass_texts: texts that took a step in it.
    logprobs: of each token, None where they are not asked for.
    finish_reason: in the last step "stop" for the end of text, "length" for max_tokens or a full context, else None.
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
