"""The benchmark: who takes part, what is counted, and that a peer which fails is a row and nothing worse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from random_weights import write_random_llama
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from pystaged._core import Model, Session
from pystaged.bench import conditions, contenders, models, summary, worker
from pystaged.bench.contenders import Contender
from pystaged.bench.contest import Contest, spread
from pystaged.bench.pairs import load_prompts
from pystaged.bench.report import Report
from pystaged.bench.suite import Outcome, Prompt, Run, Suite
from pystaged.bench.ways import Runner, ScriptedDrafter
from pystaged.bench.worker import Measurement, Worker, WorkerError
from pystaged.cli import app
from pystaged.config import SamplingConfig
from pystaged.decoding.loop import Decoder
from pystaged.decoding.requests import finish
from pystaged.loading import names
from pystaged.stats import GenerationStats

GREEDY = SamplingConfig()
WARM = SamplingConfig(temperature=1.0, top_k=50)


def quiet(doing: str, done: float, left: float) -> None:
    assert doing
    assert done >= 0
    assert left >= 0


# ---- Our own ways ----


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_all_ways_write_the_same(sampling: SamplingConfig) -> None:
    setup = {"model": "house", "draft": "house", "threads": 0, "n_ctx": 256, "accept": [0.9, 0.5]}
    runner = Runner(setup)
    prompt = list(range(100, 120))
    job = {"prompt": prompt, "sampling": sampling, "max_tokens": 24}
    plain = runner.run(job | {"way": "plain"})
    assert (len(plain.tokens), plain.counted, plain.steps) == (24, 24, 24)
    assert plain.relative_weight_bytes == 1
    for way in [*contenders.OURS, "synthetic"]:
        found = runner.run(job | {"way": way, "script": plain.tokens})
        assert found.tokens == plain.tokens
        assert sum(found.emitted.values()) == 24
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert min(found.parts.values()) >= 0
        assert found.first_token_seconds > 0
        if way in ("chain", "tree"):
            assert found.emitted["ngram"] == 0
        if way == "n-grams":
            assert found.emitted["draft"] == 0
    runner.close()


def test_what_was_continued_before_is_remembered(random_gguf: Callable[..., Path]) -> None:
    setup = {"model": str(random_gguf("Q8_0")), "draft": None, "threads": 1, "n_ctx": 96, "accept": []}
    prompt = list(range(3, 20))
    job = {"way": "n-grams", "prompt": prompt, "sampling": SamplingConfig(), "max_tokens": 40, "script": []}
    cold, warm = (Runner(setup | {"warm": others}) for others in ([], [prompt]))
    before = cold.run(job)
    for _ in range(2):  # nothing is remembered of the prompts measured
        after = warm.run(job)
        assert after.tokens == before.tokens
    for memory, at_first in warm._memories.values():
        memory.become(at_first)
        assert len(memory.entries()[0]) > 0
    assert not cold._memories
    cold.close()
    warm.close()
    assert not warm._memories


def test_a_chain_is_a_chain() -> None:
    runner = Runner({"model": "house", "draft": "house", "threads": 0, "n_ctx": 128, "accept": []})
    decoder = runner._decoder("chain")
    finish(decoder.start(np.arange(100, 110, dtype=np.int32)))
    for _ in range(10):
        tree = finish(decoder.step(GREEDY, 16)).tree
        assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    decoder.close()


# ---- Synthetic acceptance ----


@pytest.mark.parametrize("with_draft", [True, False])
def test_scripted_acceptance_comes_true(random_gguf: Callable[..., Path], with_draft: bool) -> None:
    target = Model(str(random_gguf(context=640)))
    rates = [0.9, 0.5, 0.7]
    drafter = ScriptedDrafter(
        rates,
        Session(target) if with_draft else None,
        lambda rows: 1.0 + 0.001 * rows,
        lambda rows: 0.001 * rows,
        vocab_size=target.vocab_size,
        seed=1,
    )
    assert drafter.length == 3
    prompt = np.arange(8, dtype=np.int32)
    expected = [token for step in Decoder(Session(target)).generate(prompt, WARM, 600) for token in step.tokens]
    decoder, stats = Decoder(Session(target), drafter), GenerationStats()
    drafter.script = expected
    written = [token for step in decoder.generate(prompt, WARM, 600, stats=stats) for token in step.tokens]
    assert written == expected
    # Near the end and by chance a little off; 3.5 standard deviations of so many draws.
    for depth, rate in enumerate(rates, 1):
        tries = stats.offered[depth]
        assert abs(stats.taken[depth] / tries - rate) < 3.5 * (rate * (1 - rate) / tries) ** 0.5
    assert (drafter.work()["draft"].passes > 0) == with_draft
    decoder.close()


def test_a_chain_is_as_long_as_pays() -> None:
    def length(rates: list[float], row: float, draft: float) -> int:
        return ScriptedDrafter(rates, None, lambda n: 1 + row * (n - 1), lambda n: draft * n, vocab_size=10).length

    assert length([0.9] * 8, 0.0, 0.0) == 8
    assert length([0.0] * 8, 0.1, 0.0) == 0
    assert length([0.9, 0.9, 0.01, 0.9], 0.1, 0.1) == 2
    assert length([0.9] * 8, 0.0, 2.0) == 0


# ---- Workers ----

PEER = """
    import os, signal, sys, time
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
            if self.setup["does"] == "hang":
                time.sleep(100)
            return Measurement(job["max_tokens"], 2.0, 0.5, tokens=[7])
        def close(self):
            pass
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Setups of a peer that does as it is told."""
    (tmp_path / "fake_peer.py").write_text(textwrap.dedent(PEER))
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda does: {"runner": "fake_peer", "does": does}


def contender(
    key: str, setups: list[tuple[str, dict[str, Any]]], *, is_peer: bool = True, missing: str = ""
) -> Contender:
    return Contender(key, "plain", key, is_peer, setups, missing)


def test_a_worker_answers_whatever_else_it_prints(fake: Callable[[str], dict[str, Any]]) -> None:
    child = Worker(("", fake("well")))
    found = child.run({"max_tokens": 8}, 30)
    assert (found.counted, found.tokens_per_second, found.tokens) == (8, 4.0, [7])
    if sys.platform == "linux":
        assert 10e6 < found.peak_bytes < 4e9
    child.close()


@pytest.mark.parametrize(("does", "words"), [("crash", "crashed: SIGSEGV"), ("refuse", "ValueError: no such thing")])
def test_a_worker_that_fails(fake: Callable[[str], dict[str, Any]], does: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        Worker(("", fake(does))).run({"max_tokens": 8}, 30)


def test_a_worker_that_hangs(fake: Callable[[str], dict[str, Any]]) -> None:
    child = Worker(("", fake("hang")))
    with pytest.raises(WorkerError, match="no answer within 1 s"):
        child.run({"max_tokens": 8}, 1.0)
    child.close()


def test_the_next_setup_takes_over(fake: Callable[[str], dict[str, Any]]) -> None:
    child = Worker(("fast", fake("crash")), ("slow", fake("well")))
    assert child.run({"max_tokens": 8}, 30).counted == 8
    first, second = child.notes
    assert first.startswith("fast: crashed: SIGSEGV")
    assert second == "slow"
    child.close()


def test_peers_that_fail_are_rows(fake: Callable[[str], dict[str, Any]]) -> None:
    """The others go on, in turn, and the report says what happened."""
    taking_part = [
        contender("plain", [("", fake("well"))], is_peer=False),
        contender("crashing", [("", fake("crash"))]),
        contender("absent", [], missing="not installed: it"),
        contender("good", [("a word on it", fake("well"))]),
    ]
    prompts = [Prompt("x", np.array([1], np.int32)), Prompt("y", np.array([2], np.int32))]
    suite = Suite(taking_part, prompts, [1], {"greedy": GREEDY}, 8, 2, quiet)
    outcome = suite.run()
    assert outcome.complete
    assert [(run.contender, run.prompt) for run in outcome.runs] == [
        ("plain", 0),
        ("good", 1),
        ("plain", 1),
        ("plain", 0),
        ("plain", 1),
        ("good", 1),
    ]
    plain, crashing, absent, good = summary.rows(taking_part, outcome, "greedy")
    assert crashing.tokens_per_second is absent.tokens_per_second is None
    assert crashing.notes[0].startswith("crashed: SIGSEGV")
    assert (absent.notes, good.notes) == (["not installed: it"], ["a word on it"])
    assert (plain.prompts, good.prompts, plain.speedup, good.over_best_peer) == (2, 1, 1.0, 1.0)


# ---- Figures ----


def run(who: str, prompt: int, counted: int, seconds: float, **others: Any) -> Run:
    return Run(who, "greedy", prompt, Measurement(counted, seconds, 0.25, **others))


def test_figures_are_of_the_prompts_that_both_had() -> None:
    taking_part = [contender("plain", [], is_peer=False), contender("staged", [], is_peer=False), contender("peer", [])]
    outcome = Outcome(notes={each.key: [] for each in taking_part})
    outcome.runs = [
        run("plain", 0, 10, 1.0, tokens=[1], steps=10, relative_weight_bytes=1.0),
        run("plain", 1, 10, 4.0, tokens=[2], steps=10, relative_weight_bytes=1.0),
        run("staged", 0, 10, 0.5, tokens=[1], steps=5, relative_weight_bytes=0.5, offered={1: 4}, taken={1: 3}),
        run("staged", 1, 10, 1.0, tokens=[3], steps=2, relative_weight_bytes=0.3, offered={1: 4, 2: 1}),
        run("peer", 1, 5, 1.0),
    ]
    plain, staged, peer = summary.rows(taking_part, outcome, "greedy")
    assert (plain.tokens_per_second, staged.tokens_per_second) == (4.0, pytest.approx(20 / 1.5))
    assert staged.speedup == pytest.approx((20 / 1.5) / 4)
    assert (staged.speedups, staged.spread) == ([2.0, 4.0], (2.0, 3.0, 4.0))
    assert (staged.over_best_peer, peer.over_best_peer, plain.over_best_peer) == (2.0, 1.0, 0.5)
    assert (peer.speedup, peer.tokens_per_step, peer.relative_weight_bytes) == (2.0, None, None)
    assert (staged.tokens_per_step, staged.relative_weight_bytes) == (pytest.approx(20 / 7), pytest.approx(0.4))
    assert (staged.different, plain.different, peer.different) == (1, 0, None)
    assert staged.acceptance_at_depth == [0.375, 0.0]
    assert staged.first_token_ms == 250


@pytest.mark.parametrize(("items", "most", "expected"), [(5, 9, [0, 1, 2, 3, 4]), (6, 3, [0, 2, 4]), (5, 2, [0, 2])])
def test_spread(items: int, most: int, expected: list[int]) -> None:
    assert spread(range(items), most) == expected


# ---- The command ----


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    path.write_text("".join(json.dumps({"task_id": i, "prompt": f"def f{i}(x):"}) + "\n" for i in range(2)))
    return path


@pytest.fixture(scope="module")
def report(prompts: Path) -> Report:
    return Contest(prompts=prompts, max_tokens=12, peers=False).run(quiet)


@pytest.mark.slow
def test_report(report: Report, prompts: Path) -> None:
    assert list(report.tables) == ["greedy", "T=1 top-k 50"]
    for rows in report.tables.values():
        assert [row.name for row in rows] == list(contenders.OURS.values())
        for row in rows:
            assert (row.prompts, row.different) == (2, 0)
            assert row.tokens_per_second
            assert row.tokens_per_second > 0
            assert len(row.speedups) == 2
    conditions = report.conditions
    assert conditions["model"]["sha256"] == worker_sha(names.resolve("house"))
    assert conditions["prompts"] == {"file": "two.jsonl", "sha256": worker_sha(prompts), "used": 2, "peers": 0}
    page = report.markdown(["speedup.png"])
    for words in (
        conditions["model"]["sha256"][:16],
        conditions["kernel"],
        "| **staged** |",
        "![speedup](speedup.png)",
    ):
        assert words in page
    assert "token for token" in page
    assert "Interrupted" not in page
    again = json.loads(json.dumps(report.to_dict()))
    assert len(again["runs"]) == 2 * 2 * len(contenders.OURS)


def worker_sha(path: Path) -> str:
    return subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]


@pytest.mark.parametrize("width", [160, 80, 40])
def test_tables_fit_the_terminal(report: Report, width: int) -> None:
    tables = [part for part in report.terminal(width) if isinstance(part, Table)]
    needed = [Console(width=500).measure(table).maximum for table in tables]
    assert max(needed) <= max(width, 50)
    assert all([column.header for column in table.columns][1:3] == ["tokens/s", "x plain"] for table in tables)
    assert width < 160 or all(len(table.columns) == 9 for table in tables)


def command(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "pystaged", "bench", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


@pytest.mark.slow
def test_command_with_synthetic_acceptance(prompts: Path, tmp_path: Path) -> None:
    child = command(
        "--prompts", prompts, "--max-tokens", "16", "--accept", "1,1", "--out", tmp_path / "report", "--json"
    )
    said, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    found = json.loads(said)
    assert found == json.loads((tmp_path / "report" / "report.json").read_text())
    for rows in found["tables"].values():
        assert [row["name"] for row in rows] == ["plain", "synthetic, accept 1, 1"]
        assert rows[1]["different"] == 0
        assert set(rows[1]["acceptance_at_depth"]) <= {1.0}
    assert (tmp_path / "report" / "report.md").read_text().startswith("# target.Q8_0.gguf, draft draft.Q8_0.gguf\n")


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(prompts: Path, tmp_path: Path) -> None:
    child = command(
        "--prompts",
        prompts,
        "--max-tokens",
        "900",
        "--repeats",
        "50",
        "--no-peers",
        "--out",
        tmp_path,
        start_new_session=True,
    )
    # It says nothing in a pipe until the end. Its first workers try each way out; the one that measures lives on.
    seen: dict[int, float] = {}
    while child.poll() is None:
        for process in psutil.Process(child.pid).children():
            seen.setdefault(process.pid, time.monotonic())
        if (
            any(time.monotonic() - since > 15 and psutil.pid_exists(pid) for pid, since in seen.items())
            and len(seen) > 5
        ):
            break
        time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    said, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "these are the results until then" in errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert "greedy, 2 prompts, 900 tokens each" in said
    assert json.loads((tmp_path / "report.json").read_text())["complete"] is False
    assert "Interrupted" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--accept", "0.5,2"], "--accept takes probabilities"),
        (["--accept", "x"], "--accept takes probabilities"),
        (["--llama-cpp", "."], "there is none of llama-speculative"),
        (["--max-tokens", "1000"], "choose a smaller --max-tokens"),
        (["--model", "none.gguf"], "no model file"),
        (["--prompts", "pyproject.toml"], "not a JSON object with a 'prompt'"),
        (["--prompts", "/dev/zero"], "/dev/zero is no regular file"),
    ],
)
def test_refusals(arguments: list[str], words: str) -> None:
    child = command(*arguments)
    said, errors = child.communicate(timeout=60)
    assert (child.returncode, said) == (1, "")
    assert words in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("program", [["pystaged", "bench"], ["pystaged.bench"]])
def test_parts_of_the_benchmark_are_commands_of_both_names(program: list[str], prompts: Path) -> None:
    ask = [sys.executable, "-m", *program, "lossless", "--prompts", prompts, "--max-tokens", "6", "--seeds", "1"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "texts that differ from plain decoding" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()][2:]
    assert rows
    assert all(row[-3:] == ["0"] * 3 for row in rows), "in a pipe a row is a line"


def test_options_before_the_name_of_a_part_are_not_lost() -> None:
    child = command("--model", "grown", "passes")
    said, errors = child.communicate(timeout=60)
    assert (child.returncode, said) == (2, "")
    assert "the options of passes stand after its name" in errors


def test_prompts_of_brackets_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"deep\.jsonl, line 1: not a JSON object with a 'prompt'"):
        load_prompts(path)


def test_a_model_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {"WIDTH": 640, "LAYERS": 9, "HEADS": 10, "CONTEXT": 64}.items():
        monkeypatch.setattr(models, name, value)
    said: list[str] = []
    path = models.find("grown", "F16", said.append)
    assert said == [f"making {path}, once"]
    model = Model(str(path))
    assert (model.width, model.num_layers, list(model.weight_types)) == (640, 9, ["f16"])
    written = path.stat().st_mtime_ns
    assert models.find("grown", "F16", said.append).stat().st_mtime_ns == written
    assert len(said) == 1


TINY = {"width": 256, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 32, "ffn_width": 256, "context": 64}


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q4_K", "Q4_K_M"])
def test_random_llamas_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, house_draft: Path, quantization: str
) -> None:
    """With the tokens of SmolLM2, for which the house draft stands in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(names, "_smollm2", lambda: house_draft)
    monkeypatch.setitem(models.LLAMAS, "llama1b", TINY | {"vocab_size": 50300, "tie": True})
    path = models.find("llama1b", quantization)
    model = Model(str(path))
    assert (model.architecture, model.width, model.num_kv_heads, model.vocab_size) == ("llama", 256, 2, 50300)
    assert path == models.find("llama1b", quantization)
    assert "random weights" in conditions.model_file(path, "llama1b")["about"]


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_K_M"])
def test_a_grown_llama_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, house_draft: Path, quantization: str
) -> None:
    small = tmp_path / "small.gguf"
    shape = TINY | {"width": 128, "heads": 3, "kv_heads": 1}
    write_random_llama(small, **shape, vocab_size=50257, quantization="F16", vocabulary=house_draft)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(names, "_smollm2", lambda: small)
    grown = {"width": 256, "layers": 3, "heads": 8, "kv_heads": 2, "ffn_width": 256}
    monkeypatch.setattr(models, "GROWN_SMOLLM2", grown)
    path = models.find("grown-smollm2", quantization)
    model = Model(str(path))
    assert (model.width, model.num_layers, model.num_heads, model.ffn_width) == (256, 3, 8, 256)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_drafts_of_made_models(house_draft: Path) -> None:
    assert models.find_draft("grown", "auto") == models.find_draft("house", "auto") == house_draft
    assert models.find_draft("grown-smollm2", "auto") is models.find_draft("llama1b", "auto") is None
    assert models.find_draft("house", None) is None


def test_lossless_without_a_draft(random_gguf: Callable[..., Path], prompts: Path) -> None:
    path = str(random_gguf(vocab_size=300, context=512))
    arguments = ["bench", "lossless", "--model", path, "--prompts", str(prompts), "--max-tokens", "6", "--seeds", "1"]
    alone = CliRunner().invoke(app, arguments)
    assert alone.exit_code == 0, alone.output
    assert "n-grams alone" in alone.output
    assert "three models" not in alone.output
    with_itself = CliRunner().invoke(app, [*arguments, "--draft", path])
    assert with_itself.exit_code == 0, with_itself.output
    assert "three models" in with_itself.output


# ---- Peers ----


def setup(path: Path, draft: Path | None = None) -> dict[str, Any]:
    return {"model": str(path), "draft": draft and str(draft), "draft_share": 0.5, "threads": 1, "n_ctx": 96}


def test_llama_cpp_python_takes_part(random_gguf: Callable[..., Path]) -> None:
    path = random_gguf(vocab_size=300, context=96)
    for each in contenders.peers(setup(path), None)[:2]:
        child = Worker(*each.setups)
        found = child.run({"prompt": [1, 2, 3], "sampling": WARM, "max_tokens": 12}, 60)
        assert (len(found.tokens), found.counted) == (12, 11)
        assert 0 < found.steps <= 11
        assert found.seconds > 0
        child.close()


def test_a_folder_of_programs(tmp_path: Path, random_gguf: Callable[..., Path]) -> None:
    """Programs of a build, or of its bin folder; those that are not there are rows that say so."""
    program = tmp_path / "bin" / "llama-lookup"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -m ] || exit 3\n'
        "echo 'encoded    4 tokens in    0.500 seconds, speed: 8 t/s'\n"
        "echo 'decoded   12 tokens in    3.000 seconds, speed: 4 t/s'\n"
        "echo 'n_drafted    = 9'; echo 'n_accept     = 4'\n"
    )
    program.chmod(0o755)
    found = {each.key: each for each in contenders.peers(setup(random_gguf(), random_gguf()), tmp_path)}
    assert found["llama-server, draft-simple"].missing == f"not in {tmp_path.name}"
    lookup = found["llama-lookup"]
    child = Worker(*lookup.setups)
    job = {"text": "x", "prompt": [1], "sampling": GREEDY, "max_tokens": 12}
    reply = child.run(job, 30)
    assert (reply.counted, reply.seconds, reply.steps) == (12, 3.0, 8)
    assert reply.relative_weight_bytes == pytest.approx(8 / 12)
    child.close()
    program.write_text("#!/bin/sh\necho it broke; kill -ILL $$\n")
    with pytest.raises(WorkerError, match="llama-lookup ended with -4"):
        Worker(*lookup.setups).run(job, 30)


SERVER = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["temperature"] != 1.0 or asked["seed"] != 0:
            self.send_error(400)
        times = {{"predicted_n": 12, "predicted_ms": 3000, "prompt_ms": 500, "draft_n": 9, "draft_n_accepted": 4}}
        self.answer({{"timings": times, "tokens": [os.getpid()]}})
    def answer(self, found):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_of_llama_cpp_ends_with_its_worker(tmp_path: Path, random_gguf: Callable[..., Path]) -> None:
    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    found = {each.key: each for each in contenders.peers(setup(random_gguf(), random_gguf()), tmp_path)}
    child = Worker(*found["llama-server, draft-simple"].setups)
    reply = child.run({"prompt": [1], "sampling": WARM, "max_tokens": 12}, 30)
    assert (reply.counted, reply.seconds, reply.steps) == (12, 3.0, 8)
    assert reply.relative_weight_bytes == pytest.approx((8 + 0.5 * 9) / 12)
    (pid,) = reply.tokens
    assert psutil.pid_exists(pid)
    child.close()
    assert not psutil.pid_exists(pid)


def test_peak_memory_is_of_this_process() -> None:
    before = worker.peak_bytes()
    if before == 0:
        pytest.skip("the system does not tell")
    block = np.ones(before // 8 + 25_000_000)
    assert worker.peak_bytes() > block.nbytes
