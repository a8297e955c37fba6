"""Drafters and contexts, a call at a time, with a pass of its own for each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.decoder import Decoder, Phase
from pystaged.decoding.drafter import Drafter, fulfil_all
from pystaged.decoding.requests import Clocks, fulfil
from pystaged.decoding.step import Step
from pystaged.decoding.stepper import Stepper
from pystaged.decoding.tree import TokenTree
from pystaged.options.config import SamplingConfig


def drafted(drafter: Drafter, *arguments: Any, clocks: Clocks | None = None) -> TokenTree:
    """The tree of Drafter.draft."""
    drafter.draft(*arguments)
    fulfil_all(drafter, clocks)
    return drafter.tree


def started(decoder: Decoder, prompt: NDArray[np.int32], **options: Any) -> int:
    """Read a prompt; returns the number of tokens that the context held already."""
    decoder.begin(prompt, SamplingConfig(), 10**6, **options)
    while request := decoder._next_read():
        fulfil(request, decoder.clocks)
        decoder.request = request
        decoder.take()
        if isinstance(decoder.outcome, BaseException):
            raise decoder.outcome
    return decoder.reused


def stepped(decoder: Decoder, sampling: SamplingConfig, max_tokens: int) -> Step:
    """One step after `started`."""
    decoder.sampling, decoder.left = sampling, max_tokens
    decoder.request, decoder._phase = None, Phase.STEP
    stepper, outcome = Stepper(None, clocks=decoder.clocks), None
    while outcome is None:
        (outcome,) = stepper.step([decoder])
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class Text:
    """A text of a batch: what it says, and how it ends."""

    def __init__(self, decoder: Decoder, *arguments: Any) -> None:
        self.decoder = decoder
        self.steps, self.error, self.is_over = list[Any](), None, False
        if arguments:
            decoder.begin(*arguments)

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    def end(self) -> None:
        self.is_over = True
        self.decoder.end()


def step(stepper: Stepper, texts: Sequence[Text]) -> None:
    """Step texts of a batch that are not over."""
    texts = [text for text in texts if not text.is_over]
    for text, outcome in zip(texts, stepper.step([text.decoder for text in texts]), strict=True):
        if isinstance(outcome, BaseException):
            text.error = outcome
            text.end()
        elif outcome:
            text.steps.append(outcome)
            if outcome.finish_reason:
                text.end()
