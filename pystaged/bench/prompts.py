"""Prompts for benchmarks: questions by category, from HumanEval's, Spec-Bench's or the package's files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Tokenizer
from pystaged.chat.format import ChatFormat
from pystaged.chat.prompts import read_prompts
from pystaged.engine import Engine
from pystaged.loading import names
from pystaged.loading.metadata import read_metadata
from pystaged.platform.files import lines_of, read_small

OWN = Path(__file__).with_name("prompts.jsonl")
MISLEADING = Path(__file__).with_name("misleading.jsonl")
CODE = "code"
_MOST_BYTES = 1 << 26  # of a file of prompts
_CONVERSATION = "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"
# Spec-Bench's file gives the eight categories of its first kind, MT-Bench, in place of the kind.
_KINDS = dict.fromkeys(_CONVERSATION, "conversation") | {
    "qa": "question answering",
    "math_reasoning": "math reasoning",
    "rag": "retrieval",
}


@dataclass(frozen=True, slots=True)
class Question:
    """A text to continue.

    is_message: whether it is a user's message for a chat, or else text for the model to continue.
    """

    text: str
    category: str
    is_message: bool


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The tokens of a question, int32[n]."""

    tokens: NDArray[np.int32]
    category: str


def load_questions(path: Path) -> list[Question]:
    """Read questions from a file of JSON objects, one a line, whatever its name: HumanEval's, with a `prompt`, or
    Spec-Bench's, with a `category` and `turns`, of which the first is used.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is something else, there is none, or the file is not a regular one of at most 64 MiB.
    """
    found = []
    for where, line in lines_of(path, read_small(path, _MOST_BYTES)):
        try:
            found.append(_question(json.loads(line)))
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            words = "not a JSON object with a 'prompt', or with 'category' and 'turns'"
            raise ValueError(f"{where}: {words}") from None
    if not found:
        raise ValueError(f"{path} has no prompts")
    return found


def choose(model: Path, file: Path | None, most: int | None = None) -> tuple[Path, list[Prompt]]:
    """The prompts for a model, and their file. Any first part of the list covers the categories evenly, and each
    category's questions in random order.

    Args:
        model: its file.
        file: see load_questions; None for the package's: questions if the model chats, else code.
        most: largest number of prompts.

    Raises:
        OSError, ValueError: as in load_questions.
    """
    chats = bool(read_metadata(model).get("tokenizer.chat_template"))
    file = file or (OWN if chats else names.bundled_file(names.BUNDLED_PROMPTS))
    return file, _encoded(_in_turn(load_questions(file))[:most], model)


def in_order(engine: Engine, file: Path | None, most: int, report: Callable[[str], None]) -> list[NDArray[np.int32]]:
    """The tokens of the first prompts of a file, or of the package's, for an engine; messages are to be answered or
    continued. Errors and report as in read_prompts."""
    if file is None:
        return [prompt.tokens for prompt in choose(engine.file.path, None, most)[1]]
    return [
        engine.encode(asked.prompt)
        if asked.messages is None
        else engine.chat_format.encode(asked.messages, continues=True)
        for asked in read_prompts(file, report)[:most]
    ]


def misleading(model: Path) -> list[Prompt]:
    """Prompts for which drafts are mostly wrong."""
    return _encoded(load_questions(MISLEADING), model)


def _question(line: Any) -> Question:
    if "prompt" in line:
        return Question(_text(line["prompt"]), CODE, is_message=False)
    category = _text(line["category"])
    if not isinstance(line["turns"], list):
        raise TypeError
    return Question(_text(line["turns"][0]), _KINDS.get(category, category), is_message=True)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    value.encode()
    return value


def _in_turn(questions: Iterable[Question]) -> list[Question]:
    """Take one question of each category in turn, each category's in random order."""
    categories: dict[str, list[Question]] = {}
    for question in questions:
        categories.setdefault(question.category, []).append(question)
    for found in categories.values():
        random.Random(0).shuffle(found)
    return [question for turn in zip_longest(*categories.values()) for question in turn if question]


def _encoded(questions: Iterable[Question], model: Path) -> list[Prompt]:
    tokenizer, metadata = Tokenizer(os.fsencode(model)), read_metadata(model)
    chat = ChatFormat(metadata, tokenizer, lambda _: None) if metadata.get("tokenizer.chat_template") else None
    return [
        Prompt(
            chat.encode([{"role": "user", "content": question.text}])
            if chat and question.is_message
            else tokenizer.encode(question.text),
            question.category,
        )
        for question in questions
    ]
