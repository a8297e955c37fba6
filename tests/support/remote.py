"""Sessions on another machine, which is this process."""

from __future__ import annotations

import pickle
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
