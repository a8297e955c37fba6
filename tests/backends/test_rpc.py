"""Layers split over RPC servers on loopback, and what happens when one goes: needs ggml built with RPC."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.families import CASES
from support.random_models import write
from support.remote import Turncoat, Wire, over
from support.steps import evaluate, prefill

import pystaged
from pystaged import DeviceError, DeviceLostError, FixedPolicy, SamplingConfig, _core
from pystaged._core import Model, Sampling, Session, Tokenizer
from pystaged.backends import rpc
from pystaged.backends.devices import failure
from pystaged.bench.pairs import continuation
from pystaged.cli import rpc_server
from pystaged.decoding.context import Context
from pystaged.sampling.binding import bind

PROMPT = "def fibonacci(n):"
TREE = FixedPolicy(4, 5, 12)


def has_rpc() -> bool:
    try:
        _core.rpc_version()
    except DeviceError:
        return False
    return True


Start = Callable[[], tuple[str, subprocess.Popen[bytes]]]
without_rpc = pytest.mark.skipif(not has_rpc(), reason="llama-cpp-python is built without RPC")


def needs_rpc(test: Any) -> Any:
    return pytest.mark.rpc(without_rpc(test))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_sampling_is_sent_once_for_a_text(random_gguf: Callable[..., Path]) -> None:
    """However much its rules hold."""
    path = random_gguf(vocab_size=300, context=512)
    model, tokenizer = Model(str(path)), Tokenizer(str(path))
    wire = Wire(model)
    remote = Context(over(wire, 512))  # type: ignore[arg-type]
    local = Context(Session(model))
    prompt = tokenizer.encode("the tree then the tree ")
    for seed in (1, 2):
        sampling = SamplingConfig(
            1.0, seed=seed, logit_bias={i: i / 300 for i in range(300)}, dry_multiplier=1.0, repeat_penalty=1.1
        )
        bound = bind(sampling, tokenizer, len(prompt))
        assert continuation(remote, prompt, bound, 12) == continuation(local, prompt, bound, 12)
    assert [name for name, _ in wire.sizes].count("keep") == 2
    assert max(size for name, size in wire.sizes if name == "keep") > 3000
    assert max(size for name, size in wire.sizes if name != "keep") < 600


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts a server and gives its endpoint and process."""
    processes = []

    def run() -> tuple[str, subprocess.Popen[bytes]]:
        port = free_port()
        command = [sys.executable, "-m", "pystaged", "rpc-server", "--port", str(port), "--threads", "1"]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        endpoint = f"127.0.0.1:{port}"
        for _ in range(300):
            try:
                rpc.check_server(endpoint)
                break
            except DeviceError:
                time.sleep(0.1)
        return endpoint, processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()


@needs_rpc
def test_two_servers_write_what_one_writes(start: Start) -> None:
    (one, _), (two, _) = start(), start()
    texts = []
    for device, devices in ((f"rpc:{one}", 1), (f"rpc:{one},{two}", 2)):
        with pystaged.load("bundled", device=device, policy=TREE) as engine:
            assert len(engine.model.devices) == devices
            texts.append(engine.generate(PROMPT, max_tokens=48).text)
    with pystaged.load("bundled", device="ggml-cpu", policy=TREE, num_threads=1) as engine:
        texts.append(engine.generate(PROMPT, max_tokens=48).text)
    assert texts[0] == texts[1] == texts[2]


@needs_rpc
@pytest.mark.parametrize("case", ["qwen3moe", "gemma4", "deepseek2", "lfm2", "granitehybrid"])
def test_mixtures_and_hybrids_over_two_servers(start: Start, tmp_path: Path, case: str) -> None:
    (one, _), (two, _) = start(), start()
    path, texts = write(tmp_path / "model.gguf", CASES[case]), []
    for device in (f"rpc:{one},{two}", "ggml-cpu"):
        with pystaged.load(path, device=device, draft=None, num_threads=1, policy=TREE) as engine:
            texts.append(engine.generate([5, 6, 7] * 4, max_tokens=24, ignore_eos=True).tokens)
    assert texts[0] == texts[1]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child loads the model itself, so what goes through the connection can be tested without RPC."""
    monkeypatch.setattr(rpc, "check_server", lambda *_: None)
    monkeypatch.setattr(rpc, "endpoints", lambda device: [device])


@pytest.mark.usefixtures("servers")
def test_a_session_in_a_child_is_a_session(random_gguf: Callable[..., Path]) -> None:
    path = random_gguf("F32")
    remote, local = rpc.RemoteModel(str(path).encode(), "", 1, "cpu"), Model(str(path), "", 1)
    assert (remote.weight_bytes, remote.width, remote.name) == (local.weight_bytes, local.width, local.name)
    mine, theirs = rpc.RemoteSession(remote, 0), Session(local)
    tokens = np.random.default_rng(0).integers(0, 257, 80).astype(np.int32)
    for session in (mine, theirs):
        prefill(session, tokens)
        evaluate(session, [1, 2, 3], [-1, 0, 0])
    assert np.array_equal(mine.logits(2), theirs.logits(2))
    for a, b in zip(mine.follow(Sampling(1.0)), theirs.follow(Sampling(1.0)), strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(ValueError, match="parent"):
        evaluate(mine, [1], [5])
    mine.commit([0])
    with pytest.raises(pystaged.ContextFullError):
        prefill(mine, np.zeros(90, np.int32))
    assert mine.tokens.tolist() == [*tokens.tolist(), 1]
    forks = mine.fork(50), theirs.fork(50)
    for fork in forks:
        assert (fork.tokens.tolist(), fork.n_ctx) == (tokens[:50].tolist(), theirs.n_ctx)
        assert fork.cell_bytes == local.cell_bytes
        evaluate(fork, [4], [-1])
    assert np.array_equal(forks[0].logits(0), forks[1].logits(0))
    with pytest.raises(ValueError, match="cannot fork"):
        mine.fork(82)
    mine.stretch(90)
    assert mine.tokens.tolist() == [*tokens.tolist(), *[1] * 10]
    mine.close()
    assert mine.closed
    remote.servers.close()
    with pytest.raises(DeviceError, match="the connection to the RPC servers is closed"):
        prefill(mine, tokens)


@pytest.mark.usefixtures("servers")
def test_a_child_that_is_killed(random_gguf: Callable[..., Path]) -> None:
    remote = rpc.RemoteModel(str(random_gguf("F32")).encode(), "", 1, "cpu")
    session = rpc.RemoteSession(remote, 0)
    child = remote.servers._child._process
    child.kill()
    for _ in range(2):
        with pytest.raises(DeviceError, match="RPC server cpu ended the connection; start it again"):
            prefill(session, np.zeros(3, np.int32))
    assert child.returncode == -signal.SIGKILL
    assert "ended the connection" in failure(cast(Model, remote))


@pytest.mark.usefixtures("servers")
def test_a_child_that_another_thread_closes_in_the_middle_of_a_call() -> None:
    servers = rpc.Servers("cpu")
    child = servers._child
    child._process.kill()
    child._log.close()  # the last thing that closing does
    with pytest.raises(DeviceError, match="RPC server cpu ended the connection"):
        servers.call("open", 0)


@pytest.mark.usefixtures("servers")
def test_a_child_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSTAGED_RPC_TIMEOUT", "0.25")
    servers = rpc.Servers("cpu")
    os.kill(servers._child._process.pid, signal.SIGSTOP)
    with pytest.raises(DeviceError, match=r"has been silent for 0\.25 seconds"):
        servers.call("open", 0)


@needs_rpc
def test_a_server_killed_in_mid_generation(start: Start) -> None:
    (one, _), (two, process) = start(), start()
    with pystaged.load("bundled", device=f"rpc:{one},{two}", policy=TREE) as engine:
        stream = engine.stream(PROMPT, max_tokens=200)
        pieces = [next(stream) for _ in range(3)]
        process.kill()
        process.wait()
        with pytest.raises(DeviceLostError, match=re.escape(two)) as lost:
            pieces.extend(stream)
        assert lost.value.prompt == PROMPT
        assert lost.value.text == "".join(pieces)
        assert len(lost.value.tokens) == sum(len(piece.tokens) for piece in pieces) > 0
        with pytest.raises(DeviceError, match=re.escape(two)):
            engine.generate(PROMPT)


@needs_rpc
def test_a_server_that_hangs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSTAGED_RPC_TIMEOUT", "3")
    monkeypatch.setattr(rpc, "_CONNECT_SECONDS", 1.0)
    endpoint, process = start()
    with pystaged.load("bundled", device=f"rpc:{endpoint}", policy=TREE) as engine:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(DeviceLostError, match="silent for 3 seconds"):
            engine.generate(PROMPT, max_tokens=8)
    with pytest.raises(DeviceError, match="does not answer within 1 seconds"):
        pystaged.load("bundled", device=f"rpc:{endpoint}")


@needs_rpc
@pytest.mark.parametrize(
    "turned",
    [lambda _: b"", lambda data: os.urandom(len(data)), lambda data: bytes(len(data))],
    ids=["silence", "noise", "zeros"],
)
@pytest.mark.parametrize("case", ["qwen3moe", "lfm2"])
def test_another_program_in_mid_generation(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, turned: Callable[[bytes], bytes]
) -> None:
    """In the place of the second server, which was frozen, or whose port another program has now."""
    monkeypatch.setenv("PYSTAGED_RPC_TIMEOUT", "3")
    monkeypatch.setattr(rpc, "_CONNECT_SECONDS", 1.0)
    (one, _), (two, _) = start(), start()
    turncoat, prompt = Turncoat(two), [5, 6, 7] * 4
    device = f"rpc:{one},{turncoat.endpoint}"
    path = write(tmp_path / "model.gguf", CASES[case])
    with pystaged.load(path, device=device, draft=None, num_threads=1, policy=TREE) as engine:
        stream = engine.stream(prompt, max_tokens=100, ignore_eos=True)
        pieces = [next(stream) for _ in range(3)]
        turncoat.turn(turned)
        with pytest.raises(DeviceLostError, match=re.escape(turncoat.endpoint)) as lost:
            pieces.extend(stream)
        assert lost.value.text == "".join(pieces)
        assert lost.value.tokens == [token for piece in pieces for token in piece.tokens]
        with pytest.raises(DeviceError, match=re.escape(turncoat.endpoint)):
            engine.generate(prompt)
    turncoat.close()


def impostor(answer: bytes) -> str:
    """The endpoint of a server that gives every client the same answer."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 10)
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


@needs_rpc
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"\x1c" + bytes(7) + b"\x63\x00\x00" + bytes(25), "has version 99.0"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a ggml RPC server"),
        (b"", "not a ggml RPC server"),
    ],
    ids=["version", "http", "silence"],
)
def test_who_else_may_answer(answer: bytes, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        pystaged.load("bundled", device=f"rpc:{impostor(answer)}")


@needs_rpc
def test_nobody_there() -> None:
    with pytest.raises(DeviceError, match="cannot be reached: Connection refused"):
        pystaged.load("bundled", device=f"rpc:127.0.0.1:{free_port()}")


@needs_rpc
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-m", "pystaged", "rpc-server", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "is the port taken?" in done.stderr


@pytest.mark.skipif(has_rpc(), reason="llama-cpp-python is built with RPC")
def test_without_rpc() -> None:
    with pytest.raises(DeviceError, match="GGML_RPC=on"):
        pystaged.load("bundled", device="rpc:127.0.0.1:50052")


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_warning_before_others_can_connect(
    host: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = []
    monkeypatch.setattr(_core, "serve_devices", lambda *arguments: bound.append(arguments))
    handler = signal.getsignal(signal.SIGINT)
    try:
        rpc_server.rpc_server(host, 50052, "ggml-cpu", 1)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert bound == [(f"{host}:50052", "ggml-cpu", 1)]
    assert ("neither passwords nor encryption" in capsys.readouterr().err) == warned
