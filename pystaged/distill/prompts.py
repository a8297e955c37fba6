"""Prompts for a target: a user's own, or questions made without downloads."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pystaged.chat import prompts
from pystaged.platform.files import open_regular

Messages = list[dict[str, Any]]

LEAST_PROMPTS = 20

_PEOPLE = ["Anna", "Ben", "Carla", "Dan", "Eva", "Finn", "Grace", "Hugo", "Ida", "Jon", "Kira", "Leo", "Mia", "Nina"]
_THINGS = ["apples", "books", "tickets", "marbles", "cookies", "pencils", "eggs", "cars", "flowers", "shirts", "boxes"]
_LANGUAGES = ["German", "French", "Spanish", "Italian", "Portuguese"]
_ROLES = ["pirate", "doctor", "teacher", "king", "robot", "chef", "detective", "poet"]
_SUMMARIES = [
    "Summarize: ",
    "Summarize the following text: ",
    "Give a short summary of this:\n\n",
    "The main points of:\n\n",
]
_SUMS = [
    "{a} has {x} {t} and buys {y} more each day for {z} days. {b} gets half. How many are left?",
    "A shop sells {t} for ${y} each and {u} for ${z} each. {a} buys {x} {t} and {y} {u}. How much does {a} pay?",
    "{a} reads {x} pages on Monday, twice as many on Tuesday, and {y} fewer than that on Wednesday. How many in all?",
    "There are {x} rows of {y} {t}. {z} of the {t} are broken. What percentage of the {t} is not broken?",
    "{a} earns ${x} an hour for {y} hours a week. {b} earns ${z} more an hour, for half as many. Who earns more?",
    "A train travels {x} miles in {y} hours. At the same speed, how far does it travel in {z} hours?",
]
_TASKS = [
    "Write a Python function that counts the {t} in a list.",
    "Write a Python function that removes all {t} from a list and sorts the rest.",
    "Pretend that you are a {role}. Talk about {word}.",
    "Write a story about {a} and the {t}.",
    "Who was the first to write about {word}?",
    "Rewrite in simpler words: {text}",
]


def read_prompts(path: Path) -> list[Messages]:
    """The prompts of a file, as messages; what a line may be, and errors, as in chat.prompts.read_prompts.

    Raises:
        ValueError: a line has no message before an answer, there are too few lines, or the file is not a regular one.
    """
    open_regular(path).close()  # a pipe has nothing left for who resumes the work
    found: list[Messages] = []
    for asked in prompts.read_prompts(path):
        messages = asked.conversation()
        while messages and messages[-1]["role"] == "assistant":  # an answer at the end is the target's to write
            messages = messages[:-1]
        said = messages[-1].get("content") if messages else None
        if not isinstance(said, str) or not said.strip():
            raise asked.about(ValueError("there is no text to answer"))
        found.append(messages)
    if len(found) < LEAST_PROMPTS:
        raise ValueError(
            f"{path} has {len(found)} prompts, one a line; at least {LEAST_PROMPTS} are needed, and thousands help"
        )
    return found


class Questions:
    """Arithmetic, small tasks, and questions about texts: paragraphs of the documentation of Python and of installed
    packages."""

    def draw(self, count: int, seed: int, earlier: Sequence[str] = ()) -> list[str]:
        """Questions, the same for the same seed.

        Args:
            earlier: answers, if any, which then are half of the texts.
        """
        choose = random.Random(seed)
        return [self._question(choose, earlier) for _ in range(count)]

    @cached_property
    def _texts(self) -> list[str]:
        return sorted(set(_documentation())) or ["A tree has leaves. It grows where there is light."]

    def _question(self, choose: random.Random, earlier: Sequence[str]) -> str:
        def text() -> str:
            return choose.choice(earlier if earlier and choose.random() < 0.5 else self._texts)

        kind, about = choose.random(), text()
        if kind < 0.28:
            return choose.choice(_SUMMARIES) + about
        if kind < 0.5:
            passages = f"[1] {about}\n[2] {text()}\n[3] {text()}"[:2600]
            word = choose.choice(about.split())
            return f"Answer with the help of these passages.\n\n{passages}\n\nWhat do they say about {word}?"
        if kind < 0.65:
            sentence = choose.choice(re.split(r"(?<=[.!?])\s", about))[:300]
            language = choose.choice(_LANGUAGES)
            return choose.choice(
                [f"Translate {language} to English: {sentence}", f"Translate this into {language}: {sentence}"]
            )
        (a, b), (t, u) = choose.sample(_PEOPLE, 2), choose.sample(_THINGS, 2)
        x, y, z = (choose.randint(2, 60) for _ in range(3))
        words = {"role": choose.choice(_ROLES), "word": choose.choice(about.split()), "text": about[:500]}
        return choose.choice(_SUMS if kind < 0.85 else _TASKS).format(a=a, b=b, t=t, u=u, x=x, y=y, z=z, **words)


def _documentation() -> Iterator[str]:
    """Paragraphs that installed packages and Python's own modules are described with."""
    for package in distributions():
        for paragraph in re.split(r"\n\s*\n", str(package.metadata.json.get("description", ""))):
            yield from prose(paragraph, 200)
    for file in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            try:
                tree = ast.parse(file.read_text("utf-8"))
            except (OSError, ValueError, SyntaxError):
                continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield from prose(ast.get_docstring(node) or "", 150)


def prose(text: str, least: int) -> Iterator[str]:
    """A text on one line, if it is a paragraph of words."""
    text = " ".join(text.split())
    if least < len(text) < 1500 and sum(c.isalpha() or c == " " for c in text) > 0.88 * len(text):
        yield text
