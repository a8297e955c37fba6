"""A server of an application, until it is told to end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette

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


def serve(app: Starlette, listener: socket.socket, *, grace: int, ready: Callable[[], object] = lambda: None) -> None:
    """Answer requests until Ctrl-C or SIGTERM; then texts in progress may take `grace` more seconds. A second Ctrl-C
    ends at once.

    Args:
        ready: called when requests are answered.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        backlog=_BACKLOG,
        timeout_graceful_shutdown=grace,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEADER,
        ws="none",
    )
    with _ended_by_signals():
        _Server(config, ready).run(sockets=[listener])


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
