"""The child process that runs llama.cpp with ggml's RPC client; if ggml aborts it, the parent only loses a
connection."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from pystaged import _core
from pystaged.backends.rpc import KEPT
from pystaged.decoding.requests import perform
from pystaged.platform.process import parent, serve

_BEAT_SECONDS = 1.0
_BEAT = (-1, True, None)


class Host:
    """One model and its sessions.

    Args:
        connection: to the parent, which gets a sign of life every second while the model loads.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._beaten = time.monotonic()
        self._sessions: list[_core.Session] = []
        self._samplings: dict[int, object] = {}

    def load(self, path: bytes, kernel: str, num_threads: int, device: str) -> dict[str, Any]:
        """Load the model; returns its properties."""
        self._model = _core.Model(path, kernel, num_threads, device, self._beat)
        names = [name for name, value in vars(_core.Model).items() if isinstance(value, property)]
        return {name: getattr(self._model, name) for name in names}

    def reserve(self, num_cells: int) -> None:
        """As Model.reserve."""
        self._model.reserve(num_cells)

    def open(self, n_ctx: int) -> tuple[int, int]:
        """Open a session; returns its number and its n_ctx."""
        self._sessions.append(_core.Session(self._model, n_ctx))
        return len(self._sessions) - 1, self._sessions[-1].n_ctx

    def fork(self, session: int, length: int) -> int:
        """Fork a session; returns the number of the new one."""
        self._sessions.append(self._sessions[session].fork(length))
        return len(self._sessions) - 1

    def keep(self, session: int, sampling: object) -> None:
        """Store a sampling for the session's passes, whose arguments have KEPT in its place."""
        self._samplings[session] = sampling

    def run(self, session: int, kind: str, *arguments: object) -> Any:
        """Make a pass for one Work of a session."""
        values = [self._samplings[session] if value is KEPT else value for value in arguments]
        return perform(self._sessions[session], kind, *values)

    def call(self, session: int, name: str, *args: object) -> Any:
        """Call a method of a session."""
        if name == "close":
            self._samplings.pop(session, None)
        return getattr(self._sessions[session], name)(*args)

    def get(self, session: int, name: str) -> Any:
        """Read a property of a session."""
        return getattr(self._sessions[session], name)

    def _beat(self) -> None:
        if time.monotonic() - self._beaten > _BEAT_SECONDS:
            self._beaten = time.monotonic()
            self._connection.send(_BEAT)


def main() -> None:
    """Answer calls until the parent ends."""
    connection = parent()
    serve(connection, Host(connection))
