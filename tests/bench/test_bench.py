"""The benchmark: who takes part, what is counted, and that a baseline which fails is a row and nothing worse."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from random_weights import copy_tokenizer, write_random
from support.commands import here
from support.family_reference import FamilyReference
from support.random_models import RandomModel, write
from support.scheduling import wait_until
from typer.testing import CliRunner

from pystaged._core import Model, Tokenizer
from pystaged.bench import conditions, methods, models, own_methods, pairs, prompts, summary
from pystaged.bench.benchmark import Benchmark
from pystaged.bench.methods import Method
from pystaged.bench.own_methods import Runner
from pystaged.bench.prompts import Prompt
from pystaged.bench.report import Report
from pystaged.bench.suite import Outcome, Run, Suite
from pystaged.bench.worker import Measurement, Worker, WorkerError
from pystaged.cli import app
from pystaged.decoding.context import Context
from pystaged.decoding.policy import FixedPolicy
from pystaged.loading import names
from pystaged.options.config import SamplingConfig

GREEDY = SamplingConfig()
WARM = SamplingConfig(temperature=1.0, top_k=50)


def quiet(doing: str, done: float, left: float) -> None:
    assert doing
    assert done >= 0
    assert left >= 0


# ---- Our own ways ----


def test_what_was_continued_before_is_remembered_and_what_is_measured_is_not(
    random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = {"model": str(random_gguf("Q8_0")), "draft": None, "threads": 1, "n_ctx": 96}
    prompt = list(range(3, 20))
    job = {"way": "n-grams", "prompt": prompt, "sampling": WARM, "max_tokens": 40}
    # It drafts for so cheap a target, too.
    monkeypatch.setattr(own_methods, "GainPolicy", lambda *_: FixedPolicy(2, 3, 6))
    cold, warm = (Runner(setup | {"warm": others, "max_tokens": 40}) for others in ([], 4 * [prompt]))
    known: list[bytes] = []  # when a text begins
    generate = Runner._generate

    def knowing(runner: Runner, decoder: Context, job: dict[str, Any]) -> Measurement:
        known.append(memory_of(runner))
        return generate(runner, decoder, job)

    monkeypatch.setattr(Runner, "_generate", knowing)
    before = cold.run(job)
    first, second = warm.run(job), warm.run(job)
    assert first.tokens == second.tokens == before.tokens
    assert max(first.steps, second.steps) < before.steps
    assert known[0] == b""
    *_, at_first, at_second = known
    assert at_first == at_second != memory_of(warm)
    cold.close()
    warm.close()
    assert memory_of(warm) == b""


def memory_of(runner: Runner) -> bytes:
    """All that is remembered."""
    memory = runner._bundle.recycled
    return memory.entries().tobytes() if memory else b""


def test_ways_stop_where_the_text_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner({"model": "bundled", "draft": "bundled", "threads": 0, "n_ctx": 128})
    job = {"prompt": list(range(100, 120)), "sampling": GREEDY, "max_tokens": 24}
    whole = runner.run(job | {"way": "plain"}).tokens
    end = whole[12]
    before = whole[: whole.index(end)]
    monkeypatch.setattr(runner._bundle, "tokenizer", SimpleNamespace(is_end=lambda token: token == end))
    plain, staged = (runner.run(job | {"way": way}) for way in ("plain", "staged"))
    assert plain.tokens == staged.tokens == before
    assert plain.counted == staged.counted == plain.steps == len(before) + 1
    runner.close()


# ---- Workers ----

BASELINE = """
import os, signal, sys
from pystaged.bench.worker import Measurement
class Runner:
    def __init__(self, setup):
        self.setup = setup
        print("noise on standard output")
        os.system("echo more noise")
        if setup["does"] == "refuse":
            raise ValueError("no such thing")
    def run(self, job):
        if self.setup["does"] == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        counted = self.setup.get("counted", job["max_tokens"])
        return Measurement(counted, self.setup.get("seconds", 2.0), 0.5, tokens=[7])
    def close(self):
        pass
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Setups of a baseline that does as it is told."""
    (tmp_path / "fake_baseline.py").write_text(BASELINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda does: {"runner": "fake_baseline", "does": does}


def method(key: str, setup: dict[str, Any] | None = None, note: str = "") -> Method:
    is_ours = key in methods.OURS
    return Method(key, key if is_ours else "plain", key, not is_ours, [(note, setup)] if setup else [])


def prompt(number: int, category: str = "code") -> Prompt:
    return Prompt(np.array([number], np.int32), category)


def test_a_worker_answers_whatever_else_it_prints(fake: Callable[[str], dict[str, Any]]) -> None:
    child = Worker(("", fake("well")))
    found = child.run({"max_tokens": 8}, 600)
    assert (found.counted, found.seconds, found.tokens) == (8, 2.0, [7])
    if sys.platform == "linux":
        assert 10e6 < found.peak_bytes < 4e9
    child.close()


@pytest.mark.parametrize(("does", "words"), [("crash", "crashed: SIGSEGV"), ("refuse", "ValueError: no such thing")])
def test_a_worker_that_fails(fake: Callable[[str], dict[str, Any]], does: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        Worker(("", fake(does))).run({"max_tokens": 8}, 600)


def test_the_next_setup_takes_over(fake: Callable[[str], dict[str, Any]]) -> None:
    child = Worker(("fast", fake("crash")), ("slow", fake("well")))
    assert child.run({"max_tokens": 8}, 600).counted == 8
    first, second = child.notes
    assert first.startswith("fast: crashed: SIGSEGV")
    assert second == "slow"
    child.close()


@pytest.mark.slow
def test_baselines_that_fail_are_rows(fake: Callable[[str], dict[str, Any]]) -> None:
    """The others go on, in turn, and the report says what happened."""
    methods = [method("plain", fake("well")), method("crashing", fake("crash"))]
    methods.append(method("good", fake("well"), "a word on it"))
    outcome = Suite(methods, [prompt(1), prompt(2)], [], 8, 1e9, quiet).run()
    assert outcome.complete
    runs = [(run.prompt, run.sampling, run.method) for run in outcome.runs]
    # One prompt after the other, each to all in turn.
    turns = [(at, sampling) for at in range(2) for sampling in ("greedy", "T=1 top-k 50")]
    for at, turn in enumerate(turns):
        assert sorted(runs[2 * at : 2 * at + 2]) == [(*turn, "good"), (*turn, "plain")]
    plain, crashing, good = summary.tables(methods, outcome)["greedy"]["all"]
    assert crashing.tokens_per_second is None
    assert crashing.notes[0].startswith("crashed: SIGSEGV")
    assert good.notes == ["a word on it"]
    assert (plain.prompts, good.prompts, plain.speedup, good.over_best_baseline) == (2, 2, 1.0, 1.0)


@pytest.mark.slow
def test_no_prompt_is_begun_for_which_there_is_no_time(fake: Callable[[str], dict[str, Any]]) -> None:
    """But one there is in any case, and what misleads."""
    methods = [method(key, fake("well")) for key in ("plain", "staged", "n-grams")]
    outcome = Suite(methods, [prompt(1), prompt(2)], [prompt(3, "misleading")], 8, 0.0, quiet).run()
    assert outcome.complete
    runs = [(run.method, run.sampling, run.prompt) for run in outcome.runs if not run.is_repeat]
    assert {run.method for run in outcome.runs if run.is_repeat} == {"plain"}
    whole = {*product(("n-grams", "plain", "staged"), ("T=1 top-k 50", "greedy"), [0])}
    misled = {*product(("plain", "staged"), ("T=1 top-k 50", "T=1.5", "greedy"), [2])}
    assert (len(runs), {*runs}) == (12, whole | misled)
    tables = summary.tables(methods, outcome)
    assert list(tables) == ["greedy", "T=1 top-k 50", "misleading prompts"]
    assert list(tables["misleading prompts"]) == ["all", "greedy", "T=1 top-k 50", "T=1.5"]
    assert [row.name for row in tables["misleading prompts"]["all"]] == ["plain", "staged"]
    assert [row.prompts for row in tables["greedy"]["all"]] == [1, 1, 1]


@pytest.mark.slow
def test_a_baseline_that_is_far_slower_than_another_stops(fake: Callable[[str], dict[str, Any]]) -> None:
    seconds = {"plain": 9.0, "slow": 6.1, "fast": 2.0}
    methods = [method(key, fake("well") | {"seconds": took}) for key, took in seconds.items()]
    outcome = Suite(methods, [prompt(i) for i in range(4)], [], 8, 1e9, quiet).run()
    plain, slow, fast = summary.tables(methods, outcome)["greedy"]["all"]
    assert (plain.prompts, slow.prompts, fast.prompts) == (4, 2, 4)
    assert slow.notes == ["took part in 2 prompts: another baseline is over 3 times as fast"]
    assert plain.notes == fast.notes == []


# ---- Figures ----


def run(who: str, prompt: int, counted: int, seconds: float, **others: Any) -> Run:
    return Run(who, "greedy", prompt, "code", False, Measurement(counted, seconds, 0.25, **others))


def outcome_of(methods: list[Method], runs: list[Run]) -> Outcome:
    return Outcome(runs=runs, notes={each.key: [] for each in methods})


def test_figures_are_of_the_prompts_that_both_had() -> None:
    methods = [method(key) for key in ("plain", "staged", "baseline")]
    runs = [
        run("plain", 0, 10, 1.0, tokens=[1], steps=10),
        run("plain", 1, 10, 4.0, tokens=[2], steps=10),
        run("staged", 0, 10, 0.5, tokens=[1], steps=5, offered={1: 4}, taken={1: 3}),
        run("staged", 1, 10, 1.0, tokens=[3], steps=2, offered={1: 4, 2: 1}),
        run("baseline", 1, 5, 1.0),
    ]
    plain, staged, baseline = summary.rows(methods, outcome_of(methods, runs), runs)
    assert (plain.tokens_per_second, staged.tokens_per_second) == (4.0, pytest.approx(20 / 1.5))
    assert staged.speedup == pytest.approx((20 / 1.5) / 4)
    assert (staged.speedups, staged.least, staged.interval) == ([2.0, 4.0], 2.0, None)
    assert (staged.over_best_baseline, baseline.over_best_baseline, plain.over_best_baseline) == (2.0, 1.0, 0.5)
    assert (staged.best_baseline, baseline.speedup, baseline.tokens_per_step) == ("baseline", 2.0, None)
    assert staged.tokens_per_step == pytest.approx(20 / 7)
    assert (staged.different, plain.different, baseline.different) == (1, 0, None)
    assert staged.acceptance_at_depth == [0.375, 0.0]
    assert staged.first_token_ms == 250


def test_intervals_hold_the_figure_of_most_samples_of_prompts() -> None:
    methods = [method("plain"), method("staged")]
    random, hits, trials = np.random.default_rng(1), 0, 40
    for _ in range(trials):
        ratios = random.uniform(1.0, 3.0, 24)  # the tokens of a second of plain decoding take 1 / ratio
        runs = [run("plain", at, 10, 1.0) for at in range(24)]
        runs += [run("staged", at, 10, 1 / ratio) for at, ratio in enumerate(ratios)]
        low, high = summary.rows(methods, outcome_of(methods, runs), runs)[1].interval or (0.0, 0.0)
        hits += low < 2 / np.log(3) < high  # 1 / E[1 / ratio]
    assert hits >= 0.85 * trials


@pytest.mark.slow
def test_a_baseline_whose_first_texts_end_at_once_is_not_taken_for_slow(fake: Callable[[str], dict[str, Any]]) -> None:
    methods = [method("plain", fake("well")), method("silent", fake("well") | {"counted": 0})]
    methods.append(method("fast", fake("well")))
    outcome = Suite(methods, [prompt(i) for i in range(4)], [], 8, 1e9, quiet).run()
    assert Counter(run.method for run in outcome.runs) == {"plain": 10, "silent": 10, "fast": 10}
    assert outcome.notes["silent"] == []


def test_no_ratio_over_a_baseline_that_is_not_steady() -> None:
    seconds = {"plain": 1.0, "staged": 0.5, "slow": 2.0, "fast": 1.0}
    methods = [method(key) for key in seconds]
    runs = [run(who, at, 10, took) for who, took in seconds.items() for at in range(2)]

    def over(spreads: dict[str, float]) -> tuple[float | None, float | None, list[str]]:
        repeats = [replace(run(who, 0, 10, seconds[who] * spreads.get(who, 1)), is_repeat=True) for who in seconds]
        rows = summary.tables(methods, outcome_of(methods, runs + repeats))["greedy"]["all"]
        assert [row.tokens_per_second for row in rows] == [10.0, 20.0, 5.0, 10.0]
        return rows[1].speedup, rows[1].over_best_baseline, [row.name for row in rows if row.notes]

    assert over({"fast": 1.4, "plain": 0.7}) == (2.0, 2.0, [])
    assert over({"slow": 1.6}) == (2.0, 2.0, ["slow"])
    assert over({"fast": 0.6}) == (2.0, None, ["fast"])
    assert over({"plain": 1.6}) == (None, 2.0, ["plain"])


def test_what_other_programs_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert conditions.load([0.0, 1.0], 4) == {"mean": 0.5, "most": 1.0, "busy": False}
    assert conditions.load([0.0, 3.0], 4) == {"mean": 1.5, "most": 3.0, "busy": True}
    assert not conditions.load([2.0], 2)["busy"]
    about = {"model": None, "draft": None, "threads": 4, "machine": {"logical_cores": 4}}
    about["load"] = conditions.load([8.0], 4)
    report = Report(about, {}, {}, outcome_of([], []))
    (line,) = report.terminal(80)
    assert str(line) == (
        "other programs: 8.0 running threads on average, at most 8, beside 4 of ours on 4 logical cores: "
        "the machine was busy, so these figures say little"
    )


@pytest.mark.skipif(not Path("/proc/loadavg").exists(), reason="the system does not say it")
def test_other_programs_are_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        try:
            wait_until(lambda: conditions.others() >= 1)
        finally:
            loop.kill()


# ---- Prompts ----


def test_the_own_prompts() -> None:
    """Ten for each of Spec-Bench's six kinds, that begin with one of each."""
    found = prompts.load_questions(prompts.OWN)
    kinds = ["conversation", "translation", "summarization", "question answering", "math reasoning", "retrieval"]
    assert Counter(question.category for question in found) == dict.fromkeys(kinds, 10)
    assert len({question.text for question in found}) == 60
    words = [len(question.text.split()) for question in found if question.category == "summarization"]
    assert min(words) > 150
    in_turn = prompts._in_turn(found)
    assert [{question.category for question in in_turn[at : at + 6]} for at in range(0, 60, 6)] == [set(kinds)] * 10
    assert set(in_turn) == set(found)
    assert {question.category for question in prompts.load_questions(prompts.MISLEADING)} == {"misleading"}


def test_a_file_in_the_format_of_spec_bench(tmp_path: Path) -> None:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 82, "category": "coding", "turns": ["Code."]},
        {"question_id": 1, "category": "qa", "turns": ["Who?"], "reference": ["I."]},
        {"task_id": "x", "prompt": "def f():"},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(each.text, each.category, each.is_message) for each in prompts.load_questions(path)] == [
        ("Write.", "conversation", True),
        ("Code.", "conversation", True),
        ("Who?", "question answering", True),
        ("def f():", "code", False),
    ]


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [{"role": "user", "content": "Who?"}], "category": "qa"},
        {"question": "Who?"},
        {"turns": []},
        {"category": "qa", "turns": [None]},
        {"prompt": None},
        {"category": "qa", "turns": "Hello"},
        {"prompt": ""},
        {"prompt": "\ud800"},
        "the prompt",
    ],
    ids=str,
)
def test_questions_that_are_none(tmp_path: Path, line: Any) -> None:
    """Files of objects are such whatever their names."""
    path = tmp_path / "questions.txt"
    path.write_text('{"prompt": "def f():"}\n' + json.dumps(line))
    with pytest.raises(
        ValueError, match=r"questions\.txt, line 2: not a JSON object with a 'prompt', or with 'category'"
    ):
        prompts.load_questions(path)


@pytest.mark.slow
def test_messages_are_written_by_the_template_of_the_model(
    bundled_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they are read as they stand; and a model that does not chat continues code by default."""
    path = tmp_path / "two.jsonl"
    path.write_text('{"category": "qa", "turns": ["Who?"]}\n{"prompt": "def f():"}\n')
    tokenizer = Tokenizer(str(bundled_draft))

    def texts() -> list[str]:
        return [tokenizer.decode(each.tokens.tolist()) for each in prompts.choose(bundled_draft, path)[1]]

    assert texts() == ["Who?", "def f():"]
    assert prompts.choose(bundled_draft, None, 5)[0].name == names.BUNDLED_PROMPTS
    assert len(prompts.choose(bundled_draft, None, 5)[1]) == 5
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}|{% endfor %}"
    monkeypatch.setattr(prompts, "read_metadata", lambda _: {"tokenizer.chat_template": template})
    assert texts() == ["user: Who?|", "def f():"]
    assert prompts.choose(bundled_draft, None, 5)[0] == prompts.OWN
    path.write_text("")
    with pytest.raises(ValueError, match="has no prompts"):
        prompts.choose(bundled_draft, path)


# ---- The command ----


@pytest.fixture(scope="module")
def two_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    path.write_text("".join(json.dumps({"task_id": i, "prompt": f"def f{i}(x):"}) + "\n" for i in range(2)))
    return path


@pytest.mark.slow
def test_report(two_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "_MOST_SPREAD", math.inf)  # however busy the machine is
    report = Benchmark(prompts=two_prompts, max_tokens=12, baselines="none").run(quiet)
    assert list(report.tables) == ["greedy", "T=1 top-k 50", "misleading prompts"]
    assert [row.name for row in report.tables["misleading prompts"]["all"]] == ["plain", "staged"]
    assert {row.prompts for row in report.tables["misleading prompts"]["all"]} == {6}
    for sampling in ("greedy", "T=1 top-k 50"):
        assert list(report.tables[sampling]) == ["all", "code"]
        rows = report.tables[sampling]["all"]
        assert [row.name for row in rows] == list(methods.OURS.values())
        for row in rows:
            assert (row.prompts, row.different) == (2, 0)
            assert row.tokens_per_second
            assert row.tokens_per_second > 0
            assert len(row.speedups) == 2
    conditions = report.conditions
    assert conditions["model"]["sha256"] == sha256_of(names.resolve("bundled"))
    told = conditions["draft"]["about"]
    assert re.fullmatch(r"its first choice is the target's for \d+% of plain greedy tokens", told)
    about = {"file": "two.jsonl", "sha256": sha256_of(two_prompts), "chosen": 2, "used": {"code": 2}}
    assert conditions["prompts"] == about
    page = report.markdown()
    for words in (conditions["model"]["sha256"][:16], conditions["kernel"], "| **staged** |"):
        assert words in page
    assert "token for token" in page
    assert "Interrupted" not in page
    again = json.loads(json.dumps(report.to_dict()))
    assert len(again["runs"]) == 2 * 2 * len(methods.OURS) + 6 * 3 * 2 + 2
    assert "other programs: " in page
    assert report.write(tmp_path) == ["report.md", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text()) == again
    assert (tmp_path / "report.md").read_text().startswith("# target.Q8_0.gguf, draft draft.Q8_0.gguf\n")


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def command(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"NO_COLOR": "1"}
    model = [] if "--model" in arguments else ["--model", "bundled"]
    words = [sys.executable, "-m", "pystaged", "bench", *map(str, arguments), *model]
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
    return subprocess.Popen(words, text=True, **options)


PRESS = """
import os, signal, sys

jobs = iter(range(2))

def press(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "run" and "own_methods" in frame.f_code.co_filename:
        if frame.f_locals["job"]["max_tokens"] == 700 and next(jobs, None) is None:
            os.kill(os.getppid(), signal.SIGINT)

sys.setprofile(press)
"""


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(two_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while a worker measures for the third time: by that worker, at once."""
    (tmp_path / "sitecustomize.py").write_text(PRESS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    options = ["--max-tokens", "700", "--minutes", "60", "--baselines", "none"]
    child = command("--prompts", two_prompts, *options, "--out", tmp_path, start_new_session=True)
    said, errors = child.communicate(timeout=600)
    assert child.returncode == 130, errors
    assert "these are the results until then" in errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert re.search(r"prompts?, .*700 tokens", said)
    assert json.loads((tmp_path / "report.json").read_text())["complete"] is False
    assert "Interrupted" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "1000"], "choose a smaller --max-tokens"),
        (["--model", "none.gguf"], "no model file"),
    ],
)
def test_refusals(arguments: list[str], words: str) -> None:
    done = here("bench", "--model", "bundled", *arguments)
    assert (done.returncode, done.stdout) == (1, b"")
    assert words in done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--type", "q9"], "llama1b cannot be made in the type 'Q9'"),
        (["--baselines", "nobody"], "no baseline's name begins with nobody"),
        (["--llama-cpp", "."], "there is no llama-server in ."),
        (["--out", "pyproject.toml"], "pyproject.toml"),
        (["--prompts", "pyproject.toml"], "pyproject.toml, line 1: not a JSON object with a 'prompt', or"),
        (["--prompts", "-"], "No such file or directory: '-'"),
        (["--prompts", "/dev/null"], "/dev/null is no regular file"),
        (["texts", "--prompts", "/dev/null"], "/dev/null is no regular file"),
        (["parts", "--prompts", "/dev/null"], "/dev/null is no regular file"),
    ],
    ids=str,
)
def test_refusals_before_a_model_is_made(monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.setattr(models, "find", lambda *_: pytest.fail("a model is made"))
    done = here("bench", *arguments, "--model", "llama1b")
    assert (done.returncode in (1, 2), done.stdout) == (True, b"")
    assert words in " ".join(done.stderr.decode().replace("│", " ").split())


@pytest.mark.slow
def test_what_each_part_that_drafts_brings(two_prompts: Path, tmp_path: Path) -> None:
    target = write(tmp_path / "target.gguf", RandomModel("llama"))
    alone = ["n-grams of the text", "and recycled candidates"]
    of_model = ["n-grams", "draft", "one tree"]
    for arguments, parts in ((("bundled",), of_model), ((target, "--draft", "none", "--warm", "1"), alone)):
        given = ("--prompts", two_prompts, "--max-tokens", "6", "--limit", "1", "--model", *arguments)
        child = command("parts", *given)
        said, errors = child.communicate(timeout=600)
        assert child.returncode == 0, errors
        found = dict(line.removeprefix(" greedy: ").split("  ", 1) for line in said.splitlines() if " greedy: " in line)
        assert list(found) == parts
        assert all(float(figures.split()[0]) >= 1 for figures in found.values())
    child = command("parts", "--prompts", two_prompts, "--warm", "2")
    assert "leaves no prompts to measure" in child.communicate(timeout=600)[1]
    assert child.returncode == 2


@pytest.mark.slow
def test_a_model_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "GPT2_LARGE", models.GPT2_LARGE | {"width": 64, "layers": 2, "heads": 2, "context": 64})
    said: list[str] = []
    path = models.find("random", "F16", said.append)
    assert said == [f"making {path}, once"]
    model = Model(str(path))
    assert (model.width, model.num_layers, list(model.weight_types)) == (64, 2, ["f16"])
    written = path.stat().st_mtime_ns
    assert models.find("random", "F16", said.append).stat().st_mtime_ns == written
    assert len(said) == 1
    done = CliRunner().invoke(app, ["models"])
    assert "bench/gpt2-large-random:f16" in done.stdout
    assert CliRunner().invoke(app, ["models", "remove", "gpt2-large-random"]).exit_code == 0
    assert not path.exists()


TINY = {"width": 256, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 32, "ffn_width": 256, "context": 64}


@pytest.mark.slow
def test_a_grown_llama_and_its_pair_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, random_gguf: Callable[..., Path]
) -> None:
    small = tmp_path / "small.gguf"
    shape = TINY | {"width": 128, "heads": 3, "kv_heads": 1}
    copied = partial(copy_tokenizer, random_gguf())
    write_random(small, "llama", **shape, vocab_size=300, quantization="F16", add_vocabulary=copied)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(names, "_smollm2", lambda: small)
    grown = {"width": 256, "layers": 3, "heads": 8, "kv_heads": 2, "ffn_width": 256}
    monkeypatch.setattr(models, "GROWN_SMOLLM2", grown)
    path = models.find("grown-smollm2", "Q8_0")
    model = Model(str(path))
    assert (model.width, model.num_layers, model.num_heads, model.ffn_width) == (256, 3, 8, 256)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    said: list[str] = []
    assert models.find("pair", "Q8_0", said.append) == models.find("pair:0.5", "Q8_0", said.append) == path
    draft, noisier = (models.find_draft(name, "auto", said.append) for name in ("pair", "pair:0.5"))
    assert said == [f"making {draft}, once", f"making {noisier}, once"]
    assert models.find_draft("pair", "auto", said.append) == draft
    assert models.find_draft("pair", "none") is None
    assert len(said) == 2
    listed = CliRunner().invoke(app, ["models"]).stdout
    for name in ("grown-smollm2", "smollm2-noise-0.08", "smollm2-noise-0.5"):
        assert f"bench/{name}:q8_0" in listed
        assert CliRunner().invoke(app, ["models", "remove", name]).exit_code == 0
    assert not list(tmp_path.rglob("models/bench"))


def test_agreement_is_that_of_the_references_choices(random_gguf: Callable[..., Path]) -> None:
    draft, rng = random_gguf(), np.random.default_rng(0)
    reference, texts, hits = FamilyReference(draft), list[tuple[list[int], list[int]]](), list[bool]()
    for length in (1, 7, 30):
        prompt, tokens = rng.integers(300, size=length).tolist(), list[int]()
        for i in range(40):
            first = int(reference.logits(prompt + tokens)[-1].argmax())
            tokens.append(first if i % 3 else int(rng.integers(300)))
            hits.append(tokens[-1] == first)
        texts.append((prompt, tokens))
    assert pairs.agreement(Model(str(draft)), texts, {}) == np.mean(hits)
    too_long = [(list(range(60)), list(range(40)))]
    assert pairs.agreement(Model(str(draft)), too_long, {}) is None


def test_lossless_without_a_draft(random_gguf: Callable[..., Path], two_prompts: Path) -> None:
    path = str(random_gguf(vocab_size=300, context=512))
    options = ["--model", path, "--prompts", str(two_prompts), "--max-tokens", "6"]
    for draft, has_tree in (("auto", False), (path, True)):
        done = CliRunner().invoke(app, ["bench", "lossless", *options, "--draft", draft])
        assert done.exit_code == 0, done.output
        rows = [line for line in done.stdout.splitlines() if line.strip()][2:]
        assert all(row.split()[-3:] == ["0"] * 3 for row in rows), "in a pipe a row is a line"
        assert any("n-grams alone" in row for row in rows)
        assert any("tree with n-grams" in row for row in rows) == has_tree


# ---- Baselines ----


def setup(path: Path, draft: Path | None = None) -> dict[str, Any]:
    return {"model": str(path), "draft": draft and str(draft), "threads": 1, "n_ctx": 96}


def test_llama_cpp_python_takes_part(random_gguf: Callable[..., Path]) -> None:
    path = random_gguf(vocab_size=300, context=96)
    for each in methods.baselines(setup(path), [])[:2]:
        child = Worker(*each.setups)
        found = child.run({"prompt": [1, 2, 3], "sampling": WARM, "max_tokens": 12}, 600)
        assert (len(found.tokens), found.counted) == (12, 11)
        assert 0 < found.steps <= 11
        assert found.seconds > 0
        child.close()


SERVER = """#!{python}
import json, os, sys
if "--help" in sys.argv:
    sys.exit("{help}")
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "{help}" == "refuses the whole" and "stream" not in asked:
            return self.send_error(500)
        if asked["temperature"] != 1.0 or asked["seed"] != 0:
            self.send_error(400)
        times = {{"predicted_n": 12, "predicted_ms": 3000, "prompt_ms": 500, "draft_n": 9, "draft_n_accepted": 4}}
        found = {{"timings": times, "tokens": [os.getpid()]}}
        self.answer(found, "data: {{}}\\n\\ndata: " if "stream" in asked else "")
    def answer(self, found, before=""):
        self.send_response(200)
        self.end_headers()
        self.wfile.write((before + json.dumps(found)).encode())
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def build(tmp_path: Path) -> Callable[[str, str], Path]:
    """A folder with a llama-server that says what a given one says to --help."""

    def make(name: str, help_text: str) -> Path:
        program = tmp_path / name / "bin" / "llama-server"
        program.parent.mkdir(parents=True)
        program.write_text(SERVER.format(python=sys.executable, help=help_text))
        program.chmod(0o755)
        return tmp_path / name

    return make


def test_builds_by_folder(build: Callable[[str, str], Path], random_gguf: Callable[..., Path]) -> None:
    """Of llama.cpp and ik_llama.cpp, which are asked in their own words, and of several."""
    folders = [build("a", "--spec-type"), build("b", "-rtr, --run-time-repack"), build("c", "--spec-type")]
    found = {each.key: each for each in methods.baselines(setup(random_gguf(), random_gguf()), folders)}
    ways = ["plain", "draft", "prompt lookup"]
    third = f"llama.cpp of {folders[2] / 'bin' / 'llama-server'}"
    keys = [f"{name}, {way}" for name in ("llama.cpp", "ik_llama.cpp", third) for way in ways]
    assert list(found)[-len(keys) :] == keys
    (note, first), (_, safe) = found["llama.cpp, draft"].setups
    assert note == "llama-server -fa on --log-disable --spec-type draft-simple"
    assert first["draft"]
    assert "--no-repack" in safe["arguments"]
    assert found["llama.cpp, plain"].setups[0][1]["draft"] is None
    assert found["ik_llama.cpp, plain"].setups[0][0] == "llama-server -fa on --log-disable --run-time-repack"
    without = methods.baselines(setup(random_gguf()), folders[:1])
    assert not any(each.key.endswith(", draft") for each in without)
    some = methods.baselines(setup(random_gguf()), folders[:1], "llama-cpp,llama.cpp")
    assert [each.key.partition(",")[0] for each in some] == ["llama-cpp-python"] * 2 + ["llama.cpp"] * 2
    (plain,) = methods.baselines(setup(random_gguf()), folders[:1], "llama-cpp-python, plain")
    assert plain.key == "llama-cpp-python, plain"
    assert methods.baselines(setup(random_gguf()), folders, "none") == []
    with pytest.raises(ValueError, match="an empty name in"):
        methods.baselines(setup(random_gguf()), folders, "llama.cpp,")


@pytest.mark.parametrize("says", ["--spec-type", "refuses the whole"])
def test_a_server_of_llama_cpp_ends_with_its_worker(
    build: Callable[[str, str], Path], random_gguf: Callable[..., Path], says: str
) -> None:
    """One that does not answer in one piece, as ik_llama.cpp if a text ends amid a character, is asked for several."""
    folder = build("a", says)
    found = {each.key: each for each in methods.baselines(setup(random_gguf(), random_gguf()), [folder])}
    child = Worker(*found["llama.cpp, draft"].setups)
    reply = child.run({"prompt": [1], "sampling": WARM, "max_tokens": 12}, 600)
    # Of twelve tokens one came with the prompt, and four were guessed.
    assert (reply.counted, reply.seconds, reply.steps, reply.first_token_seconds) == (11, 3.0, 7, 0.5)
    (pid,) = reply.tokens
    assert psutil.pid_exists(pid)
    child.close()
    assert not psutil.pid_exists(pid)
