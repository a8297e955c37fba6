"""Write what a model that chats answers to questions of many kinds, and the hidden states that it does so from: what a
draft head is trained on.

    python -m models.answers smollm2 answers --files 40

Half of the questions the model asks itself (arXiv 2406.08464). The others are about texts, which are to be summarized,
translated and asked about: what installed packages and Python itself are documented with, and earlier answers; or they
are sums, or small tasks. A third of the files is greedy, a third at T = 1, top-k 50, a third at T = 0.8. Files that are
there are kept, so it goes on where it ended, but for the earlier answers.
"""

from __future__ import annotations

import argparse
import inspect
import random
import re
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pystaged
from pystaged._core import Model, Sampling, Session
from pystaged.decoding.requests import only
from pystaged.drafting.corpus import user_opening
from pystaged.files import whole_file
from pystaged.loading import names

TAPS = (1 / 3, 2 / 3, 1.0)  # of the target's layers
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_k": 50}, {"temperature": 0.8}]
HELD_OUT = len(SAMPLINGS)  # files, the first ones, that nothing is trained on
ANSWERS = 128  # of a file
MOST_QUESTION, MOST_ANSWER = 128, 224  # tokens
LEAST_ANSWER = 8
CONTEXT = 1324
REMEMBERED = 3000  # answers that questions may be about

PEOPLE = [
    "Anna",
    "Ben",
    "Carla",
    "Dan",
    "Eva",
    "Finn",
    "Grace",
    "Hugo",
    "Ida",
    "Jon",
    "Kira",
    "Leo",
    "Mia",
    "Nina",
    "Omar",
]
THINGS = ["apples", "books", "tickets", "marbles", "cookies", "pencils", "eggs", "cars", "flowers", "shirts", "boxes"]
LANGUAGES = ["German", "French", "Spanish", "Italian", "Portuguese"]
ROLES = ["pirate", "doctor", "teacher", "king", "robot", "chef", "detective", "poet"]
SUMMARIES = [
    "Summarize: ",
    "Summarize the following text: ",
    "Give a short summary of this:\n\n",
    "The main points of:\n\n",
]
SUMS = [
    "{a} has {x} {t} and buys {y} more each day for {z} days. {b} gets half. How many are left?",
    "A shop sells {t} for ${y} each and {u} for ${z} each. {a} buys {x} {t} and {y} {u}. How much does {a} pay?",
    "{a} reads {x} pages on Monday, twice as many on Tuesday, and {y} fewer than that on Wednesday. How many in all?",
    "There are {x} rows of {y} {t}. {z} of the {t} are broken. What percentage of the {t} is not broken?",
    "{a} earns ${x} an hour for {y} hours a week. {b} earns ${z} more an hour, for half as many. Who earns more?",
    "A train travels {x} miles in {y} hours. At the same speed, how far does it travel in {z} hours?",
]
TASKS = [
    "Write a Python function that counts the {t} in a list.",
    "Write a Python function that removes all {t} from a list and sorts the rest.",
    "Pretend that you are a {role}. Talk about {word}.",
    "Write a story about {a} and the {t}.",
    "Who was the first to write about {word}?",
    "Rewrite in simpler words: {text}",
]


class Questions:
    """Questions about texts, sums and small tasks."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._found = sorted(set(documentation()))
        self.answers: list[str] = []

    def begin(self, number: int) -> None:
        """Of the file of that number, whatever was asked before."""
        self._random.seed(number)

    def next(self) -> str:
        kind, text = self._random.random(), self._text()
        if kind < 0.28:
            return self._random.choice(SUMMARIES) + text
        if kind < 0.5:
            passages = f"[1] {text}\n[2] {self._text()}\n[3] {self._text()}"[:2600]
            about = self._random.choice(text.split())
            return f"Answer with the help of these passages.\n\n{passages}\n\nWhat do they say about {about}?"
        if kind < 0.65:
            sentence = self._random.choice(re.split(r"(?<=[.!?])\s", text))[:300]
            language = self._random.choice(LANGUAGES)
            return self._random.choice(
                [f"Translate {language} to English: {sentence}", f"Translate this into {language}: {sentence}"]
            )
        (a, b), (t, u) = self._random.sample(PEOPLE, 2), self._random.sample(THINGS, 2)
        x, y, z = (self._random.randint(2, 60) for _ in range(3))
        words = {"role": self._random.choice(ROLES), "word": self._random.choice(text.split()), "text": text[:500]}
        return self._random.choice(SUMS if kind < 0.85 else TASKS).format(a=a, b=b, t=t, u=u, x=x, y=y, z=z, **words)

    def _text(self) -> str:
        earlier = self.answers and (not self._found or self._random.random() < 0.5)
        return self._random.choice(self.answers if earlier else self._found)


def documentation() -> Iterator[str]:
    """Paragraphs that installed packages and Python's own modules are described with."""
    for package in distributions():
        for paragraph in re.split(r"\n\s*\n", str(package.metadata.get_payload() or "")):
            yield from prose(paragraph, 200)
    for name in sorted(sys.stdlib_module_names - {"antigravity", "this"}):
        if name.startswith(("_", "idlelib")):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                module = import_module(name)
            except ImportError:  # of another system
                continue
        for value in vars(module).values():
            if callable(value):
                yield from prose(inspect.getdoc(value) or "", 150)


def prose(text: str, least: int) -> Iterator[str]:
    """A text on one line, if it is a paragraph of words."""
    text = " ".join(text.split())
    if least < len(text) < 1500 and sum(c.isalpha() or c == " " for c in text) > 0.88 * len(text):
        yield text


def write_file(engine: pystaged.Engine, model: Model, questions: Questions, number: int, path: Path) -> int:
    """Ask, answer and write one file; how many tokens the answers have."""
    chat = engine.chat_format
    questions.begin(number)
    seed = number * 1000
    own = engine.generate(user_opening(chat), n=ANSWERS // 2, max_tokens=MOST_QUESTION, temperature=1.0, seed=seed)
    asked = [text for text in (result.text.strip() for result in own) if text]
    asked += [questions.next() for _ in range(ANSWERS - len(asked))]
    prompts = [chat.encode([{"role": "user", "content": question}]) for question in asked]
    prompts = [prompt for prompt in prompts if len(prompt) <= engine.n_ctx - MOST_ANSWER]
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    results = engine.generate(prompts, max_tokens=MOST_ANSWER, seed=seed + 500, stop=chat.stop, **sampling)
    if number >= HELD_OUT:  # or what is held out would come back as a text to be asked about
        questions.answers += [text for text in (" ".join(r.text.split()) for r in results) if 80 < len(text) < 900]
        del questions.answers[:-REMEMBERED]
    kept = [(prompt, result.tokens) for prompt, result in zip(prompts, results, strict=True)]
    kept = [(prompt, np.array(tokens, np.int32)) for prompt, tokens in kept if len(tokens) >= LEAST_ANSWER]
    target = Session(model, engine.n_ctx)
    states = [states_of(target, prompt, tokens) for prompt, tokens in kept]
    with whole_file(path) as part, part.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([tokens for _, tokens in kept]),
            lengths=np.array([len(tokens) for _, tokens in kept]),
            layers=np.array(model.taps),
            states=np.concatenate(states).astype(np.float16),
        )
    return sum(len(tokens) for _, tokens in kept)


def states_of(target: Session, prompt: npt.NDArray[np.int32], answer: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The target's states that each token of an answer came of, float32[tokens, taps, width], of mean square 1."""
    target.rewind(0)
    target.prefill(prompt[:-1])
    parents = np.arange(-1, len(answer) - 1)
    target.verify(np.concatenate([prompt[-1:], answer[:-1]]), parents, Sampling(), masks=only(answer))
    states = target.states
    return states / np.sqrt(np.square(states).mean(axis=2, keepdims=True) + 1e-12)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a model that chats, as in pystaged --model")
    parser.add_argument("out", type=Path, help="folder")
    parser.add_argument("--files", type=int, default=40, help="of some 20,000 tokens each (40)")
    given = parser.parse_args(arguments)
    path = names.resolve(given.target)
    model = Model(str(path))
    model.tap([max(1, round(share * model.num_layers)) for share in TAPS])
    questions = Questions()
    given.out.mkdir(parents=True, exist_ok=True)
    with pystaged.load(path, draft=None, recycle=False, n_ctx=min(CONTEXT, model.max_context)) as engine:
        for number in range(given.files):
            out = given.out / f"{number:04d}.npz"
            if not out.exists():
                print(f"{out}: {write_file(engine, model, questions, number, out)} tokens", flush=True)


if __name__ == "__main__":
    main()
