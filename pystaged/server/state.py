"""State that all requests for a model share."""

from __future__ import annotations

import hashlib
import time

import anyio

import pystaged
from pystaged.engine import Engine
from pystaged.server.gate import Gate
from pystaged.server.metrics import Metrics
from pystaged.server.settings import Settings

_SAMPLES = 64
_SAMPLE = 1 << 16  # bytes


class State:
    """An engine with its gate.

    Args:
        engine: an open one. name: the model's for clients. metrics: of the server.

    Attributes:
        ready: when it was made, by time.monotonic().
    """

    def __init__(self, engine: Engine, settings: Settings, name: str, metrics: Metrics) -> None:
        self.engine, self.settings, self.name, self.metrics = engine, settings, name, metrics
        self.gate = Gate(settings.parallel, settings.queue)
        self.embedding = anyio.CapacityLimiter(1)  # texts that are embedded at the same time
        self.created, self.ready = int(time.time()), time.monotonic()
        self.fingerprint = f"b{pystaged.__version__}-{_fingerprint(engine)}"


def _fingerprint(engine: Engine) -> str:
    """A hash of all that outputs depend on besides requests: samples of the model's files, kv, n_ctx and devices."""
    model = engine.model
    found = hashlib.sha256(f"{model.kv}|{engine.n_ctx}|{','.join(model.devices)}".encode())
    for seen in engine.file.files:
        found.update(str(seen.size).encode())
        with seen.path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(0, seen.size - _SAMPLE) * i // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE))
    return found.hexdigest()[:12]
