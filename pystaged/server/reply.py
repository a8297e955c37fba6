"""Send answers, whole or as events, until the client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pystaged._core import DeviceError
from pystaged.server.errors import ApiError, ending, explained, is_ollamas

_PING = 15.0  # seconds without an event after which a comment keeps the connection alive
_UNSENT = 1024  # events of a stream that wait for its reader; its text then waits, too, and holds its place
_log = logging.getLogger("pystaged.server")


class Reply(StreamingResponse):
    """A response that runs work, which sends the answer by the methods below; Starlette cancels it when the client
    disconnects. In Ollama's interface parts are lines of JSON, else events.

    names_events: whether events carry their type as name. error_event: spells an error in a stream.

    Args:
        work: sends the answer.
        pings: whether the answer is a stream.
        timeout: seconds for the whole answer.
        over: called at the end with the status sent, 0 if none was.
    """

    names_events = False
    error_event: Callable[[ApiError, str], bytes] = staticmethod(ApiError.json)
    _asgi: tuple[Scope, Receive, Send]

    def __init__(
        self, work: Callable[[Reply], Awaitable[None]], *, pings: bool, timeout: float, over: Callable[[int], None]
    ) -> None:
        self._work, self._pings, self._timeout, self._over = work, pings, timeout, over
        self.background = None
        self._unsent = asyncio.Queue[tuple[bytes, bool]](_UNSENT)
        self._last = time.monotonic()
        self._status, self._is_in_parts = 0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi, self._in_lines = (scope, receive, send), is_ollamas(scope["path"])
        try:
            # Without a version, because Starlette would not watch for the end of a client whose server says 2.4: there
            # sending to it fails, but a whole answer is sent only when it has been computed.
            await super().__call__({**scope, "asgi": {}}, receive, send)
        except asyncio.CancelledError:  # cancelled by uvicorn
            with anyio.move_on_after(1):
                await self.fail(ending())
        finally:
            self._over(self._status)

    async def whole(self, response: Response) -> None:
        """Send the whole answer."""
        self._status = response.status_code
        await response(*self._asgi)

    async def event(self, data: Any) -> None:
        """Send one event of a stream."""
        await self.part(self._framed(data.get("type"), encoded(data)))

    async def fail(self, error: ApiError) -> None:
        """Send an error: as the answer, or as the last event of a stream that has begun."""
        path = self._asgi[0]["path"]
        if not self._status:
            await self.whole(error.response(path))
        elif self._is_in_parts:  # nothing can follow a whole answer
            await self._send(self._framed("error", self.error_event(error, path)), more=False)

    def _framed(self, kind: str, data: bytes) -> bytes:
        name = f"event: {kind}\n".encode() if self.names_events else b""
        return data + b"\n" if self._in_lines else name + b"data: " + data + b"\n\n"

    async def part(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of a stream, unless it is behind the last, as soon as its client reads."""
        if not self._status:
            self._status, self._is_in_parts = 200, True
            kind = b"application/x-ndjson" if self._in_lines else b"text/event-stream"
            headers = [(b"content-type", kind), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
            await self._asgi[2]({"type": "http.response.start", "status": 200, "headers": headers})
        await self._unsent.put((data, more))
        self._last = time.monotonic()

    async def _send(self, data: bytes, *, more: bool) -> None:
        self._is_in_parts = more
        await self._asgi[2]({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_all(self) -> None:
        while True:
            data, more = await self._unsent.get()
            if self._is_in_parts:
                await self._send(data, more=more)
            self._unsent.task_done()

    async def stream_response(self, send: Send) -> None:
        del send  # as _asgi has it
        async with anyio.create_task_group() as group:
            group.start_soon(self._send_all)
            if self._pings:
                group.start_soon(self._ping)
            await self._answer()
            group.cancel_scope.cancel()

    async def _ping(self) -> None:
        while True:
            await anyio.sleep(max(0.0, self._last + _PING - time.monotonic()) or _PING)
            if time.monotonic() - self._last >= _PING and not self._in_lines:
                await self.part(b":\n\n")  # a comment, which clients ignore; lines have none

    async def _answer(self) -> None:
        try:
            with anyio.fail_after(self._timeout):
                try:
                    await self._work(self)
                finally:
                    await self._unsent.join()
        except TimeoutError:
            await self.fail(ApiError(503, "the request took too long", code="timeout", kind="timeout_error"))
        except Exception as error:
            known = explained(error)
            if known.status == 500:
                _log.exception("a request failed", exc_info=error)
            elif isinstance(error, DeviceError):
                _log.error("a request failed: %s", error)
            await self.fail(known)


def encoded(value: Any) -> bytes:
    """Encode a value as JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def as_json(body: bytes) -> Response:
    """The answer with a body that is JSON."""
    return Response(body, media_type="application/json")
