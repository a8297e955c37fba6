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
    """Random windows from the start of a teacher's own texts."""

    def __init__(self, path: Path, numbers: npt.NDArray[np.int64]) -> None:
        self.rows = torch.from_numpy(numbers[np.load(path)])

    def batch(self, rng: np.random.Generator, tokens: int) -> Tensor:
        """int64[windows, length + 1] with about that many tokens."""
        length = self.rows.shape[1] - 1
        chosen = rng.integers(0, len(self.rows), max(1, tokens // length))
        return self.rows[torch.from_numpy(chosen)]
