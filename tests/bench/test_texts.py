"""Texts written together: who writes them, what is counted, and what the program prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pystaged
from pystaged.bench import baseline_llama_cpp
from pystaged.bench.baseline_llama_cpp import Server
from pystaged.bench.texts import Figures, LeftOut, TextsReport, Written, _summary, write
from pystaged.cli import app
from pystaged.options.config import GenerationConfig

SERVER = """#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = sys.argv
print("what nobody reads")
if "{fails}" == "loading":
    sys.exit(3)
slots = int(arguments[arguments.index("-np") + 1])
assert int(arguments[arguments.index("-c") + 1]) % slots == 0
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{{}}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "{fails}" == "writing":
            return self.send_error(500)
        self.send_response(200)
        self.end_headers()
        if "{fails}" == "silence":
            time.sleep(60)
        if "{fails}" == "kinds":
            return self.wfile.write(b'data: {{"content": "x", "tokens": 5}}\\n\\n')
        for i in range(asked["n_predict"]):
            self.wfile.write(b"data: " + json.dumps({{"content": "x", "tokens": [slots]}}).encode() + b"\\n\\n")
        self.wfile.write(b"data: " + json.dumps({{"stop": True, "tokens": []}}).encode() + b"\\n\\n")
ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def path(random_gguf: Callable[..., Path]) -> Path:
    return random_gguf(vocab_size=300, context=96)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(3)))
    return path


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["bench", "texts", *map(str, arguments)])


def test_figures_are_of_the_time_in_which_all_write() -> None:
    first = Written([1] * 5, [(1.0, 1), (2.0, 2), (4.0, 2)])
    second = Written([1] * 4, [(3.0, 1), (5.0, 1), (6.0, 2)])
    found = _summary("plain", [first, second], 0, None)
    # From 3 to 4 both write: two tokens of the first.
    assert found.tokens_per_second == 2
    assert found.of_each == pytest.approx((4 / 3 + 3 / 3) / 2)
    assert found.first_token_seconds == 2
    assert found.longest_gap_seconds == 2


def test_ours_are_what_texts_are_alone(path: Path) -> None:
    with pystaged.load(path, draft=None) as engine:
        prompts = [engine.encode(prompt) for prompt in ("the tree", "her hat", "o")]
        for speculate in (False, True):
            written, passes = write(engine, GenerationConfig(max_tokens=40, speculate=speculate), 12, prompts)
            for prompt, text in zip(prompts, written, strict=True):
                found = engine.generate(prompt, max_tokens=40).tokens
                assert text.tokens[: len(found)] == found[: len(text.tokens)]
                assert 12 <= len(text.tokens) == sum(count for _, count in text.times)
            assert passes
            assert passes.prompt_rows == sum(map(len, prompts)) - 3


def server(folder: Path, fails: str = "") -> Path:
    """A folder with a llama-server."""
    program = folder / "build" / "bin" / "llama-server"
    program.parent.mkdir(parents=True)
    program.write_text(SERVER.format(python=sys.executable, fails=fails))
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("loading", "ended with 3 while loading"),
        ("writing", "refused"),
        ("kinds", "answers oddly: its tokens are 5"),
        ("silence", "was silent for 0.2 seconds"),
    ],
)
def test_a_server_that_fails_is_a_row_with_its_reason(
    path: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, reason: str
) -> None:
    if fails == "silence":
        monkeypatch.setattr(baseline_llama_cpp, "_LONGEST_SILENCE", 0.2)
    options = ("--draft", path, "--texts", "2", "--max-tokens", "9", "--json")
    done = run("--model", path, "--prompts", prompts, "--llama-cpp", server(tmp_path, fails), *options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [each["way"] for each in found["figures"]] == ["plain", "drafted"]
    ways = ["llama-server, plain", "llama-server, draft-simple"]
    assert [(each["texts"], each["way"]) for each in found["left_out"]] == [(2, way) for way in ways]
    for each in found["left_out"]:
        assert reason in each["reason"]
    for way in ways:
        assert f"2 texts, {way} takes no part" in done.stderr
    report = TextsReport(found["conditions"], [], [LeftOut(**each) for each in found["left_out"]])
    assert report.table().row_count == 2


def test_a_server_ends_when_whoever_waits_for_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def interrupted(server: Server) -> bool:
        begun.append(server.process)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Server([sys.executable, "-c", "import time; time.sleep(600)"])
    assert begun[0].poll() is not None


@pytest.mark.slow
def test_command(path: Path, prompts: Path, tmp_path: Path) -> None:
    options = ("--prompts", prompts, "--texts", "1,4", "--max-tokens", "12", "--json")
    done = run("--model", path, *options, "--llama-cpp", server(tmp_path))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    ways = ["plain", "drafted", "llama-server, plain"]
    assert [(each["texts"], each["way"]) for each in found["figures"]] == [(n, way) for n in (1, 4) for way in ways]
    report = TextsReport(found["conditions"], [Figures(**each) for each in found["figures"]])
    for each in report.figures:
        assert each.tokens_per_second > 0
        assert each.first_token_seconds > 0
        assert (each.passes is not None) == (each.way in ways[:2])
        assert (each.different == 0) == (each.way in ways[:2])
    assert report.table().row_count == 6
    assert "our texts are the plain ones" in str(report.table().caption)


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--max-tokens", "90"], "the model's context holds 96"), (["--llama-cpp", "/"], "there is no llama-server in /")],
)
def test_refusals(path: Path, prompts: Path, options: list[str], words: str) -> None:
    done = run("--model", path, "--prompts", prompts, *options)
    assert done.exit_code == 1
    assert words in str(done.exception)
