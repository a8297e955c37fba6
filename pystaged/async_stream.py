"""The pieces of one generation for an event loop."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator
from typing import Any

from pystaged.result import GenerationResult, Piece
from pystaged.scheduler import End, Entry, Reading
from pystaged.streams import Writer


class AsyncStream(AsyncIterator[Piece]):
    """The pieces of one generation as they come, to be read in one event loop.

    Texts of an engine share passes; each runs at most 256 tokens ahead of its reader, in a thread of the engine's.
    `aclose`, or leaving `async with`, stops it early; so does cancelling the task that reads it. One that is dropped
    gives its context back. The option `progress` may be a coroutine function here.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._scheduler = writer.engine._scheduler
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._entry: Entry | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_read = self._over = False

    async def __anext__(self) -> Piece:
        if self._is_read:
            raise RuntimeError("another task reads the stream")
        if self._over:
            raise StopAsyncIteration
        self._is_read = True
        try:
            entry = self._entry or self._open()
            while isinstance(said := await self._next(), Reading):
                told = said.progress(said.tokens, said.of)
                if inspect.isawaitable(told):
                    await told
        except BaseException:
            self._cancel()
            raise
        finally:
            self._is_read = False
        if isinstance(said, End):
            raise said.error or StopAsyncIteration
        self._scheduler.read(entry, said)
        piece: Piece = said
        return piece

    @property
    def result(self) -> GenerationResult:
        """The whole, once the stream is exhausted or closed. Raises RuntimeError before."""
        if not self._over:
            raise RuntimeError("the stream has not been read to its end")
        return self._writer.result()

    async def finish(self) -> GenerationResult:
        """Read the rest and return the whole."""
        async with self:
            async for _ in self:
                pass
        return self.result

    async def aclose(self) -> None:
        """Stop here, after the pass in hand. Where another task reads, that one comes to the end."""
        self._cancel()
        if self._entry is None:
            self._over = True
        while not (self._over or self._is_read):
            await self._next()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _next(self) -> Any:
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "the stream was begun in another event loop; begin, read and close it in one, such as one asyncio.run()"
            )
        said = await self._said.get()
        if isinstance(said, End):
            self._over = True
            self._said.put_nowait(said)  # for whoever waits for it, too
        return said

    def _open(self) -> Entry:
        # The scheduler holds entry and writer, never the stream, so that a stream is freed as soon as it is dropped.
        self._loop = asyncio.get_running_loop()
        self._entry = entry = Entry(self._writer.admit, said=_Loop(self._loop, self._said))
        weakref.finalize(self, self._scheduler.cancel, entry).atexit = False
        self._scheduler.open(entry)
        return entry

    def _cancel(self) -> None:
        if self._entry:
            self._scheduler.cancel(self._entry)


class _Loop:
    """Puts what a text says into a queue of an event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, said: asyncio.Queue[Any]) -> None:
        self._loop, self._said = loop, said

    def put(self, item: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._said.put_nowait, item)
        except RuntimeError:
            # The loop is closed, which ends the text.
            if not isinstance(item, End):
                raise
