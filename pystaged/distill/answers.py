"""A target's answers, in files: tokens, the features that a draft reads, and the target's distributions.

A folder holds files of up to 64 texts each; the first file is held out of training. A text is a prompt and its answer.
For each token a file has the features: the target's hidden states after some layers, in 8 bits. For each token of an
answer, and for its end, it has the distribution: the likeliest tokens and their log-probabilities. The engine computes
all of them with the quantized target, in the passes that write the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pystaged._core import Model, Sampling, Session, Tokenizer, Work, run
from pystaged.chat.format import ChatFormat
from pystaged.decoding.requests import MOST_ROWS
from pystaged.distill.prompts import Messages, Questions
from pystaged.distill.samples import user_opening
from pystaged.platform.files import whole_file
from pystaged.platform.memory import available_memory

Tokens = NDArray[np.int32]

TEXTS = 64  # of a file
LIKELIEST = 50  # tokens of a distribution that are kept
MOST_PROMPT, MOST_ANSWER, LEAST_ANSWER = 768, 256, 4  # tokens
CONTEXT = MOST_PROMPT + MOST_ANSWER
# Temperature and top-k of an answer, in turn; the draft learns the distributions at temperature 1 in any case.
SAMPLINGS: tuple[tuple[float, int], ...] = ((0.0, 0), (1.0, 50), (0.8, 0))
_MOST_QUESTION = 128  # tokens
_PASSES = 8  # that are timed
_SIDE_BY_SIDE = 32  # texts in a pass; more gain little and take memory
_OPEN = 64  # files at once
_LARGEST = 448.0  # that an 8-bit float with 4 bits of exponent holds
_USUAL = 0.125  # where a channel's median goes, so that what is 3,584 times as large still fits


@dataclass
class Answer:
    """A text that a target wrote: the prompt and the answer's tokens, without the end token.

    states: hidden states, float32[prompt + answer, taps * width] in parts. likeliest, logprobs: [LIKELIEST] for each
    token of the answer and for what follows it.
    """

    prompt: Tokens
    answer: list[int] = field(default_factory=list)
    states: list[NDArray[np.float32]] = field(default_factory=list)
    likeliest: list[Tokens] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)


@dataclass
class _Slot:
    """A session and the text that it writes."""

    session: Session
    text: Answer
    number: int
    sampling: Sampling
    read: int = 0


class Writer:
    """Writes many texts in each pass of a target.

    Args:
        model: the target, without sessions so far.
        is_end: whether a token ends a text.
        taps: layers, from 1 on, after which the hidden states of all rows are kept.
    """

    def __init__(self, model: Model, is_end: Callable[[int], bool], taps: Sequence[int]) -> None:
        model.tap(taps, all_rows=True)
        self.n_ctx = min(CONTEXT, model.max_context)
        self._model, self._is_end = model, is_end
        room = int(available_memory() // 2 // max(1, model.cell_bytes * self.n_ctx + model.state_bytes))
        self._sessions = [Session(model, self.n_ctx) for _ in range(max(1, min(_SIDE_BY_SIDE, room)))]

    def write(
        self,
        prompts: Sequence[Tokens],
        samplings: Sequence[Sampling],
        most: int,
        written: Callable[[int], None] = lambda _: None,
    ) -> list[Answer]:
        """Answers to prompts, in their order; with states and distributions if a sampling asks for log-probabilities.

        Args:
            most: maximum tokens of an answer.
            written: called after each pass with the number of tokens that it added.
        """
        texts = [Answer(prompt) for prompt in prompts]
        waiting = list(range(len(texts)))[::-1]
        free, busy = list(self._sessions), list[_Slot]()
        while waiting or busy:
            while waiting and free:
                session, number = free.pop(), waiting.pop()
                session.rewind(0)
                busy.append(_Slot(session, texts[number], number, samplings[number]))
            found = run([self._work(slot) for slot in busy])
            new = [self._take(slot, each, most) for slot, each in zip(busy, found, strict=True)]
            free += [slot.session for slot, more in zip(busy, new, strict=True) if more is None]
            busy = [slot for slot, more in zip(busy, new, strict=True) if more is not None]
            written(sum(more or 0 for more in new))
        return texts

    def speed(self, prompt: Tokens) -> float:
        """Tokens per second, measured with as many texts in a pass as write() has at most."""
        sampling = Sampling(1.0, logprobs=LIKELIEST)
        for session in self._sessions:
            session.rewind(0)
        begin = 0.0
        for number in range(_PASSES + 1):  # the first one takes memory
            run([Work.verify(session, [int(prompt[-1])], [-1], sampling) for session in self._sessions])
            begin = begin if number else time.perf_counter()
        return _PASSES * len(self._sessions) / (time.perf_counter() - begin)

    def close(self) -> None:
        """Free the contexts."""
        for session in self._sessions:
            session.close()

    def _work(self, slot: _Slot) -> Work:
        unread = slot.text.prompt[slot.read : -1]
        if len(unread):
            return Work.read(slot.session, unread[:MOST_ROWS])
        last = slot.text.answer[-1] if slot.text.answer else int(slot.text.prompt[-1])
        return Work.verify(slot.session, [last], [-1], slot.sampling)

    def _take(self, slot: _Slot, found: Any, most: int) -> int | None:
        """Take in a pass's result; tokens that it added, None where the text has ended."""
        text = slot.text
        if found is None or len(found) > 2:
            text.states.append(slot.session.hidden.numpy())
        if found is None:
            slot.read += min(MOST_ROWS, len(text.prompt) - 1 - slot.read)
            return 0
        if len(found) > 2:
            text.likeliest.append(found[2][1][0])
            text.logprobs.append(found[2][2][0])
        token = int(found[1][0])
        if self._is_end(token) or len(text.answer) == most or len(text.prompt) + len(text.answer) >= self.n_ctx:
            return None
        text.answer.append(token)
        return 1


class Asker:
    """Makes the prompts of each file.

    Args:
        given: the user's prompts. Without them half are questions that the model generates (Xu et al. 2024, arXiv
            2406.08464), and half are drawn from Questions. A model without a chat template writes texts from their
            first token on.

    Raises:
        ValueError: a model without a chat template and without a token to begin with.
    """

    def __init__(
        self,
        writer: Writer,
        tokenizer: Tokenizer,
        given: Sequence[Messages] = (),
        report: Callable[[str], None] = print,
    ) -> None:
        self._writer, self.tokenizer, self._given, self._report = writer, tokenizer, given, report
        self._questions = Questions()
        chats = bool(tokenizer.metadata.get("tokenizer.chat_template"))
        self._chat = ChatFormat(tokenizer.metadata, tokenizer, report) if chats else None
        self._start = tokenizer.bos if tokenizer.bos >= 0 else tokenizer.eos
        if not self._chat and not given and self._start < 0:
            raise ValueError(
                "the model has neither a chat template nor a token that begins a text; give prompts with --prompts"
            )

    def prompts(self, number: int, earlier: Callable[[], Sequence[str]]) -> list[Tokens]:
        """The prompts of a file, at most TEXTS; the same for the same number.

        Args:
            earlier: answers that questions may be about.
        """
        if self._given:
            found = [tokens for messages in self._own(number) if (tokens := self._accepted(messages)) is not None]
        elif self._chat:
            seeds = range(number * TEXTS, number * TEXTS + TEXTS // 2)
            samplings = [Sampling(1.0, seed=seed) for seed in seeds]
            opening = np.array(user_opening(self._chat), np.int32)
            written = self._writer.write([opening] * len(samplings), samplings, _MOST_QUESTION)
            asked = [self.tokenizer.decode(text.answer).strip() for text in written]
            asked = [text for text in dict.fromkeys(asked) if text]
            asked += self._questions.draw(TEXTS - len(asked), number, earlier())
            found = [self._encoded([{"role": "user", "content": text}]) for text in asked]
        else:
            found = [np.array([self._start], np.int32)] * TEXTS
        most = self._writer.n_ctx - min(MOST_ANSWER, self._writer.n_ctx // 2)
        return [prompt for prompt in found if 0 < len(prompt) <= most]

    def _own(self, number: int) -> list[Messages]:
        """The user's prompts of a file; those of the first file, which is held out, are asked again in no other."""
        held_out = max(1, min(TEXTS, len(self._given) // 10))
        order = np.random.default_rng(0).permutation(len(self._given))
        if number == 0:
            return [self._given[i] for i in order[:held_out]]
        rest = order[held_out:]
        return [self._given[rest[i % len(rest)]] for i in range((number - 1) * TEXTS, number * TEXTS)]

    def _accepted(self, messages: Messages) -> Tokens | None:
        """A user's prompt; None, with a line for the user, where it cannot be encoded, which must not end the work of
        hours."""
        try:
            return self._encoded(messages)
        except ValueError as error:  # of the chat template, or of text that is no Unicode
            self._report(f"passed over the prompt {messages[-1]['content'][:40]!r}: {error}")
            return None

    def _encoded(self, messages: Messages) -> Tokens:
        if self._chat:
            return self._chat.encode(messages)
        return self.tokenizer.encode(messages[-1]["content"], parse_special=False)


@dataclass(frozen=True)
class Text:
    """One text of a file.

    tokens: int64[n]. prompt: its length. features: float8[n, taps * width], hidden states in units of 8 times
    Answers.scale. likeliest: int64[n - prompt + 1, LIKELIEST], for each token of the answer and for what follows it.
    logprobs: float32, of these. greedy: whether the answer was sampled greedily.
    """

    tokens: Any
    prompt: int
    features: Any
    likeliest: Any
    logprobs: Any
    greedy: bool


class Answers:
    """A folder of answers.

    Args:
        folder: exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[int, Any] = {}

    def path(self, number: int) -> Path:
        """The file of that number."""
        return self._folder / f"{number:05d}.safetensors"

    def write(self, number: int, writer: Writer, asker: Asker, written: Callable[[int], None]) -> None:
        """Write one file of prompts and their answers.

        Raises:
            ValueError: all answers have fewer than LEAST_ANSWER tokens.
        """
        prompts = asker.prompts(number, lambda: self._earlier(number - 1, asker))
        seed = (1 << 32) + number * TEXTS
        samplings = [
            Sampling(temperature, top_k, seed=seed + i, logprobs=LIKELIEST)
            for i, (temperature, top_k) in zip(range(len(prompts)), SAMPLINGS * len(prompts), strict=False)
        ]
        texts = writer.write(prompts, samplings, MOST_ANSWER, written)
        kept = [i for i, text in enumerate(texts) if len(text.answer) >= LEAST_ANSWER]
        if not kept:
            raise ValueError("all answers of the target are too short to learn from; give other prompts")
        states = torch.from_numpy(np.concatenate([part for i in kept for part in texts[i].states]))
        scale = self.scale if number else _scale(states)
        features = (states * (_USUAL / scale)).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        tensors = {
            "tokens": torch.tensor([token for i in kept for token in [*texts[i].prompt, *texts[i].answer]]),
            "prompts": torch.tensor([len(texts[i].prompt) for i in kept]),
            "answers": torch.tensor([len(texts[i].answer) for i in kept]),
            "greedy": torch.tensor([SAMPLINGS[i % len(SAMPLINGS)][0] == 0 for i in kept]),
            "features": features,
            "likeliest": torch.from_numpy(np.stack([row for i in kept for row in texts[i].likeliest])),
            "logprobs": torch.from_numpy(np.stack([row for i in kept for row in texts[i].logprobs])).half(),
            "scale": scale,
        }
        save(tensors, self.path(number))

    @cached_property
    def scale(self) -> Any:
        """The median size of each channel of the features, float32[taps * width]."""
        return self._read(0, "scale")

    def num_tokens(self, number: int) -> int:
        """Tokens of the answers of a file."""
        return int(self._read(number, "answers").sum())

    def texts(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """The texts of files, as pairs of the file's number and the text's index in it."""
        return [(number, i) for number in numbers for i in range(len(self._read(number, "answers")))]

    def text(self, which: tuple[int, int]) -> Text:
        """One text."""
        number, i = which
        prompts, answers, greedy = (self._read(number, name) for name in ("prompts", "answers", "greedy"))
        lengths = prompts + answers
        begin, place = int(lengths[:i].sum()), int(answers[:i].sum()) + i
        end, places = begin + int(lengths[i]), int(answers[i]) + 1
        file = self._file(number)

        def part(name: str, first: int, last: int) -> Any:
            with read_errors(self.path(number)):
                return file.get_slice(name)[first:last]

        return Text(
            part("tokens", begin, end),
            int(prompts[i]),
            part("features", begin, end),
            part("likeliest", place, place + places).long(),
            part("logprobs", place, place + places).float(),
            bool(greedy[i]),
        )

    def likely(self, numbers: Iterable[int], vocab_size: int) -> Any:
        """Expected count of each token in the answers of files, float64[vocab_size]."""
        total = torch.zeros(vocab_size, dtype=torch.float64)
        for number in numbers:
            likeliest, logprobs = self._read(number, "likeliest"), self._read(number, "logprobs")
            total.index_add_(0, likeliest.flatten().long(), logprobs.double().exp().flatten())
        return total

    def _earlier(self, number: int, asker: Asker) -> list[str]:
        """Answers of a file as one line each, none of the held-out one."""
        if number < 1:
            return []
        texts = (self.text(which) for which in self.texts([number]))
        lines = (" ".join(asker.tokenizer.decode(text.tokens[text.prompt :].tolist()).split()) for text in texts)
        return [line for line in lines if 80 < len(line) < 900]

    def _read(self, number: int, name: str) -> Any:
        file = self._file(number)
        with read_errors(self.path(number)):
            return file.get_tensor(name)

    def _file(self, number: int) -> Any:
        if number not in self._opened:
            if len(self._opened) == _OPEN:
                self._opened.clear()
            with read_errors(self.path(number)):
                self._opened[number] = safe_open(self.path(number), "pt")
        return self._opened[number]


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn safetensors' own errors about a file into ValueError."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; remove it, and it is made anew") from None


def save(tensors: Mapping[str, Any], path: Path) -> None:
    """Write tensors atomically.

    Raises:
        OSError: they cannot be written, as to a full disk.
    """
    with whole_file(path) as part:
        try:
            save_file({name: value.contiguous() for name, value in tensors.items()}, part)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None


def _scale(states: Any) -> Any:
    """The median size of each channel, or a little where that is nothing."""
    sizes = states.abs().median(0).values
    return sizes.clamp(min=float(sizes.mean()) * 1e-3 + 1e-12)
