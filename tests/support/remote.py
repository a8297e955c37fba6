"""Sessions on another machine, which is this process."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from pystaged._core import Model
from pystaged.backends.rpc import RemoteModel, RemoteSession
from pystaged.backends.rpc_host import Host


class Wire:
    """A host in this process that is told of calls as bytes, as over a pipe: the names and sizes of those so far."""

    def __init__(self, model: Model) -> None:
        self._host = Host(None)  # type: ignore[arg-type]
        self._host._model = model
        self.sizes: list[tuple[str, int]] = []

    def call(self, name: str, *args: object) -> Any:
        data = pickle.dumps((name, args))
        self.sizes.append((name, len(data)))
        name, args = pickle.loads(data)
        return getattr(self._host, name)(*args)


def over(wire: Wire, n_ctx: int = 0) -> RemoteSession:
    """A session over a wire."""
    model = wire._host._model
    names = ("weight_bytes", "vocab_size", "most_pending", "state_bytes", "kept_state_bytes")
    there = SimpleNamespace(servers=wire, **{name: getattr(model, name) for name in names})
    return RemoteSession(cast(RemoteModel, there), n_ctx)


class Turncoat:
    """Stands between clients and a server, and answers in its place from `turn` on: with what becomes of the bytes that
    the server would answer.

    Args:
        server: HOST:PORT.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._turned: Callable[[bytes], bytes] = bytes
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.endpoint = f"127.0.0.1:{self._sockets[0].getsockname()[1]}"
        self._run(self._accept)

    def turn(self, turned: Callable[[bytes], bytes]) -> None:
        self._turned = turned

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # for the thread that waits there
            each.close()

    def _accept(self) -> None:
        host, _, port = self._server.rpartition(":")
        while True:
            client, _ = self._sockets[0].accept()
            server = socket.create_connection((host, int(port)))
            self._sockets += [client, server]
            self._run(self._carry, client, server, False)
            self._run(self._carry, server, client, True)

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        while data := source.recv(1 << 16):
            sink.sendall(self._turned(data) if answers else data)
        for end in (source, sink):
            end.shutdown(socket.SHUT_RDWR)

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        def until_closed() -> None:
            with suppress(OSError):
                work(*arguments)

        threading.Thread(target=until_closed, daemon=True).start()
