"""Samples text from a model, many texts in one pass, to count its n-gram table on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import pystaged
from pystaged._core import Model, Sampling, Session, Tokenizer, Work, run
from pystaged.decoding.readers import results
from pystaged.options.config import GenerationConfig

if TYPE_CHECKING:
    from pystaged.chat.format import ChatFormat
    from pystaged.engine import Engine

_PER_CONTEXT = 16  # texts that fill a context; trigrams need no longer ones
_SIDE_BY_SIDE = 64  # texts in one pass
_LONGEST_QUESTION, _LONGEST_ANSWER = 128, 256


@contextmanager
def sampled_texts(
    path: Path,
    tokenizer: Tokenizer,
    num_tokens: int,
    temperature: float | None,
    seed: int,
    threads: int,
    report: Callable[[str], None],
) -> Iterator[Iterator[NDArray[np.int32]]]:
    """Answers of a model with a chat template, or documents of another one; see there. By default the temperature is 1
    for answers and 1.5 for documents. Raises ValueError for a model without a token to begin a document with."""
    if tokenizer.metadata.get("tokenizer.chat_template"):
        warmth = 1.0 if temperature is None else temperature
        with (
            pystaged.load(path, draft=None, recycle=False, num_threads=threads, report=report) as engine,
            closing(sample_answers(engine, num_tokens, temperature=warmth, seed=seed)) as answers,
        ):
            yield answers
        return
    if not len(tokenizer.end_tokens):
        raise ValueError(f"{path} has no token that ends a text, so none to begin with")
    model = Model(os.fsencode(path), os.environ.get("PYSTAGED_KERNEL", ""), threads)
    warmth = 1.5 if temperature is None else temperature
    yield sample_documents(model, max(tokenizer.end_tokens), num_tokens, temperature=warmth, seed=seed)


def sample_documents(
    model: Model, start: int, num_tokens: int, *, temperature: float, seed: int = 0
) -> Iterator[NDArray[np.int32]]:
    """Sample texts that begin after a token.

    Args:
        start: the token before each text, normally the end of text.
        num_tokens: least number of tokens in all; the number of texts is a multiple of 16.
        temperature: 1.5 in Spector & Ré 2023 (arXiv 2308.04623), for more varied text.
        seed: the same seed gives the same text; from 0 to 2**32 - 1.

    Yields:
        int32[n], one text each.

    The caller checks temperature and seed by check_sampling.
    """
    sessions = [Session(model)]
    length = max(2, sessions[0].n_ctx // _PER_CONTEXT)
    number = _PER_CONTEXT * -(-num_tokens // (_PER_CONTEXT * length))
    sessions += [Session(model) for _ in range(1, min(_SIDE_BY_SIDE, number))]
    try:
        for first in range(0, number, len(sessions)):
            samplings = [
                Sampling(temperature, seed=(seed << 32) + length * document)
                for document in range(first, min(first + len(sessions), number))
            ]
            texts = np.full((len(samplings), length + 1), start, np.int32)
            for session in sessions:
                session.rewind(0)
            for depth in range(length):
                works = [
                    Work.verify(session, [token], [-1], sampling)
                    for session, token, sampling in zip(sessions, texts[:, depth].tolist(), samplings, strict=False)
                ]
                texts[:, depth + 1] = [found[1][0] for found in run(works) if found]
            yield from texts[:, 1:]
    finally:
        for session in sessions:
            session.close()


def sample_answers(
    engine: Engine, num_tokens: int, *, temperature: float, seed: int = 0
) -> Generator[NDArray[np.int32], None, None]:
    """Sample a chat model's answers to its own questions: prompted with the beginning of a user's turn, it writes a
    question (Xu et al. 2024, arXiv 2406.08464).

    Args:
        num_tokens: least number of tokens of all answers. They are sampled in groups of 64, or fewer where a question
            is empty or a repetition.
        temperature: of the questions and of every other answer; the other answers are greedy.
        seed: the same seed gives the same text; from 0 to 2**32 - 1.

    Yields:
        int32[n], one answer each.

    Raises:
        ValueError: at once as user_opening; or the model repeats its questions, or its answers are empty.
        ChatTemplateError: at once: the template cannot be used.
        ContextFullError: the model's context is too short for a question.
    """
    return _answered(engine, user_opening(engine.chat_format), num_tokens, temperature, seed << 32)


def user_opening(chat_format: ChatFormat) -> list[int]:
    """The tokens before a user's first message.

    Raises:
        ValueError: the template writes none.
        ChatTemplateError: the template cannot be used.
    """
    one, other = (chat_format.encode([{"role": "user", "content": word}]).tolist() for word in ("a", "b"))
    opening = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
    if not opening:
        raise ValueError("the model's chat template writes nothing before a message, so questions have no prompt")
    return opening


def _answered(
    engine: Engine, opening: list[int], num_tokens: int, temperature: float, seed: int
) -> Generator[NDArray[np.int32], None, None]:
    chat_format, written, asked = engine.chat_format, 0, {""}
    for first in count(seed, 2 * _SIDE_BY_SIDE):
        found = engine.generate(
            opening, n=_SIDE_BY_SIDE, max_tokens=_LONGEST_QUESTION, temperature=temperature, seed=first
        )
        questions = [text for text in dict.fromkeys(result.text.strip() for result in found) if text not in asked]
        asked.update(questions)
        texts = []
        for i, question in enumerate(questions, first + _SIDE_BY_SIDE):  # seeds, all different
            prompt, warmth = chat_format.encode([{"role": "user", "content": question}]), 0 if i % 2 else temperature
            config = GenerationConfig(max_tokens=_LONGEST_ANSWER, temperature=warmth, seed=i, stop=chat_format.stop)
            texts.append(engine.start(prompt, config))
        before = written
        for answer in results(texts):
            written += len(answer.tokens)
            yield np.array(answer.tokens, np.int32)
        if written == before:
            raise ValueError(
                "the model repeats its questions, or its answers are empty; try another seed or a higher temperature"
            )
        if written >= num_tokens:
            return


def check_sampling(temperature: float, seed: int) -> None:
    """Raise ValueError if the temperature or seed of sample_documents or sample_answers is out of range."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, or all texts are the same; not {temperature}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, not {seed}")
