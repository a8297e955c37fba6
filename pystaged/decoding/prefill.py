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
    for no log-probabilities. first_scored: index of the first token with log-probabilities, at least 1. logprobs: the
    results, for each prompt token from that one on.
    """

    reuse: bool = True
    prediction: Sequence[int] = ()
    num_top: int | None = None
    first_scored: int = 1
    logprobs: list[Logprobs] = field(default_factory=list)

    def most_reused(self, length: int) -> int:
        """Most tokens that a prompt of `length` tokens may take from a context."""
        if not self.reuse:
            return 0
        # A token is scored when the one before it is evaluated.
        return length - 1 if self.num_top is None else min(length, self.first_scored) - 1

    def read(self, session: Session, tokens: NDArray[np.int32], following: NDArray[np.int32], at: int) -> Requests[int]:
        """Prefill one piece of a prompt; returns its number of tokens.

        Args:
            tokens, following: int32[n], the tokens to read, and the token after each.
            at: number of the tokens that the session holds.
        """
        num_unscored = len(tokens) if self.num_top is None else self.first_scored - 1
        if at < num_unscored:
            done = yield Read(session, at, tokens[at:num_unscored])
        else:
            piece = slice(at, at + _SCORED_ROWS)
            sampling = SamplingConfig().native_sampling(None, self.num_top)
            request = Score(session, at, tokens[piece], following[piece], sampling)
            done = yield request
            self.logprobs += request.logprobs
        read: int = done.result
        return read
