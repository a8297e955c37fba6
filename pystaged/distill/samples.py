"""Text that a model writes, to count its n-gram table on."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import count, takewhile

import numpy as np
from numpy.typing import NDArray

from pystaged.chat.format import ChatFormat
from pystaged.decoding.readers import results
from pystaged.decoding.text import Text
from pystaged.engine import Engine
from pystaged.options.config import GenerationConfig

_LONGEST_QUESTION, _LONGEST_TEXT = 128, 256  # tokens; trigrams need no longer ones
_MOST_EMPTY = 64  # texts in a row that are empty, or questions that are known
_AT_ONCE = 16  # texts, and questions; more gain little, and Ctrl-C loses those that are not at their end


def sampled_texts(
    engine: Engine, temperature: float | None = None, seed: int = 0
) -> Generator[NDArray[np.int32], None, None]:
    """Texts without end, many side by side: documents, or answers of a model that chats to questions of its own.
    Prompted with the beginning of a user's turn, it writes a question (Xu et al. 2024, arXiv 2406.08464).

    Args:
        temperature: above 0; every second answer is greedy. By default 1 for questions and answers, and 1.5 for
            documents, for more varied text (Spector & Ré 2023, arXiv 2308.04623).
        seed: the same seed gives the same texts; from 0 to 2**32 - 1.

    Yields:
        int32[n], one text each.

    Raises:
        ValueError: at once: as user_opening, or no token can begin a document; later: the model repeats its questions,
            or writes nothing.
        ChatTemplateError: at once: the template cannot be used.
        ContextFullError: the model's context is too short for a question.
    """
    chats, ends = engine.tokenizer.metadata.get("tokenizer.chat_template"), engine.tokenizer.end_tokens.tolist()
    if not (chats or ends):
        raise ValueError(f"{engine.file.path} has no token that ends a text, so none to begin with")
    opening, usual, write = (user_opening(engine.chat_format), 1.0, _answers) if chats else ([max(ends)], 1.5, _begun)
    return _written(write(engine, opening, usual if temperature is None else temperature, seed << 32))


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


def _written(texts: Iterator[Text]) -> Generator[NDArray[np.int32], None, None]:
    """The tokens of texts."""
    empty = 0
    for result in results(texts, _AT_ONCE):
        empty = 0 if result.tokens else empty + 1
        if empty == _MOST_EMPTY:
            raise ValueError("the model writes nothing; try another seed or a higher temperature")
        yield np.array(result.tokens, np.int32)


def _begun(
    engine: Engine, opening: list[int], temperature: float, seed: int, most: int = _LONGEST_TEXT
) -> Iterator[Text]:
    """Texts of at most so many tokens after the same opening, by every second seed."""
    for i in count(seed, 2):
        yield engine.start(opening, GenerationConfig(max_tokens=most, temperature=temperature, seed=i))


def _answers(engine: Engine, opening: list[int], temperature: float, seed: int) -> Iterator[Text]:
    """Answers to different questions, with the seeds between those of the questions."""
    chat_format, known, repeated = engine.chat_format, {""}, 0
    for i, found in enumerate(results(_begun(engine, opening, temperature, seed, _LONGEST_QUESTION), _AT_ONCE)):
        question = found.text.strip()
        repeated = repeated + 1 if question in known else 0
        if repeated == _MOST_EMPTY:
            raise ValueError("the model repeats its questions; try another seed or a higher temperature")
        if not repeated:
            known.add(question)
            prompt, warmth = chat_format.encode([{"role": "user", "content": question}]), temperature * (len(known) % 2)
            options = {"max_tokens": _LONGEST_TEXT, "temperature": warmth, "seed": seed + 2 * i + 1}
            yield engine.start(prompt, GenerationConfig(**options, stop=chat_format.stop))
