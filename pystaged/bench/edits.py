"""Edits of a window of lines: tokens per step and seconds of a model that makes them, with and without drafts.

The target is scripted: its choice at each position is the true answer's next token, and a pass takes the time that a
pass over as many rows of the real model takes. Drafting is the engine's own, and its processor time is measured.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from pystaged._core import Session, Tokenizer
from pystaged.config import SamplingConfig
from pystaged.decoding.batch_load import BatchLoad
from pystaged.decoding.cost import PassCost
from pystaged.decoding.decoder import Decoder
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import GainPolicy
from pystaged.decoding.requests import Clocks, Done, Read, Request, Verify
from pystaged.decoding.step import Step
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import NgramCost, lookups
from pystaged.drafting.table import NgramTable
from pystaged.loading.costs import NGRAM_RATE

CASES = Path(__file__).with_name("edits.jsonl.gz")
WINDOW = 21  # lines
_CHANGED = 6  # most lines of a side of an edit
_POSITIONS = 1 << 20  # of the scripted target's context
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class Edit:
    """A window of lines before and after a change, and another change of the same commit, before and after; "" for
    none."""

    path: str
    before: str
    after: str
    other_before: str
    other_after: str


def read_cases(path: Path = CASES) -> list[Edit]:
    """The edits of a compressed file; its first line has its origin and licence."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [Edit(**json.loads(line)) for line in list(file)[1:]]


def from_repository(folder: Path, limit: int) -> list[Edit]:
    """The latest small edits of Python files in a git repository, at most one for each file and commit.

    Raises:
        ValueError: git cannot read the folder, or finds no such edit.
    """
    edits: list[Edit] = []
    for commit in _git(folder, "log", "--no-merges", "--format=%H", "HEAD").split():
        shown = _git(folder, "show", "--format=", "-U0", "--no-renames", "--diff-filter=M", commit, "--", "*.py")
        for part in re.split(r"^diff --git .*\n", shown, flags=re.M)[1:]:
            named = re.search(r"^--- a/(.*?)\t?$", part, re.M)  # git ends names that have spaces by a tab
            if named and "\ufffd" not in named[1]:  # a name that is not UTF-8
                text = _git(folder, "show", f"{commit}^:{named[1]}")
                edits += _edits(named[1], text.splitlines(keepends=True), part)[:1]
        if len(edits) >= limit:
            break
    if not edits:
        raise ValueError(f"{folder} has no commit with a small edit of a Python file; give the folder of another clone")
    return edits[:limit]


def _git(folder: Path, *arguments: str) -> str:
    try:
        command = ["git", "-C", str(folder), "-c", "core.quotePath=off", *arguments]
        done = subprocess.run(command, capture_output=True, check=True)
    except OSError as error:
        raise ValueError(f"git cannot be run: {error}; install it, or leave --repo out") from error
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip()
        raise ValueError(f"git cannot read {folder}: {words}; give the folder of a clone") from error
    return done.stdout.decode(errors="replace")


def _edits(path: str, lines: Sequence[str], diff: str) -> list[Edit]:
    """The small edits of a file, whose lines before them are given, in a diff without context."""
    hunks: list[tuple[int, int, list[str]]] = []  # first line and end of the old lines; new lines
    for found in re.finditer(rf"^{_HUNK.pattern}.*\n((?:[-+\\].*\n?)*)", diff, re.M):
        length = int(found[2] or 1)
        first = int(found[1]) - (length > 0)
        new = [line[1:] + "\n" for line in found[5].split("\n") if line.startswith("+")]
        hunks.append((first, first + length, new))
    edits: list[Edit] = []
    for i, (first, end, new) in enumerate(hunks):
        if max(end - first, len(new)) > _CHANGED:
            continue
        begin = max(0, first - WINDOW // 2)
        last = min(len(lines), begin + WINDOW)
        others = hunks[:i] + hunks[i + 1 :]
        if any(start < last and stop >= begin for start, stop, _ in others):
            continue
        after = [*lines[begin:first], *new, *lines[end:last]]
        small = [each for each in others if max(each[1] - each[0], len(each[2])) <= _CHANGED]
        start, stop, other = small[0] if small else (0, 0, [])
        edits.append(Edit(path, "".join(lines[begin:last]), "".join(after), "".join(lines[start:stop]), "".join(other)))
    return edits


def sweep(edit: Edit) -> tuple[str, str]:
    """The prompt of Sweep's next-edit models for an edit, and the answer."""
    mark = "<|file_sep|>"
    change = f"{mark}{edit.path}.diff\noriginal:\n{edit.other_before}updated:\n{edit.other_after}"
    windows = f"{mark}original/{edit.path}\n{edit.before}{mark}current/{edit.path}\n{edit.before}"
    return f"{change if edit.other_before or edit.other_after else ''}{windows}{mark}updated/{edit.path}\n", edit.after


def zeta(edit: Edit) -> tuple[str, str]:
    """The prompt of Zed's first Zeta for an edit, and the answer."""
    removed = "".join("-" + line for line in edit.other_before.splitlines(keepends=True))
    added = "".join("+" + line for line in edit.other_after.splitlines(keepends=True))
    change = f'User edited "{edit.path}":\n\n```diff\n{removed}{added}```\n' if removed or added else ""
    start, end = "<|editable_region_start|>\n", "<|editable_region_end|>\n"
    prompt = (
        "### Instruction:\nYou are a code completion assistant and your task is to analyze user edits and then rewrite "
        "an excerpt that the user provides, suggesting the appropriate edits within the excerpt, taking into account "
        f"the cursor location.\n\n### User Edits:\n\n{change}\n### User Excerpt:\n\n```{edit.path}\n"
        f"{start}{edit.before}{end}```\n\n### Response:\n\n"
    )
    return prompt, f"{start}{edit.after}{end}"


FORMS: dict[str, Callable[[Edit], tuple[str, str]]] = {"sweep": sweep, "zeta": zeta}

Guess = Callable[[list[int]], list[int]]
"""Guesses the tokens after a sequence."""


def ngram_simple(tokens: list[int], n: int = 12, m: int = 48) -> list[int]:
    """The m tokens after the latest earlier occurrence of the last n, as llama.cpp's and ik_llama.cpp's drafting of
    that name finds them."""
    last = tokens[-n:]
    for i in range(len(tokens) - n - 1, -1, -1):
        if tokens[i : i + n] == last:
            return tokens[i + n : i + n + m]
    return []


def prompt_lookup(tokens: list[int], n: int = 2, m: int = 10) -> list[int]:
    """The m tokens after the first occurrence of the last n, or of fewer, as llama-cpp-python's prompt lookup finds
    them."""
    for length in range(min(n, len(tokens) - 1), 0, -1):
        last = tokens[-length:]
        for i in range(len(tokens) - length):
            if tokens[i : i + length] == last:
                return tokens[i + length : i + length + m]
    return []


_COUNTED: dict[str, Guess] = {
    "ngram-simple of llama.cpp, counted": ngram_simple,
    "prompt lookup of llama-cpp-python, counted": prompt_lookup,
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of all edits in one way. passes_seconds: of the scripted passes; drafting_seconds: measured."""

    way: str
    tokens: int
    steps: int
    passes_seconds: float
    drafting_seconds: float

    @property
    def seconds(self) -> float:
        return self.passes_seconds + self.drafting_seconds


class _Script:
    """The scripted target in place of a session: it holds the number of its tokens, and takes no time itself."""

    on_device = False
    n_ctx = most_pending = _POSITIONS
    weight_bytes = 1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tokens: NDArray[np.int32] = np.empty(0, np.int32)

    def rewind(self, length: int) -> int:
        return min(length, len(self.tokens))


@dataclass(frozen=True, slots=True)
class EditsReport:
    """One run: its conditions, and the figures of each way."""

    conditions: dict[str, Any]
    figures: list[Figures]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def table(self) -> Table:
        """A table for terminals."""
        said = self.conditions
        title = f"{said['cases']} edits, form {said['form']}, {self.figures[0].tokens / said['cases']:.0f} tokens each"
        table = Table("", "tokens per step", "x plain", "ms per edit", "of it drafting", title=title, box=None)
        plain = self.figures[0].seconds
        for each in self.figures:
            ms, drafting = (1e3 * seconds / said["cases"] for seconds in (each.seconds, each.drafting_seconds))
            speeds = (f"{each.tokens / each.steps:.2f}", f"{plain / each.seconds:.2f}")
            table.add_row(each.way, *speeds, f"{ms:.0f}", f"{drafting:.0f}")
        prices = ", ".join(f"{n}: {1e3 * seconds:.1f}" for n, seconds in said["pass_seconds"].items())
        table.caption = (
            f"scripted target: it writes the true answer, and its passes take the time of {said['prices']} "
            f"(ms by rows: {prices}); reading the prompt is not counted; "
            "'counted': on the published algorithm, drafting in no time"
        )
        return table


def measure(
    cases: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]],
    cost: PassCost,
    vocab_size: int,
    table: NgramTable | None = None,
    clock: Callable[[], float] = time.thread_time,
) -> list[Figures]:
    """Write the answer of each case, the tokens of its prompt and of its answer, int32[n], in all ways; plain first.

    Args:
        cost: seconds of a pass by rows, not refined.
        table: of n-grams, for a way of its own.
        clock: processor seconds, times drafting.

    Raises:
        RuntimeError: a way wrote another text.
    """
    tokens = sum(len(answer) for _, answer in cases)
    found = [Figures("plain", tokens, tokens, tokens * cost(1), 0.0)]
    found.append(_ours("n-grams of the prompt", cases, cost, vocab_size, None, clock))
    if table:
        found.append(_ours("and of a table", cases, cost, vocab_size, table, clock))
    return found + [_counted(way, cases, cost, guess) for way, guess in _COUNTED.items()]


def _ours(
    way: str,
    cases: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]],
    cost: PassCost,
    vocab_size: int,
    table: NgramTable | None,
    clock: Callable[[], float],
) -> Figures:
    batch, meter, own, believed = BatchLoad(), Meter(clock), NgramCost(), PassCost(cost.seconds)
    policy = GainPolicy(believed, own.lookup, batch=batch)
    drafter = TreeDrafter(lookups(table, None, own), policy, vocab_size, cost=own.lookup, meter=meter)
    target = cast("Session", _Script(vocab_size))
    clocks = Clocks(clock, clock)
    decoder = Decoder(target, drafter, cost=believed, rates=[NGRAM_RATE], batch=batch, meter=meter, clocks=clocks)
    steps, passes, drafting = 0, 0.0, 0.0
    for prompt, answer in cases:
        written: list[int] = []
        text = decoder.text(prompt, SamplingConfig(), len(answer))
        done: Done | None = None
        while True:
            begin = clock()
            try:
                said = text.send(done)
            except StopIteration:
                break
            finally:
                drafting += clock() - begin
            done = None
            if isinstance(said, Step):
                written += said.tokens
                steps += 1
            else:
                done = _answer(said, answer[len(written) :], cost)
                passes += done.seconds
        if written != answer.tolist():
            raise RuntimeError(f"{way}: the text differs from the scripted one")
    return Figures(way, sum(len(answer) for _, answer in cases), steps, passes, drafting)


def _answer(request: Request, truth: NDArray[np.int32], cost: PassCost) -> Done:
    """The result of a request to a target that writes `truth`; reading takes no time."""
    if isinstance(request, Read):
        return Done(len(request.tokens), 1.0, len(request.tokens), request.past, 0.0, 0.0)
    assert isinstance(request, Verify)
    tree, path = request.tree, [0]
    children = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    for token in truth.tolist()[:-1]:
        child = children.get((path[-1], token))
        if child is None:
            break
        path.append(child)
    seconds = cost(len(tree))
    result = tree, path, truth[: len(path)].tolist(), None, ()
    return Done(result, 1.0, len(tree), request.past, seconds, seconds)


def _counted(
    way: str, cases: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]], cost: PassCost, guess: Guess
) -> Figures:
    """A way that verifies one chain of guesses in each step."""
    steps, passes = 0, 0.0
    for prompt, answer in cases:
        truth, at = answer.tolist(), 0
        while at < len(truth):
            guesses = guess([*prompt.tolist(), *truth[:at]])[: len(truth) - at - 1]
            passes += cost(1 + len(guesses))
            at += 1 + next((i for i, each in enumerate(guesses) if each != truth[at + i]), len(guesses))
            steps += 1
    return Figures(way, sum(len(answer) for _, answer in cases), steps, passes, 0.0)


def encode(edits: Iterator[tuple[str, str]], tokenizer: Tokenizer) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """The tokens of prompts and their answers."""
    return [(tokenizer.encode(prompt), tokenizer.encode(answer, add_special=False)) for prompt, answer in edits]
