"""Run the application with uvicorn, and answer 503 while the model loads."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pystaged.server import settings
from pystaged.server.errors import ApiError
from pystaged.server.security import guarded

_BACKLOG = 2048
_MOST_HEADER = 1 << 16  # bytes of a request's header
_ONE_PRESS = 0.5  # seconds; a program in between passes Ctrl-C on to one that has had it from the terminal


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket to an address, so that errors appear before a model is loaded. Raises OSError, which names it, for
    one that is taken or not this machine's."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":  # on Windows it would let two servers have one port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        hint = "; --port names another one, 0 a free one" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from None
    return found


def address(listener: socket.socket) -> str:
    """The URL of a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: ASGIApp, listener: socket.socket, *, grace: int, **told: Callable[..., object]) -> None:
    """Answer requests until Ctrl-C or SIGTERM, then wait up to `grace` seconds for sequences in progress. A second
    Ctrl-C stops at once. ready: called when the server accepts requests; waiting: at the end, with the number of those
    in progress, if there are any."""
    Server(app, grace, **told).run(sockets=[listener])


@contextmanager
def answering_that_it_loads(listener: socket.socket, told: settings.Settings) -> Iterator[None]:
    """Answer 503 while the block runs. Later connections stay in the backlog until the next server listens."""
    server = Server(guarded(_loading, told), grace=1)
    # uvicorn closes its socket at the end; a copy keeps the address bound.
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
    # Makes a browser reload the page.
    headers = {"Retry-After": "1", "Connection": "close"} | ({"Refresh": "1"} if scope["path"] == "/" else {})
    await ApiError(503, "Loading model", headers=headers).response(scope["path"])(scope, receive, send)


class Server(uvicorn.Server):
    """uvicorn's server, which runs until `should_exit` is set; arguments as in `serve`."""

    def __init__(
        self,
        app: ASGIApp,
        grace: int,
        ready: Callable[[], object] = lambda: None,
        waiting: Callable[[int], object] = lambda _: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=_Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=_BACKLOG,
            timeout_graceful_shutdown=grace,
            server_header=False,
            h11_max_incomplete_event_size=_MOST_HEADER,
            ws="none",
            # Two servers have one socket after another, which Windows' own kind of loop does not allow.
            loop="asyncio:SelectorEventLoop" if os.name == "nt" else "auto",
        )
        super().__init__(config)
        self._ready, self._waiting = ready, waiting
        self._pressed = -math.inf  # when Ctrl-C was

    def handle_exit(self, sig: int, _: FrameType | None) -> None:
        """The first signal ends the server, Ctrl-C after it does so at once. uvicorn's own method would have it raised
        again at the end."""
        if sig == signal.SIGINT:
            if time.monotonic() - self._pressed <= _ONE_PRESS:
                return
            self._pressed, self.force_exit = time.monotonic(), self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.tasks:
            self._waiting(len(self.server_state.tasks))
        await super().shutdown(sockets)


class _Connection(H11Protocol):
    """uvicorn's connection, with timeouts that uvicorn lacks: for clients that send no request, or read nothing of an
    answer."""

    _expecting: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pause writing whenever the client does not read
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in filter(None, (self._expecting, self._stuck)):
            timer.cancel()  # a pending timer would keep the connection in memory

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck:
            self._stuck.cancel()

    def _expect_request(self, *, is_late: bool = False) -> None:
        """End the connection if no request comes in time."""
        if is_late:
            self._expecting = None
        if self.cycle is None or self.cycle.response_complete:
            if is_late:
                self.transport.abort()
            elif not self._expecting:
                self._expecting = self.loop.call_later(settings.STALL, partial(self._expect_request, is_late=True))

    def _expect_reading(self, left: int | None = None) -> None:
        """End the connection if as much is left to be read after a time."""
        size = self.transport.get_write_buffer_size()
        if size == left:
            self.transport.abort()
        else:
            self._stuck = self.loop.call_later(settings.STALL, self._expect_reading, size)
