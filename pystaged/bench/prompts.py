"""Prompts for benchmarks: questions by category, from HumanEval's, Spec-Bench's or the package's files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Tokenizer
from pystaged.chat.format import ChatFormat
from pystaged.loading import names
from pystaged.loading.metadata import read_metadata
from pystaged.platform.files import lines_of, read_small

OWN = Path(__file__).with_name("prompts.jsonl")
MISLEADING = Path(__file__).with_name("misleading.jsonl")
CODE = "code"
_MOST_BYTES = 1 << 26  # largest file of prompts
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
    """Read questions from a file of JSON objects, one a line: HumanEval's, with a `prompt`, or Spec-Bench's, with a
    `category` and `turns`, of which the first is used.

    Raises:
        ValueError: a line is something else, or the file is not a regular one of at most 64 MiB.
    """
    found = []
    for where, line in lines_of(path, read_small(path, _MOST_BYTES)):
        try:
            found.append(_question(json.loads(line)))
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise ValueError(f"{where}: not a JSON object with a 'prompt', or with 'category' and 'turns'") from error
    return found


def choose(model: Path, file: Path | None, most: int | None = None) -> tuple[Path, list[Prompt]]:
    """The prompts for a model, and their file. Any first part of the list covers the categories evenly, and each
    category's questions in random order.

    Args:
        model: its file.
        file: see load_questions; None for the package's: questions if the model chats, else code.
        most: largest number of prompts.

    Raises:
        ValueError: as in load_questions, or the file has no prompts.
    """
    chats = bool(read_metadata(model).get("tokenizer.chat_template"))
    file = file or (OWN if chats else names.bundled_file(names.BUNDLED_PROMPTS))
    questions = _in_turn(load_questions(file))[:most]
    if not questions:
        raise ValueError(f"{file} has no prompts")
    return file, _encoded(questions, model)


def misleading(model: Path) -> list[Prompt]:
    """Prompts for which drafts are mostly wrong."""
    return _encoded(load_questions(MISLEADING), model)


def _question(line: Any) -> Question:
    if "prompt" in line:
        return Question(_text(line["prompt"]), CODE, is_message=False)
    category = _text(line["category"])
    return Question(_text(line["turns"][0]), _KINDS.get(category, category), is_message=True)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
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
