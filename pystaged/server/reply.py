"""Send answers, whole or as events, until the client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

from pystaged.server.errors import ApiError, ending, explained, is_ollamas

_PING = 15.0  # seconds without an event after which a comment keeps the connection alive
_PARTS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_log = logging.getLogger("pystaged.server")


class Sender:
    """Sends one answer to a request for a path; in Ollama's interface parts are lines of JSON, else events.

    names_events: whether events carry their type as name. error_event: spells an error in a stream.
    """

    names_events = False
    error_event: Callable[[ApiError], bytes] = staticmethod(ApiError.json)

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path, self._in_lines = send, path, is_ollamas(path)
        self._lock = anyio.Lock()
        self.last = time.monotonic()
        self.status = 0
        self._is_in_parts = False

    async def whole(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send the whole answer as JSON."""
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await self._begin(status, length | (headers or {}))
        await self._pass(body, more=False)

    async def event(self, data: Any) -> None:
        """Send one event of a stream."""
        if self._in_lines:
            await self._part(encoded(data) + b"\n")
            return
        name = f"event: {data['type']}\n".encode() if self.names_events else b""
        await self._part(name + b"data: " + encoded(data) + b"\n\n")

    async def ping(self) -> None:
        """Send a comment, which clients ignore; lines have none."""
        if not self._in_lines:
            await self._part(b":\n\n")

    async def end(self, mark: bytes) -> None:
        """Send the end of a stream."""
        async with self._lock:
            await self._pass(mark, more=False)

    async def fail(self, error: ApiError) -> None:
        """Send an error: as the answer, or as the last event of a stream that has begun."""
        if not self.status:
            await self.whole(error.json(self._path), error.status, error.headers)
        elif self._is_in_parts:  # nothing can follow a whole answer
            async with self._lock:
                name = b"event: error\n" if self.names_events else b""
                begin, end = (b"", b"\n") if self._in_lines else (name + b"data: ", b"\n\n")
                await self._pass(begin + self.error_event(error) + end, more=False)

    async def _part(self, data: bytes) -> None:
        # An event must not be cut in two by a ping.
        async with self._lock:
            if not self.status:
                self._is_in_parts = True
                kind = "application/x-ndjson" if self._in_lines else "text/event-stream"
                await self._begin(200, {"content-type": kind, **_PARTS})
            await self._pass(data, more=True)
            self.last = time.monotonic()

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _pass(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class Reply:
    """A Starlette response that runs work which sends an answer, and cancels it when the client disconnects.

    Starlette's own streaming relies on `send` to notice a disconnect; uvicorn's `send` does not.

    Args:
        work: sends the answer.
        pings: whether the answer is a stream.
        timeout: seconds for the whole answer.
        over: called at the end with the status sent, 0 if none was.
    """

    def __init__(
        self,
        work: Callable[[Sender], Awaitable[None]],
        *,
        pings: bool,
        timeout: float,
        over: Callable[[int], None],
    ) -> None:
        self._work, self._pings, self._timeout, self._over = work, pings, timeout, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = Sender(send, scope["path"])
        try:
            async with anyio.create_task_group() as group:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                async def ping() -> None:
                    while True:
                        await anyio.sleep(max(0.0, sender.last + _PING - time.monotonic()) or _PING)
                        if time.monotonic() - sender.last >= _PING:
                            await sender.ping()

                group.start_soon(watch)
                if self._pings:
                    group.start_soon(ping)
                await self._answer(sender)
                group.cancel_scope.cancel()
        except asyncio.CancelledError:  # cancelled by uvicorn; a disconnect is handled by the group
            with anyio.move_on_after(1):
                await sender.fail(ending())
        finally:
            self._over(sender.status)

    async def _answer(self, sender: Sender) -> None:
        try:
            with anyio.fail_after(self._timeout):
                await self._work(sender)
        except TimeoutError:
            await sender.fail(ApiError(503, "the request took too long", code="timeout", kind="timeout_error"))
        except Exception as error:
            known = explained(error)
            if known.status == 500:
                _log.exception("a request failed", exc_info=error)
            await sender.fail(known)


def encoded(value: Any) -> bytes:
    """Encode a value as JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
