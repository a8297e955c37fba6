"""Prefill of a sequence's prompt, and the options for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.config import SamplingConfig
from pystaged.decoding.requests import Read, Requests, Score
from pystaged.decoding.step import Logprobs

_SCORED_ROWS = 64  # rows of a pass that scores; few, because each row has logits


@dataclass(slots=True)
class Prefill:
    """Options and results of one sequence's prefill.

    reuse: keep the prefix of the prompt that the context holds. prediction: tokens that drafters may expect after the
    prompt. num_top: number of the likeliest alternatives to each prompt token whose log-probabilities are wanted; None
    for no log-probabilities. logprobs: the results, for each prompt token but the first.
    """

    reuse: bool = True
    prediction: Sequence[int] = ()
    num_top: int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.num_top is not None:
            self.reuse = False  # a token is scored when the one before it is evaluated

    def read(self, session: Session, tokens: NDArray[np.int32], following: NDArray[np.int32], at: int) -> Requests[int]:
        """Prefill one piece of a prompt; returns its number of tokens.

        Args:
            tokens, following: int32[n], the tokens to read, and the token after each.
            at: number of the tokens that the session holds.
        """
        if self.num_top is None:
            done = yield Read(session, at, tokens[at:])
        else:
            piece = slice(at, at + _SCORED_ROWS)
            sampling = SamplingConfig().native_sampling(None, self.num_top)
            request = Score(session, at, tokens[piece], following[piece], sampling)
            done = yield request
            self.logprobs += request.logprobs
        read: int = done.result
        return read
