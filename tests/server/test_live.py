"""Clients that leave, wait, read slowly or never finish what they say; and a server that is full, or ends."""

from __future__ import annotations

import gc
import json
import random
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count, pairwise
from typing import Any

import psutil
import pytest
from support.memory import used
from support.scheduling import held, is_idle, wait_until
from support.server import PATH, UNFILTERED, Server, asked, events, head, live
from uvicorn.protocols.http.h11_impl import H11Protocol

from pystaged.engine import Engine
from pystaged.options.config import Grammar
from pystaged.sampling.definitions import GrammarError
from pystaged.server import run

_MOST_GROWTH = 4 << 20  # bytes, by which 400 requests may change what a process has
PROMPTS = ["the tree then ", "a", "over and over and over ", "0123456789" * 12, "zwölf"]


def body(i: int, **options: Any) -> dict[str, Any]:
    """A request whose text is known by its number."""
    asked = {"prompt": PROMPTS[i % 5], "max_tokens": 8 + i % 24, "temperature": i % 3 / 2, "seed": i}
    return asked | UNFILTERED | options


def written(engine: Engine, i: int) -> str:
    options = body(i)
    return engine.generate(options.pop("prompt"), **options).text


def endless(**options: Any) -> dict[str, Any]:
    """A request for a text that takes a while."""
    return {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "temperature": 1} | UNFILTERED | options


def early(sent: bytes) -> tuple[socket.socket, socket.socket]:
    """A listener for a server, and a connection on which this is there before it, so that it waits for none of it."""
    listener = run.bound("127.0.0.1", 0)
    listener.listen()
    connection = Server(listener.getsockname()[1]).raw()
    connection.sendall(sent)
    return listener, connection


def measured(server: Server, name: str) -> float:
    text = server.ask("/metrics")[1]
    return float(next(line for line in text.splitlines() if line.startswith(f"pystaged:{name} ")).split()[1])


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_ends_the_text(engine: Engine, stream: bool) -> None:
    with live(engine, parallel=1) as server:
        for _ in range(3):
            with held(engine):
                connection = asked(server, endless(stream=stream, n=8))
                wait_until(lambda: measured(server, "requests_processing"))
                connection.close()
                wait_until(lambda: not measured(server, "requests_processing"))
            wait_until(lambda: is_idle(engine))
        assert measured(server, "tokens_predicted_total") < 3 * 8 * 500
        assert server.ask(PATH, body(0))[0] == 200


def test_who_waits_and_leaves_is_forgotten(engine: Engine) -> None:
    with live(engine, parallel=1) as server:
        with held(engine):
            first = asked(server, endless())
            wait_until(lambda: measured(server, "requests_processing"))
            waiting = [asked(server, body(0)) for _ in range(3)]
            wait_until(lambda: measured(server, "requests_deferred") == 3)
            for connection in waiting:
                connection.close()
            wait_until(lambda: measured(server, "requests_deferred") == 0)
        first.close()
        assert server.ask(PATH, body(0))[0] == 200


def test_a_full_queue_says_when_to_come_again(engine: Engine) -> None:
    with live(engine, parallel=1, queue=1) as server:
        with held(engine):
            first = asked(server, endless())
            wait_until(lambda: measured(server, "requests_processing"))
            second = asked(server, body(1))
            wait_until(lambda: measured(server, "requests_deferred"))
            response = server.send("POST", PATH, body(2))
            error = json.loads(response.read())["error"]
            assert (response.status, error["code"]) == (429, "queue_full")
            assert int(response.getheader("retry-after") or 0) >= 1
        first.close()
        second.close()
        wait_until(lambda: measured(server, "requests_processing") == 0)
        assert server.ask(PATH, body(2))[0] == 200


@pytest.mark.slow
def test_a_request_may_take_so_long_and_no_longer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps, over = engine._stepper.step, count(), threading.Event()

    def step_until_over(texts: Any) -> Any:
        assert next(steps) < 5 or over.wait(600)
        return step(texts)

    with live(engine, timeout=0.3) as server:
        with held(engine):
            status, answer = server.ask(PATH, endless())
            assert (status, answer["error"]["type"]) == (503, "timeout_error")
        wait_until(lambda: is_idle(engine))
        monkeypatch.setattr(engine._stepper, "step", step_until_over)
        data = server.send("POST", PATH, endless(stream=True)).read().decode()
        over.set()
        last = data.rstrip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        wait_until(lambda: is_idle(engine))


def test_a_turn_that_never_comes(engine: Engine) -> None:
    with live(engine, parallel=1, queue_timeout=0.1) as server, held(engine):
        first = asked(server, endless())
        wait_until(lambda: measured(server, "requests_processing"))
        status, answer = server.ask(PATH, body(1))
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        first.close()


@pytest.mark.slow
def test_texts_of_a_request_may_wait_for_each_other(engine: Engine) -> None:
    """The time to wait is over, but the first text has begun."""
    with live(engine, parallel=1, queue_timeout=0.1) as server:
        found: list[tuple[int, Any]] = []
        asks = threading.Thread(target=lambda: found.append(server.ask(PATH, body(1, n=3))))
        with held(engine):
            asks.start()
            wait_until(lambda: measured(server, "requests_deferred") == 2)
            time.sleep(0.3)
        asks.join()
        assert found[0][0] == 200
        assert len(found[0][1]["choices"]) == 3


@pytest.mark.slow
def test_who_has_no_answer_when_the_server_ends_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pystaged.server.reply._PING", 0.02)
    with held(engine), live(engine) as server:
        whole, parts, half = asked(server, endless()), asked(server, endless(stream=True)), server.raw()
        half.sendall(head(100) + b"{")
        wait_until(lambda: measured(server, "requests_processing") == 2)
        assert b" 200 " in parts.recv(1 << 12)

    def rest(connection: socket.socket) -> str:
        with connection, connection.makefile("rb") as file:
            return file.read().decode()

    for connection in (whole, half):
        answer = rest(connection)
        assert answer.startswith("HTTP/1.1 503 ")
        assert json.loads(answer.split("\r\n\r\n")[1])["error"]["code"] == "server_ends"
    last = rest(parts)
    assert '"server_ends"' in last
    assert last.endswith("0\r\n\r\n")  # the end of an answer, not of the connection only
    assert not [record for record in caplog.records if record.exc_info]


def test_a_request_that_is_never_finished(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pystaged.server.settings.STALL", 0.2)
    listener, connection = early(head(100) + b'{"pro')
    with live(engine, listener):
        assert b" 408 " in connection.recv(1 << 16)
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_a_request_that_never_begins(engine: Engine, monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """Nothing comes, or half a head, also behind another request."""
    monkeypatch.setattr("pystaged.server.settings.STALL", 0.2)
    for sent in (b"", b"GET /hea"):
        listener, connection = early(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" if before else sent)
        with live(engine, listener):
            if before:
                answer = b""
                while not answer.endswith(b"}"):
                    answer += (part := connection.recv(1 << 16))
                    assert part
            with suppress(ConnectionError):
                connection.sendall(sent if before else b"")
                assert connection.recv(1 << 16) == b""
            connection.close()


@pytest.mark.slow
def test_a_head_that_is_never_finished(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there is always a little more of it."""
    monkeypatch.setattr("pystaged.server.settings.STALL", 0.3)
    listener, connection = early(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    with live(engine, listener) as server:
        connection.settimeout(0.01)
        is_open = True
        while is_open:
            try:
                connection.sendall(b"a: b\r\n")
                is_open = bool(connection.recv(1))
            except TimeoutError:
                continue
            except ConnectionError:
                is_open = False
        monkeypatch.undo()
        assert server.ask("/health")[0] == 200
        connection.close()


@pytest.mark.slow
def test_a_text_may_take_longer_than_a_head(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pystaged.server.settings.STALL", 0.3)
    data = json.dumps(body(3)).encode()
    listener, connection = early(head(len(data)) + data)
    with ExitStack() as served:
        with held(engine):
            served.enter_context(live(engine, listener))
            wait_until(lambda: not is_idle(engine))
            threading.Event().wait(0.6)
        assert b" 200 " in connection.recv(1 << 16)
        connection.close()


def test_a_stream_that_waits_shows_that_the_server_is_there(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pystaged.server.reply._PING", 0.02)
    with live(engine) as server:
        with held(engine):
            second = server.send("POST", PATH, body(2, stream=True))  # whose head comes with the first comment
            assert second.read(3) == b":\n\n"
        found = events(b":\n\n" + second.read())
        assert "".join(each["choices"][0]["text"] for each in found) == written(engine, 2)


def test_who_does_not_read_holds_nobody_up(engine: Engine) -> None:
    """Its texts are written all the same, and it has them whole in the end."""
    listener = run.bound("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)  # as little as a connection from far away has
    with live(engine, listener, parallel=2) as server:
        options = endless(stream=True, n=2, seed=3, logprobs=20)
        slow = server.send("POST", PATH, options)
        for i in range(4):
            assert server.ask(PATH, body(i))[1]["choices"][0]["text"] == written(engine, i)
        found = events(slow.read())
        text = "".join(each["choices"][0]["text"] for each in found if each["choices"][0]["index"] == 0)
        assert text == engine.generate("a", max_tokens=500, ignore_eos=True, temperature=1, seed=3).text


@pytest.mark.slow
@pytest.mark.parametrize("path", [PATH, "/detokenize"])
def test_who_never_reads_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """While texts are written, or with an answer that is ready: the connection ends, though the client is there."""
    full, lost = threading.Event(), threading.Event()

    class Told(run._Connection):
        def pause_writing(self) -> None:
            monkeypatch.setattr("pystaged.server.settings.STALL", 0.3)  # the request itself may take a while
            super().pause_writing()
            full.set()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    monkeypatch.setattr(run, "_Connection", Told)
    with live(engine) as server:
        # Answers that are larger than what sockets hold.
        request = endless(stream=True, n=16, logprobs=20) if path == PATH else {"tokens": [97] * 1_000_000}
        connection = asked(server, request, server.raw(window=1 << 12), path)
        assert full.wait(600)
        assert lost.wait(600)
        wait_until(lambda: is_idle(engine))
        connection.close()


@pytest.mark.parametrize(
    ("error", "words"), [(GrammarError("too complex"), "too complex"), (ValueError("secret"), "log has details")]
)
def test_a_failure_in_the_middle_is_an_event(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    with live(engine) as server:
        calls = []

        def fail(*_: object) -> Any:
            calls.append(1)
            if len(calls) > 2:
                raise error
            return [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}]

        monkeypatch.setattr("pystaged.server.completions.CompletionAnswer.parts", fail)
        data = server.send("POST", PATH, body(2, stream=True, temperature=0)).read().decode()
        last = data.rstrip().split("\n\n")[-1]
        assert words in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert '"text":"x"' in data  # what was written before it
        assert "secret" not in data
        assert "[DONE]" not in data


class Clients:
    """200 requests by 16 clients: a third leave in the middle, some are hostile.

    found: texts by the number of their request. gaps: seconds between the tokens of a stream.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.found: dict[int, str] = {}
        self.gaps: list[float] = []
        self._jobs = list(range(200))
        random.Random(5).shuffle(self._jobs)
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []
        self._open: list[socket.socket] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self._client) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self._failures, self._failures
        for connection in self._open:
            connection.close()

    def _client(self) -> None:
        hostile = {4: self._large, 11: self._broken, 18: self._half, 20: self._slow}
        try:
            while True:
                with self._lock:
                    if not self._jobs:
                        return
                    i = self._jobs.pop()
                hostile.get(i % 25, self._ask)(i)
        except BaseException as error:
            self._failures.append(error)

    def _ask(self, i: int) -> None:
        if i % 3 == 1:
            response = self._server.send("POST", PATH, body(i, stream=True))
            response.read(200 if i % 2 else 1)
            response.close()
        elif i % 2:
            response = self._server.send("POST", PATH, body(i, stream=True))
            lines, times = [], []
            for line in response:
                lines.append(line)
                times += [time.monotonic()] if b'"text":' in line else []
            self.gaps += [after - before for before, after in pairwise(times)]
            self.found[i] = "".join(part["choices"][0]["text"] for part in events(b"".join(lines)))
        else:
            self.found[i] = self._server.ask(PATH, body(i))[1]["choices"][0]["text"]

    def _large(self, _: int) -> None:
        assert self._server.ask(PATH, {"prompt": "x" * (1 << 16)})[0] == 413

    def _broken(self, _: int) -> None:
        assert self._server.ask(PATH, b'{"prompt": ')[0] == 400

    def _half(self, i: int) -> None:
        connection = self._server.raw()
        connection.sendall(head(100)[: 40 if i % 2 else None])
        self._open.append(connection)  # and says no more

    def _slow(self, i: int) -> None:
        response = self._server.send("POST", PATH, body(i, stream=True, logprobs=20))
        data = b""
        while part := response.read(100):
            data += part
            threading.Event().wait(0.001)
        self.found[i] = "".join(part["choices"][0]["text"] for part in events(data))


@pytest.mark.slow
def test_two_hundred_requests_of_sixteen_clients(engine: Engine) -> None:
    """Every text that is finished is the one made alone, and nothing is left behind."""
    expected = {i: written(engine, i) for i in range(200)}
    me = psutil.Process()
    held: list[int] = []
    with live(engine, parallel=8, queue=256, max_body=1 << 15) as server:
        before = me.num_fds()
        for _ in range(3):
            clients = Clients(server)
            clients.run()
            assert len(clients.found) > 100
            assert clients.found == {i: expected[i] for i in clients.found}
            wait_until(lambda: is_idle(engine))
            wait_until(lambda: me.num_fds() <= before)
            wait_until(lambda: not any(issubclass(type(each), H11Protocol) for each in gc.get_objects()))
            # Memory for large passes is given back by small ones.
            engine.generate("alone", max_tokens=200, speculate=False)
            held.append(used())
            gap = statistics.quantiles(clients.gaps, n=20)[-1]
            words = f"gaps between tokens: p95 {1e3 * gap:.1f} ms; held: {held[-1] / (1 << 20):.1f} MiB"
            print(words)  # noqa: T201
        assert engine._contexts.num_bytes <= engine.kv_memory
    assert held[-1] - held[1] < _MOST_GROWTH


def test_a_log_has_a_line_for_each_request(engine: Engine) -> None:
    lines: list[str] = []
    with live(engine, log=lines.append) as server:
        server.ask(PATH, body(0, n=2))
        server.ask(PATH, {"prompt": ""})
        server.ask("/tokenize", {"content": "a"})
        wait_until(lambda: len(lines) == 3)
    assert lines[0].startswith(f"{PATH} 200 ")
    assert ", 2 sequences, " in lines[0]
    assert lines[1].startswith(f"{PATH} 400 ")
    assert lines[2].startswith("/tokenize 200 ")


def test_many_requests_keep_no_lists_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are threads."""
    go_on, begun = threading.Event(), []

    def start(*_: object) -> None:
        begun.append(1)
        assert go_on.wait(600)
        raise ValueError("no")

    monkeypatch.setattr(engine, "start", start)
    with live(engine, queue=100) as server, ThreadPoolExecutor(48) as pool:
        try:
            texts = [pool.submit(server.ask, PATH, body(i)) for i in range(48)]
            wait_until(lambda: len(begun) == 40)
            assert [server.ask(path)[0] for path in ("/health", "/v1/models", "/api/ps")] == [200] * 3
        finally:
            go_on.set()
        assert {each.result()[0] for each in texts} == {400}


FORMED: list[dict[str, Any]] = [
    {"grammar": 'root ::= "a"'},
    {"json_schema": {"const": 1}},
    {"response_format": {"type": "json_object"}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
]


def test_forms_that_take_long_keep_nobody_else_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are threads."""
    go_on, waiting = threading.Event(), []

    def constraint(grammar: Grammar | None) -> None:
        if grammar:
            waiting.append(grammar)
            assert go_on.wait(600)
            raise GrammarError("no")

    monkeypatch.setattr(engine, "_constraint", constraint)
    with live(engine, queue=100) as server, ThreadPoolExecutor(48) as pool:
        try:
            chats = [body(i) | {"messages": [{"role": "user", "content": "a"}]} | FORMED[i % 4] for i in range(48)]
            formed = [pool.submit(server.ask, "/v1/chat/completions", each) for each in chats]
            wait_until(lambda: waiting)
            assert server.ask(PATH, body(0))[0] == 200
            assert server.ask("/tokenize", {"content": "a"})[0] == 200
        finally:
            go_on.set()
        assert {each.result()[0] for each in formed} == {400}
