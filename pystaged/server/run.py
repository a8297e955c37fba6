"""A server of an application, until it is told to end; and one that says that there will be one."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pystaged.server.errors import ApiError
from pystaged.server.reply import Sender
from pystaged.server.security import Guard
from pystaged.server.settings import Settings

_BACKLOG = 2048
_MOST_HEADER = 1 << 16  # bytes of a request's head


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, before anything is loaded that would be in vain.

    Raises:
        OSError: naming the address, if it is taken or none of this machine's.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return found


def address(listener: socket.socket) -> str:
    """Where a socket is reached, as browsers write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configured(app: ASGIApp, *, stall: float, grace: int) -> uvicorn.Config:
    """How an application is run.

    Args:
        stall: seconds that a client may take to send the head of a request.
        grace: seconds for requests in progress at the end.
    """

    class Protocol(_Protocol):
        patience = stall

    return uvicorn.Config(
        app,
        http=Protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=_BACKLOG,
        timeout_graceful_shutdown=grace,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEADER,
        ws="none",
    )


def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    stall: float,
    grace: int,
    ready: Callable[[], object] = lambda: None,
) -> None:
    """Answer requests until Ctrl-C or SIGTERM; then texts in progress may take `grace` more seconds. A second Ctrl-C
    ends at once.

    Args:
        stall: as in configured.
        ready: called when requests are answered.
    """
    with _ended_by_signals():
        _Server(configured(app, stall=stall, grace=grace), ready).run(sockets=[listener])


@contextmanager
def answering_that_it_loads(listener: socket.socket, settings: Settings) -> Iterator[None]:
    """Requests get 503 for as long as the context lasts. Those that come after it wait for whoever listens next."""
    config = configured(Guard(_loading, settings), stall=settings.stall_timeout, grace=1)
    server = uvicorn.Server(config)
    # uvicorn closes the socket in the end; a copy leaves the address open.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener.dup()]}, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.001)
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    del receive
    # A browser that shows this asks again.
    headers = {"Retry-After": "1", "Connection": "close"} | ({"Refresh": "1"} if scope["path"] == "/" else {})
    await Sender(send, 1.0).fail(ApiError(503, "Loading model", headers=headers))


class _Protocol(H11Protocol):
    """Leaves clients that begin a request and do not go on, or do not take the end of an answer; uvicorn leaves only
    those that begin no request after another."""

    patience: float  # seconds
    _deadline: asyncio.TimerHandle | None = None
    _next_look: asyncio.TimerHandle
    _was_closing = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self._next_look.cancel()

    def _wait(self) -> None:
        """From when the client's turn began, whatever little it sends."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.patience, self.transport.close)

    def _look(self) -> None:
        """What is being closed is closed when all is sent, which a client can put off for ever."""
        if self._was_closing:
            self.transport.abort()
        self._was_closing = self.transport.is_closing()
        self._next_look = self.loop.call_later(self.patience, self._look)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Signals end the server and not the program: uvicorn raises them again when it has ended."""

    def ignore(number: int, frame: FrameType | None) -> None:
        del number, frame

    before = {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
