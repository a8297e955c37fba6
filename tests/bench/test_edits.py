"""`pystaged bench edits`: its cases, prompts and counts."""

from __future__ import annotations

import json
import subprocess
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pystaged.bench import edits
from pystaged.bench.edits import Edit, from_repository, measure, ngram_simple, prompt_lookup, read_cases
from pystaged.cli import app
from pystaged.decoding.cost import PassCost

NAME = "\u00e4 b.py"
LINES = [f"line {i}\n" for i in range(60)]


def git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run(["git", "-C", str(folder), *names, *arguments], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with one commit that changes two distant places of a file."""
    git(tmp_path, "init", "-q")
    file = tmp_path / NAME
    file.write_text("".join(LINES))
    git(tmp_path, "add", NAME)
    git(tmp_path, "commit", "-qm", "first")
    file.write_text("".join([*LINES[:5], "new\n", *LINES[6:40], *LINES[41:]]))
    git(tmp_path, "commit", "-qam", "second")
    return tmp_path


def test_edits_of_a_repository(clone: Path) -> None:
    [edit] = from_repository(clone, 5)
    assert edit.before == "".join(LINES[:21])
    assert edit.after == "".join([*LINES[:5], "new\n", *LINES[6:21]])
    assert (edit.path, edit.other_before, edit.other_after) == (NAME, LINES[40], "")


def test_a_folder_that_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the folder of a clone"):
        from_repository(tmp_path, 1)


def test_packaged_cases() -> None:
    cases = read_cases()
    assert len(cases) == 200
    for case in cases:
        assert case.before != case.after
        assert 0 < case.before.count("\n") <= edits.WINDOW


def test_prompts_hold_the_window_and_the_change() -> None:
    edit = Edit("a.py", "b\n", "c\n", "d\n", "e\n")
    prompt, answer = edits.sweep(edit)
    assert prompt == (
        "<|file_sep|>a.py.diff\noriginal:\nd\nupdated:\ne\n"
        "<|file_sep|>original/a.py\nb\n<|file_sep|>current/a.py\nb\n<|file_sep|>updated/a.py\n"
    )
    assert answer == "c\n"
    prompt, answer = edits.zeta(edit)
    assert "```diff\n-d\n+e\n```" in prompt
    assert "<|editable_region_start|>\nb\n<|editable_region_end|>" in prompt
    assert answer == "<|editable_region_start|>\nc\n<|editable_region_end|>\n"


def test_lookups_of_others() -> None:
    text = [1, 2, 3, 4, 1, 2, 9, 1, 2]
    assert ngram_simple(text, n=2, m=2) == [9, 1]  # the latest
    assert ngram_simple(text, n=3, m=2) == []
    assert prompt_lookup(text, n=2, m=2) == [3, 4]  # the first
    assert prompt_lookup([5, 6, 7, 6], n=2, m=2) == [7, 6]  # by one token


def test_counts() -> None:
    """A copied window: plain takes a step for each token, guesses few; each way's passes cost what they should."""
    window = np.arange(100, 160, dtype=np.int32)
    prompt, answer = np.concatenate([window, np.array([7], np.int32)]), window.copy()
    answer[30] = 99
    ticks = count()
    flat = PassCost({1: 1.0, 64: 1.0})
    plain, ours, simple, lookup = measure([(prompt, answer)], flat, 200, clock=lambda: next(ticks) * 1e-5)
    assert (plain.steps, plain.passes_seconds, plain.drafting_seconds) == (60, 60.0, 0.0)
    assert ours.tokens == 60
    assert ours.steps == ours.passes_seconds  # each pass takes a second, whatever its rows
    assert ours.steps < 15
    # Twelve tokens until the first match, up to the change; then twelve again after it, and the rest.
    assert simple.steps == 12 + 1 + 12 + 1
    # One token, then guesses of ten until the change; one token after it, and guesses of ten.
    assert lookup.steps == 1 + 3 + 1 + 3


def test_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Edit("a.py", "def area(r):\n" * 9, "def area(r):\n" * 8 + "def area(radius):\n", "", "")]
    monkeypatch.setattr(edits, "read_cases", lambda: cases)
    arguments = ["bench", "edits", "--model", "bundled", "--pass-ms", "1:10,16:12,32:20"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    found = json.loads(done.output[done.output.index("{") :])
    assert found["conditions"]["prices"] == "the given prices"
    assert found["figures"][0]["steps"] == found["figures"][0]["tokens"]
    assert found["figures"][1]["steps"] < found["figures"][0]["steps"]
    assert "scripted target" in CliRunner().invoke(app, arguments).output


@pytest.mark.parametrize(
    ("option", "value"), [("--pass-ms", "1:x"), ("--pass-ms", "2:5"), ("--pass-ms", "1:-1"), ("--form", "zed")]
)
def test_refused_options(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["bench", "edits", option, value])
    assert done.exit_code == 2
    assert option in done.output
