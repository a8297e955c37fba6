"""Prompts for benchmarks: questions by category, from HumanEval's, Spec-Bench's or the package's files."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Tokenizer
from pystaged.chat.format import ChatFormat
from pystaged.chat.prompts import Asked, read_prompts
from pystaged.engine import Engine
from pystaged.loading import names
from pystaged.loading.metadata import read_metadata

OWN = Path(__file__).with_name("prompts.jsonl")
MISLEADING = Path(__file__).with_name("misleading.jsonl")
CODE = "code"
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
    """Read questions from a file as in read_prompts, such as HumanEval's, of prompts, or Spec-Bench's, of messages with
    a category. Errors as there.
    """
    return [_question(each) for each in read_prompts(path)]


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


def _question(asked: Asked) -> Question:
    if asked.messages is None:
        return Question(asked.prompt, CODE, is_message=False)
    category = str(asked.more.get("category", "conversation"))
    return Question(str(asked.messages[-1].get("content")), _KINDS.get(category, category), is_message=True)


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
