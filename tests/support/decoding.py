"""Drafters and contexts, a call at a time, with a pass of its own for each request."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

import pystaged.decoding.text
from pystaged._core import Tokenizer
from pystaged.decoding import stepper
from pystaged.decoding.context import Context
from pystaged.decoding.drafter import Drafter, fulfil_all
from pystaged.decoding.requests import Clocks, fulfil
from pystaged.decoding.stepper import Stepper
from pystaged.decoding.text import Phase, TokenRoles
from pystaged.decoding.tree import TokenTree
from pystaged.drafting.table import NgramTable
from pystaged.options.config import GenerationConfig, SamplingConfig
from pystaged.result import Piece


def drafted(drafter: Drafter, *arguments: Any, clocks: Clocks | None = None) -> TokenTree:
    """The tree of Drafter.draft."""
    drafter.draft(*arguments)
    fulfil_all(drafter, clocks)
    return drafter.tree


def table_of(prompts: Sequence[NDArray[np.int32]], tokenizer: Tokenizer) -> NgramTable:
    """Of all that some prompts hold."""
    return NgramTable.build(
        prompts, vocab_size=tokenizer.num_tokens, vocab_hash=tokenizer.fingerprint, max_successors=8, min_count=1
    )


def text_of(
    prompt: NDArray[np.int32],
    sampling: SamplingConfig | None = None,
    max_tokens: int = 10**6,
    *,
    is_end: Any = None,
    speculate: bool = True,
    progress: Any = None,
    **fields: Any,
) -> pystaged.decoding.text.Text:
    """A text of tokens alone."""
    config = GenerationConfig(
        max_tokens=max_tokens, speculate=speculate, progress=progress, sampling=sampling or SamplingConfig()
    )
    return pystaged.decoding.text.Text(prompt.tolist(), prompt, config, roles=TokenRoles(is_end=is_end), **fields)


def generate(context: Context, *arguments: Any, **options: Any) -> Generator[Piece, None, None]:
    """What the steps of a text add, decoded alone; arguments as of `text_of`."""
    return stepper.generate(context, text_of(*arguments, **options))


class Said:
    """The pieces of a text, which tells of its prompt at once."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def put(self, item: Any) -> None:
        if callable(item[1]):
            item[1]()
        else:
            self.pieces.append(item[1])


_texts = WeakKeyDictionary[Context, Any]()


def started(context: Context, prompt: NDArray[np.int32], **options: Any) -> int:
    """Read a prompt; returns the number of tokens that the context held already."""
    text = _texts[context] = text_of(prompt, queue=Said(), **options).begin(context)
    while text._phase is not Phase.STEP:
        if request := (text._drafter and text._drafter.request()) or text._go_on():
            fulfil([request], context.clocks)
            text.request = request
            text.take()
        if text.error is not None:
            raise text.error
    return text.reused


def stepped(context: Context, sampling: SamplingConfig, max_tokens: int) -> Piece:
    """One step after `started`."""
    text, said = _texts[context], Said()
    text.sampling, text.config = sampling, GenerationConfig(max_tokens=max_tokens)
    text.context, text.tokens, text.queue, text.error, text.finish = context, [], said, None, None
    text.request, text._phase = None, Phase.STEP
    while not said.pieces:
        Stepper(None, clocks=context.clocks).step([text])
        if text.error is not None:
            raise text.error
    return said.pieces[0]


class Text:
    """A text of a batch: what it says, and how it ends."""

    def __init__(self, context: Any, *arguments: Any, **options: Any) -> None:
        self.context, self._said = context, Said()
        self.error: BaseException | None = None
        self.is_over = False
        self.text: Any = context  # which is simulated
        if arguments:
            self.text = text_of(*arguments, queue=self._said, **options).begin(context)

    @property
    def steps(self) -> list[Piece]:
        return self._said.pieces

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    def end(self) -> None:
        self.is_over, self.error = True, self.text.error
        self.text.end()


def step(of: Stepper, texts: Sequence[Text]) -> None:
    """Step texts of a batch that are not over."""
    texts = [text for text in texts if not text.is_over]
    of.step([text.text for text in texts])
    for text in texts:
        if text.text.error is not None or text.text.finish:
            text.end()
