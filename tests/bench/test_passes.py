"""`pystaged bench passes`: what is timed where, by our engine and by llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.families import CASES
from support.random_models import write
from typer.testing import CliRunner

from pystaged._core import Work, run
from pystaged.bench import passes
from pystaged.bench.passes import ROWS, PassTime, PassTimes, Runner, measure
from pystaged.cli import app
from pystaged.decoding.cost import PassCost
from pystaged.loading import costs as costs_of_passes


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "BANDWIDTH_BYTES", 1 << 20)


@pytest.fixture
def path(random_gguf: Callable[..., Path]) -> Path:
    return random_gguf("Q8_0", context=1300)


class Recording:
    """What is read, and behind how much passes are made."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.made: set[tuple[int, int]] = set()

    def __call__(self, works: list[Work]) -> list[Any]:
        [work] = works
        past = len(work.session.tokens)
        found = run(works)
        if work.session.num_pending:
            self.made.add((past, work.num_rows))
        else:
            self.read.append(work.num_rows)
        return found


@pytest.mark.slow
def test_passes_by_context(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording()
    monkeypatch.setattr(passes, "run", recording)
    told: list[tuple[str, int, int]] = []
    found = measure(path, contexts=[1290, 20, 600, 20], repeats=1, progress=lambda *doing: told.append(doing))
    expected = [(length, n) for length in (20, 600, 1290) for n in ROWS if length + n <= 1300]
    prompts = [(0, length) for length in (20, 600, 1290)]
    assert [(each.context, each.n) for each in found.passes] == prompts + expected
    times = [each.ms for each in found.passes[:3]]
    assert times == sorted(times), "a prompt takes what reading its beginning took, and more"
    assert recording.made == {(0, 1), *expected}, "a pass before all others reads the file"
    assert recording.read == [20, 580, 690], "what one context has read the next one goes on from"
    assert found.llama_cpp == "measured"
    # Repacked weights crash llama.cpp on some machines.
    rounds = [(f"passes of {path.name}", done, 6) for done in range(7)]
    loading = f"loading {path.name}, and the machine's limits"
    assert told[:9] == [(loading, 0, 1), (loading, 1, 1), *rounds]
    assert told[-7:] == [("llama.cpp, plain weights", *done) for _, *done in rounds]
    assert all(each.ms > 0 and each.llama_cpp_ms and each.llama_cpp_ms > 0 for each in found.passes)
    for each in found.passes:
        read_ms = found.read_ms + found.cells_ms * each.context / 1000
        assert each.floor_ms == pytest.approx(max(read_ms, each.n * found.row_ms))


def test_llama_cpp_repeats_passes_of_a_model_with_recurrent_layers(tmp_path: Path) -> None:
    path = write(tmp_path / "hybrid.gguf", CASES["qwen35"])
    runner = Runner({"path": str(path), "longest": 20, "threads": 1, "extra_buffers": False})
    for _ in range(2):
        _, found = runner.run({"context": 20, "rows": [1, 8]})
        assert found.keys() == {1, 8}


def test_table_and_json() -> None:
    prompt, long = PassTime(0, 4096, 8.0, 2.0, 32.0), PassTime(4096, 1, 4.0, 3.0, None)
    each = [prompt, PassTime(256, 1, 2.0, 1.0, 3.0, 1.8), PassTime(256, 8, 3.0, 1.5, 9.0), long]
    found = PassTimes(each, "measured", 10e9, 100e9, 1.0, 0.5, 0.1, "avx2", 2, "model.gguf")
    assert [(row["context"], row["n"]) for row in found.to_dict()["passes"]] == [
        (0, 4096),
        (256, 1),
        (256, 8),
        (4096, 1),
    ]
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(found.table())
    rows = [[word.strip() for word in line.split("│")[1:-1]] for line in capture.get().splitlines() if "│" in line]
    assert rows == [
        ["0", "4,096", "8.00", "-", "25%", "-", "32.00", "4.00"],
        ["256", "1", "2.00", "1.00", "50%", "1.80", "3.00", "1.50"],
        ["256", "8", "3.00", "1.50", "50%", "-", "9.00", "3.00"],
        ["4,096", "1", "4.00", "1.00", "75%", "-", "-", "-"],
    ]
    assert "at 256 tokens of context T(1) is 2.00 times the reading" in " ".join(capture.get().split())


def test_command(path: Path, random_gguf: Callable[..., Path]) -> None:
    def run(*arguments: str, model: Path = path) -> Any:
        return CliRunner().invoke(app, ["bench", "passes", "--model", str(model), "--repeats", "1", *arguments])

    asked = json.loads(run("--no-baseline", "--json", "--context", "0,300").stdout)
    assert {each["context"] for each in asked["passes"]} == {0, 300}
    assert asked["llama_cpp"] == "not asked"
    first, *_ = run("--no-baseline").stderr.splitlines()
    assert first == f"timing passes of {path.name} over 1 to 32 rows, 1 times"
    for model, context in ((path, 256), (random_gguf("Q8_0"), 48)):
        usual = json.loads(run("--no-baseline", "--json", model=model).stdout)
        assert {each["context"] for each in usual["passes"]} == {0, context}


def test_costs_are_shown_and_measured_again_when_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(seconds: float, *arguments: str) -> list[float]:
        monkeypatch.setattr(costs_of_passes, "measure_passes", lambda *_: PassCost({1: seconds, 2: seconds}))
        asked = ["--model", str(path), "--repeats", "1", "--no-baseline", "--json", *arguments]
        done = CliRunner().invoke(app, ["bench", "passes", *asked])
        return [each["cost_ms"] for each in json.loads(done.stdout)["passes"][1:3]]

    assert costs(0.5, "--again") == costs(0.7) == [500.0, 500.0]
    assert costs(0.7, "--again") == costs(0.9) == [700.0, 700.0]


@pytest.mark.parametrize(
    ("context", "status", "words"),
    [
        ("256,x", 2, "--context takes numbers from 0 to"),
        ("", 2, "--context takes numbers from 0 to"),
        ("20,-1", 2, "--context takes numbers from 0 to"),
        ("20,1300", 1, "after 0 to 1299 tokens of context, not 1300"),
    ],
)
def test_contexts_that_cannot_be(path: Path, context: str, status: int, words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "passes", "--model", str(path), "--context", context])
    assert done.exit_code == status
    assert words in (done.output if status == 2 else str(done.exception))
