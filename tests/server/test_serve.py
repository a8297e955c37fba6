"""The command: it says what it serves, asks for keys, and ends when it is told to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.commands import assert_refused, here, run
from support.server import SECONDS, Server

import pystaged
from pystaged.cli import serve
from pystaged.loading import names
from pystaged.server import run as run_server
from pystaged.server.app import application
from pystaged.server.models import Models
from pystaged.server.run import Server as Running
from pystaged.server.run import bound
from pystaged.server.settings import Settings

UNFILTERED = ("--top-k", "0", "--top-p", "1", "--min-p", "0")


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Server, list[str]]]:
    """The command, once it listens; its process, how it is asked, and what it said."""
    command = [sys.executable, "-m", "pystaged", "serve", *options, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        try:
            said: list[str] = []
            port = None
            assert process.stderr is not None
            while port is None:
                line = process.stderr.readline()
                assert line, said
                said.append(line)
                port = re.search(r"listening on http://[^ ]+:(\d+)", line)
            yield process, Server(int(port[1])), said
        finally:
            process.kill()


@pytest.fixture
def path(random_gguf: Callable[..., Path]) -> str:
    return str(random_gguf("F32", context=512))


def ask(server: Server, **options: Any) -> Any:
    status, body = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 8} | options)
    assert status == 200, body
    return body


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(path: str, number: signal.Signals) -> None:
    options = ("--max-tokens", "6", "--seed", "42", "--temperature", "0.5", *UNFILTERED)
    with serving(path, *options) as (process, server, said):
        assert any("gpt2" in line for line in said)
        body = ask(server)
        assert (body["seed"], body["usage"]["completion_tokens"]) == (42, 6)
        assert body["model"] == Path(path).stem
        expected = pystaged.generate("a", model=path, max_tokens=6, seed=42, temperature=0.5).text
        assert body["choices"][0]["text"] == expected
        process.send_signal(number)
        assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_a_file_of_the_hub_is_served_under_its_hub_id(path: str, tmp_path: Path) -> None:
    cached = tmp_path / "pystaged" / "models" / "someone" / "tiny" / "a.gguf"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(path)
    address = "https://huggingface.co/someone/tiny/blob/main/a.gguf"
    with serving(address, XDG_CACHE_HOME=str(tmp_path)) as (_, server, _):
        assert [card["id"] for card in server.ask("/v1/models")[1]["data"]] == ["someone/tiny:a.gguf"]


LONG = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}


@pytest.mark.slow
def test_texts_in_progress_may_end(path: str) -> None:
    with serving(path) as (process, server, _):
        response = server.send("POST", "/v1/completions", LONG)
        response.read(10)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said == "requests in progress: 1; waiting 30 s at most, Ctrl-C again ends at once\n"
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(SECONDS) == 0


@pytest.mark.slow
def test_ctrl_c_that_comes_twice_is_one(path: str) -> None:
    """From the terminal, and from a program in between."""
    with serving(path) as (process, server, _):
        response = server.send("POST", "/v1/completions", LONG)
        response.read(10)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert process.stderr is not None
        assert process.stderr.readline().startswith("requests in progress: 1")
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
        assert process.stderr.read() == ""


def test_signals_in_a_moment_are_one(engine: pystaged.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    server, other = (Running(application(Models.of(engine, Settings("tiny"))), 1) for _ in range(2))
    for _ in range(2):
        server.handle_exit(signal.SIGINT, None)
    assert (server.should_exit, server.force_exit) == (True, False)
    for sent in (signal.SIGTERM, signal.SIGINT):  # which are never one
        other.handle_exit(sent, None)
    assert other.force_exit
    monkeypatch.setattr(run_server, "_ONE_PRESS", -1.0)
    server.handle_exit(signal.SIGINT, None)
    assert server.force_exit


@pytest.mark.slow
def test_keys_of_options_files_and_the_environment(path: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("of a file\n\n")
    options = ["--api-key", "given", "--api-key-file", str(keys), "--log-requests", "--alias", "mine", "--strict"]
    with serving(path, *options, PYSTAGED_API_KEY="of environment") as (_, server, _):
        for key in ("given", "of a file", "of environment"):
            body = {"prompt": "a", "max_tokens": 1, "model": "mine"}
            assert server.ask("/v1/completions", body, Authorization=f"Bearer {key}")[0] == 200
        assert server.ask("/v1/models")[0] == 401


@pytest.mark.slow
def test_what_cannot_be_served(path: str, tmp_path: Path) -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        done = run("serve", path, "--port", str(taken.getsockname()[1]))
        assert_refused(done, "cannot listen on 127.0.0.1", "--port names another one")
    (tmp_path / "keys").write_text("\n")
    assert_refused(here("serve", path, "--api-key-file", tmp_path / "keys"), "has no keys")
    for option, value in (("--metrics-prefix", "no such!"), ("--temperature", "-1")):
        done = here("serve", path, option, value)
        assert (done.returncode, option[2:].encode() in done.stderr) == (2, True)


def test_files_of_several_models(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-b.gguf", "note.txt"):
        (tmp_path / name).write_bytes(b"GGUF")
    monkeypatch.chdir(Path(path).parent)
    for name in (Path(path).name, Path(path).stem):  # in the current folder
        assert (names.resolve(name), names.name_of(name)) == (Path(Path(path).name), Path(path).stem)
    with pytest.raises(FileNotFoundError, match=f"did you mean {Path(path).name}"):
        names.resolve(f"{Path(path).stem}:latest")
    found = names.several([path, "bundled"], tmp_path)
    assert {"bundled", Path(path).stem, "a-00001-of-00002", "b"} <= found.keys()
    assert not found.keys() & {"a-00002-of-00002", "mmproj-b", "note"}
    assert found[Path(path).stem] == Path(path)
    (tmp_path / "more").mkdir()
    other = tmp_path / "more" / "b.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="two models are named b"):
        names.several([str(tmp_path / "b.gguf"), str(other)], None)
    with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path / 'none'}"):
        names.several([], tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no GGUF file"):
        names.several([], tmp_path / "empty")


def test_options_of_one_model_and_of_several(path: str) -> None:
    for options, words in (
        ([path, "bundled", "--alias", "x"], "--alias and --draft are for one model"),
        ([path, "bundled", "--draft", path], "--alias and --draft are for one model"),
        ([path, "--default", "x"], "--default is for several models"),
        ([path, "--model", path], "name the models once"),
    ):
        done = here("serve", *options)
        assert (done.returncode, words in done.stderr.decode()) == (2, True)


@pytest.mark.slow
def test_several_are_served_by_their_names(path: str) -> None:
    with serving(path, "bundled", "--n-ctx", "64", "--default", "bundled") as (_, server, said):
        assert any("loaded when they are asked for" in line for line in said)
        assert ask(server, model=Path(path).stem)["model"] == Path(path).stem
        assert ask(server, model="gpt-4")["model"] == "bundled"


def test_memory_is_not_shared_unless_asked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def stop(name: str, options: Any, **_: bool) -> None:
        seen.append(options["recycle"])
        raise ValueError(json.dumps(name))

    monkeypatch.setattr(serve, "open_engine", stop)
    for options in ([], ["--recycle"]):
        here("serve", path, "--port", "0", *options)
    assert seen == [False, True]
