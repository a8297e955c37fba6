"""The models of a server: loaded when they are asked for, unloaded when they rest or others need their memory."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

import pystaged
from pystaged.engine import Engine
from pystaged.loading.metadata import read_metadata
from pystaged.loading.names import bare_name
from pystaged.platform.seen import parts_of
from pystaged.server.errors import ApiError, explained
from pystaged.server.gate import Gate, within
from pystaged.server.metrics import Metrics
from pystaged.server.settings import Settings

_LONGEST_REST = 1e9  # seconds; longer is for ever
_SAMPLES, _SAMPLE = 64, 1 << 16  # of a model's files, and bytes of each
_log = logging.getLogger("pystaged.server")


class State:
    """An open engine with its gate. name: the model's for clients. metrics: of the server. ready: when it was made, by
    time.monotonic()."""

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


@dataclass(eq=False)
class Served:
    """A model of a server.

    path: its file. size: bytes that it needs beside its keys and values. state: None while it is not loaded. users:
    requests that have it. used: when the last one came, or had its answer, by time.monotonic; rest: seconds that it
    stays after that. is_leaving: whether it is unloaded after them. timer: ends its rest.
    """

    name: str
    path: Path
    size: int
    state: State | None = None
    users: int = 0
    used: float = field(default_factory=time.monotonic)
    rest: float = 0.0
    is_leaving: bool = False
    timer: asyncio.TimerHandle | None = None

    @cached_property
    def metadata(self) -> dict[str, str]:
        """What its file says, read without loading it."""
        return read_metadata(self.path)


class Models:
    """The models of a server by name, for one event loop. A request's name is compared with these names alone. files:
    theirs, by name. load: loads one. memory: bytes that loaded models may take together; one alone is always loaded.
    kv_memory: bytes of memory for the keys and values of each."""

    def __init__(
        self, settings: Settings, files: dict[str, Path], load: Callable[[Path], Engine], *, memory: int, kv_memory: int
    ) -> None:
        self.settings, self.metrics, self.created = settings, Metrics(settings.metrics_prefix), int(time.time())
        self._load, self._memory, self._kv_memory = load, memory, kv_memory
        self.all = {name: Served(name, path, _size(path)) for name, path in files.items()}
        self._turn = anyio.Lock()  # of those who wait for a model, in the order of their coming
        self._is_closed = False
        self._left = asyncio.Event()  # set whenever a request has had its answer
        self._tasks: set[asyncio.Task[None]] = set()
        if settings.default is not None and not self.known(settings.default):
            raise ValueError(f"--default names {settings.default!r}, and the models are {', '.join(self.all)}")

    @classmethod
    def of(cls, engine: Engine, settings: Settings) -> Models:
        """One model, which is always there, and whose owner closes it."""
        models = cls(settings, {settings.name: engine.file.path}, lambda _: engine, memory=0, kv_memory=0)
        models.all[settings.name].state = State(engine, settings, settings.name, models.metrics)
        return models

    @property
    def is_one(self) -> bool:
        """Whether there is one model, which every name means."""
        return len(self.all) == 1

    def loaded(self) -> list[State]:
        """The states of the models that are loaded, the last used first."""
        found = sorted(self.all.values(), key=lambda served: -served.used)
        return [served.state for served in found if served.state]

    def known(self, name: str) -> Served | None:
        """The model of exactly that name, or of one that Ollama reads alike."""
        alike = {bare_name(each): served for each, served in self.all.items()}
        return self.all.get(name) or alike.get(bare_name(name))

    def named(self, name: str | None) -> Served:
        """The model of a name. Raises ApiError."""
        found = self.known(name or "") or self.known(self.settings.default or "")
        if found is None and self.is_one and not self.settings.strict:
            (found,) = self.all.values()
        if found is not None:
            return found
        names = ", ".join(map(repr, self.all))
        if name is None:
            raise ApiError(400, f"name the model; this server has {names}", param="model")
        message = f"there is no model {name!r}; this server has {names}"
        raise ApiError(404, message, param="model", code="model_not_found")

    @asynccontextmanager
    async def lent(self, name: str | None, keep_alive: float | None = None) -> AsyncIterator[State]:
        """The state of a model, which stays loaded while the block runs, and from now on keep_alive seconds longer:
        below 0 for ever, None for what was said last, or settings say. Raises ApiError."""
        served = self.named(name)
        with within(self.settings.queue_timeout):
            while served.state is None or served.is_leaving:
                if (waiting := self._turn.statistics().tasks_waiting) > self.settings.queue:
                    words = f"requests that wait for a model to be loaded: {waiting}; try again"
                    raise ApiError(429, words, code="queue_full", headers={"Retry-After": "1"})
                async with self._turn:
                    if served.state is None:
                        await self._bring(served)
        served.users, served.used = served.users + 1, time.monotonic()
        if keep_alive is not None:
            served.rest = keep_alive if keep_alive >= 0 else math.inf
        try:
            yield served.state
        finally:
            served.users, served.used = served.users - 1, time.monotonic()
            self._left.set()
            self._rest(served)

    async def _bring(self, served: Served) -> None:
        """Load a model; the caller has the turn. Those used longest ago make room for it, after their texts."""
        while others := [each for each in self.all.values() if each.state]:
            need = served.size + self._kv_memory + sum(each.size + self._kv_memory for each in others)
            if need <= self._memory:
                break
            await self._unload(min(others, key=lambda each: (each.users > 0, each.used)))

        def load() -> None:
            engine = self._load(served.path)
            try:
                served.state = State(engine, self.settings, served.name, self.metrics)
            finally:
                if served.state is None or self._is_closed:
                    engine.close()

        try:
            served.rest = self.settings.keep_alive  # before, as another request may change it meanwhile
            await run_sync(load)  # goes on to its end where a server that ends cancels this
            self._rest(served)
        except Exception as error:
            _log.exception("%s cannot be loaded", served.name, exc_info=error)
            words = f"the model {served.name!r} cannot be loaded; the server's log has details"
            raise explained(error, ApiError(503, words)) from None

    async def _unload(self, served: Served) -> None:
        """Unload a model after its texts; the caller has the turn."""
        served.is_leaving = True
        try:
            while served.users:
                self._left = asyncio.Event()
                await self._left.wait()
            state, served.state = served.state, None
        finally:
            served.is_leaving = False
        if state:
            self.metrics.passed(state.engine.passes)
            with anyio.CancelScope(shield=True):  # nobody else would close it
                await run_sync(state.engine.close)
            del state
            await run_sync(gc.collect)  # answers refer to themselves, and to the model: its memory would go much later

    def leave(self, name: str | None) -> str:
        """Unload a model after its texts, without waiting; returns its name. Raises ApiError."""
        served = self.named(name)
        served.rest = 0.0
        self._rest(served)
        return served.name

    def _rest(self, served: Served) -> None:
        """Unload a model after a time without requests."""
        if served.timer:
            served.timer.cancel()
        if not self.is_one and served.rest < _LONGEST_REST:
            loop = asyncio.get_running_loop()
            served.timer = loop.call_later(served.rest, lambda: self._tasks.add(loop.create_task(self._rested(served))))

    async def _rested(self, served: Served) -> None:
        try:
            async with self._turn:
                if not served.users and time.monotonic() - served.used >= served.rest:
                    await self._unload(served)
        finally:
            self._tasks.discard(asyncio.current_task())

    def close(self) -> None:
        """Close the engines that are loaded, also one whose loading has not ended yet."""
        self._is_closed = True
        for state in self.loaded():
            state.engine.close()


def _size(path: Path) -> int:
    """Bytes of a model's file, or of all its parts."""
    return sum(each.stat().st_size for each in parts_of(path) if each.exists())
