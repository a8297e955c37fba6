"""Windows of text to train on: where a prompt would begin or anywhere, short and long."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from corpus import END_OF_TEXT
from torch import Tensor

Tokens = npt.NDArray[np.uint16]

STATEMENTS = ("def", "class", "import", "from", "@")


def window_starts(data: Tokens, tokens: list[str]) -> npt.NDArray[np.int64]:
    """Positions of the first token of each file and of each top-level statement."""
    newline = np.array([token.endswith("Ċ") for token in tokens])
    statement = np.array([token in STATEMENTS for token in tokens])
    before, here = np.asarray(data[:-1]), np.asarray(data[1:])
    return 1 + np.flatnonzero((before == END_OF_TEXT) | (newline[before] & statement[here]))


def docstring_prompts(corpus: "Corpus", tokens: list[str], longest: int = 176) -> dict[int, npt.NDArray[np.int64]]:
    """Where top-level statements begin whose first docstring ends within so many tokens, by tokens up to that end."""
    quotes = np.flatnonzero(np.array(['""' in token for token in tokens])[corpus.data])
    second = np.searchsorted(quotes, corpus.starts) + 1
    begin, second = corpus.starts[second < len(quotes)], second[second < len(quotes)]
    end = quotes[second] + 1
    newline = np.array([token.startswith("Ċ") for token in tokens])
    end += newline[corpus.data[np.minimum(end, len(corpus.data) - 1)]]
    length = end - begin
    return {int(n): begin[length == n] for n in np.unique(length) if 16 <= n <= longest}


class Corpus:
    """Random windows of a token file."""

    def __init__(self, path: Path, tokens: list[str], numbers: npt.NDArray[np.int64]) -> None:
        self.data: Tokens = np.fromfile(path, np.uint16)
        self.starts = window_starts(self.data, tokens)
        self.numbers = numbers

    def batch(self, rng: np.random.Generator, windows: int, length: int, anchored: float = 0.5) -> Tensor:
        """int64[windows, length + 1], that share of them from a start, the rest from anywhere."""
        last = len(self.data) - length - 1
        anywhere = rng.integers(0, last, windows)
        starts = np.minimum(rng.choice(self.starts, windows), last)
        begin = np.where(rng.random(windows) < anchored, starts, anywhere)
        return torch.from_numpy(self.numbers[self.data[begin[:, None] + np.arange(length + 1)]])


@dataclass(frozen=True)
class Whitespace:
    """The model's numbers of the single space, the tokens that end with a line break, and the silent token."""

    space: int
    newlines: Tensor
    silent: int

    @classmethod
    def of(cls, tokens: list[str], numbers: npt.NDArray[np.int64]) -> "Whitespace":
        newlines = [numbers[i] for i, token in enumerate(tokens) if token.endswith("Ċ")]
        return cls(int(numbers[tokens.index("Ġ")]), torch.tensor(newlines), int(numbers.max()))


def stretch_indents(batch: Tensor, numbers: Whitespace, rng: np.random.Generator, longest: int = 28) -> Tensor:
    """Put a run of too many spaces at the start of a line of each window; returns the batch of labels.

    Greedy decoding runs into such lines and, having never seen one end, stays there. From `longest` spaces on the
    label is the word that follows; the spaces before that have no label (the silent token stands for none).
    """
    labels = batch.clone()
    length = batch.shape[1]
    for row, label in zip(batch, labels, strict=True):
        breaks = torch.isin(row[4 : length // 2], numbers.newlines).nonzero()
        if not len(breaks):
            continue
        begin = 5 + int(breaks[rng.integers(len(breaks))])
        word = begin + int((row[begin:] != numbers.space).int().argmax())
        end = min(begin + int(rng.integers(longest, 64)), length - 1)
        rest = row[word : word + length - end].clone()
        row[begin:end] = numbers.space
        row[end : end + len(rest)] = rest
        label[end : end + len(rest)] = rest
        row[end + len(rest) :] = numbers.silent
        label[end + len(rest) :] = numbers.silent
        label[begin:end] = numbers.silent
        label[begin + longest : end] = rest[0]
    return labels


class Samples:
    """Texts of a teacher and its distribution over the best next tokens, as sample.py wrote them."""

    def __init__(self, folder: Path, numbers: npt.NDArray[np.int64]) -> None:
        self.files = [dict(np.load(path)) for path in sorted(folder.glob("*.npz"))]
        self.numbers = numbers

    def batch(self, rng: np.random.Generator, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """About that many tokens of texts of one file: ids, int64[texts, length], and after each of them the best
        tokens, int64[texts, length, k], with their logprobs, float32[texts, length, k]."""
        file = self.files[rng.integers(len(self.files))]
        count, length = file["texts"].shape
        chosen = rng.choice(count, min(count, max(1, tokens // length)), replace=False)
        ids, best = (torch.from_numpy(self.numbers[file[name][chosen]]) for name in ("texts", "tokens"))
        return ids[:, :-1], best, torch.from_numpy(file["logprobs"][chosen].astype(np.float32))
