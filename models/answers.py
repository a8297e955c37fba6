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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pystaged
from pystaged._core import Model, Sampling, Session
from pystaged.decoding.requests import only
from pystaged.distill.prompts import Questions
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


def write_file(
    engine: pystaged.Engine, model: Model, questions: Questions, earlier: list[str], number: int, path: Path
) -> int:
    """Ask, answer and write one file, and add its answers to earlier ones; how many tokens the answers have."""
    chat = engine.chat_format
    seed = number * 1000
    own = engine.generate(user_opening(chat), n=ANSWERS // 2, max_tokens=MOST_QUESTION, temperature=1.0, seed=seed)
    asked = [text for text in (result.text.strip() for result in own) if text]
    asked += questions.draw(ANSWERS - len(asked), number, earlier)
    prompts = [chat.encode([{"role": "user", "content": question}]) for question in asked]
    prompts = [prompt for prompt in prompts if len(prompt) <= engine.n_ctx - MOST_ANSWER]
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    results = engine.generate(prompts, max_tokens=MOST_ANSWER, seed=seed + 500, stop=chat.stop, **sampling)
    if number >= HELD_OUT:  # or what is held out would come back as a text to be asked about
        earlier += [text for text in (" ".join(r.text.split()) for r in results) if 80 < len(text) < 900]
        del earlier[:-REMEMBERED]
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
    questions, earlier = Questions(), list[str]()
    given.out.mkdir(parents=True, exist_ok=True)
    with pystaged.load(path, draft=None, recycle=False, n_ctx=min(CONTEXT, model.max_context)) as engine:
        for number in range(given.files):
            out = given.out / f"{number:04d}.npz"
            if not out.exists():
                print(f"{out}: {write_file(engine, model, questions, earlier, number, out)} tokens", flush=True)


if __name__ == "__main__":
    main()
