"""How a text begins: how its prompt is read, and what is expected to follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.config import SamplingConfig
from pystaged.decoding.requests import Read, Requests, Score
from pystaged.decoding.step import Logprobs

_SCORED_ROWS = 64  # of a pass; each has logits


@dataclass(slots=True)
class Prefill:
    """How the prompt of one text is read.

    reuse: begin with what the context holds already. prediction: tokens that drafters may expect after the prompt.
    num_top: of how many likeliest tokens at the place of each of the prompt to say log-probabilities, which are then in
    `logprobs`, the first token aside; None for nothing.
    """

    reuse: bool = True
    prediction: Sequence[int] = ()
    num_top: int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.num_top is not None:
            self.reuse = False  # a token is judged when the one before it is read

    def read(self, session: Session, tokens: NDArray[np.int32], following: NDArray[np.int32], at: int) -> Requests[int]:
        """Read a piece of a prompt; returns how many tokens were read.

        Args:
            tokens, following: int32[n], those to read, and the token after each.
            at: how many of them the session holds.
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
