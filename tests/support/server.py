"""A server in this process, at an address of its own."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from pystaged.engine import Engine
from pystaged.server import run
from pystaged.server.app import application
from pystaged.server.models import Models
from pystaged.server.settings import Settings
from support.scheduling import wait_until

NAME = "tiny"
PATH = "/v1/completions"  # where a request goes that names no other
SECONDS = 600
UNFILTERED: Any = {"top_k": 0, "top_p": 1, "min_p": 0}  # what servers recommend besides a temperature, off


@contextmanager
def live(engine: Engine, listener: socket.socket | None = None, **settings: Any) -> Iterator[Server]:
    """A server for as long as the context lasts, which then closes the listener."""
    with live_of(Models.of(engine, Settings(NAME, **settings)), listener) as server:
        yield server


@contextmanager
def live_of(models: Models, listener: socket.socket | None = None) -> Iterator[Server]:
    """As live, of several models."""
    app = application(models)
    listener = listener or run.bound("127.0.0.1", 0)
    running = run.Server(app, grace=1)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: running.started)
        yield Server(listener.getsockname()[1])
    finally:
        running.should_exit = True
        thread.join(SECONDS)
        listener.close()


class Server:
    """How a server is asked, with nothing but the standard library."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> HTTPResponse:
        """Ask; the answer may still be coming. Closing it leaves."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        # Closing the response, or reading it to its end, then closes the connection.
        connection.request(method, path, data, {"Content-Type": "application/json", "Connection": "close", **names})
        return connection.getresponse()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Ask, by POST if there is a body; the status and the answer."""
        response = self.send("GET" if body is None else "POST", path, body, **headers)
        data = response.read()
        is_json = "json" in (response.getheader("content-type") or "")
        return response.status, json.loads(data) if is_json else data.decode()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of an answer in parts, the last mark left out."""
        response = self.send("POST", path, body | {"stream": True})
        assert response.status == 200, response.read()
        return events(response.read())

    def raw(self, window: int = 0) -> socket.socket:
        """A connection, to be misused; it takes about so many bytes that nobody reads."""
        connection = socket.socket()
        if window:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        connection.settimeout(SECONDS)
        connection.connect(("127.0.0.1", self.port))
        return connection


def head(length: int, path: str = PATH) -> bytes:
    """The head of a request with a body of so many bytes."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def asked(server: Server, body: Any, connection: socket.socket | None = None, path: str = PATH) -> socket.socket:
    """A connection on which a request was sent."""
    connection = connection or server.raw()
    data = json.dumps(body).encode()
    connection.sendall(head(len(data), path) + data)
    return connection


def events(data: bytes) -> list[Any]:
    """The events of a stream; it must be whole."""
    parts = [part for part in data.decode().split("\n\n") if part and not part.startswith(":")]
    assert parts.pop() == "data: [DONE]"
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part[6:]) for part in parts]
