"""Asynchronous stream of one generation."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator

from pystaged.decoding.scheduler import Scheduler
from pystaged.decoding.text import Item, Text
from pystaged.result import GenerationResult, Piece


class LoopQueue:
    """A queue in a running event loop, into which other threads put."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.items = asyncio.Queue[Item]()

    def put(self, item: tuple[Text, Item], /) -> None:
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item[1])
        except RuntimeError:
            # The loop is closed, which ends the text.
            if item[1] is not None:
                raise


class AsyncStream(AsyncIterator[Piece]):
    """Asynchronous iterator of the pieces of one text, to be read in one event loop.

    A thread of the engine decodes all texts in batches. A text pauses while 256 tokens are unread. `aclose`,
    leaving `async with`, or cancelling the task that reads stops it early; so does dropping the stream. The option
    `progress` may be a coroutine function here.
    """

    def __init__(self, text: Text) -> None:
        # The scheduler holds the text, never the stream, so that a stream is freed as soon as it is dropped.
        self.text = text
        self._scheduler: Scheduler = text.scheduler
        self._queue: LoopQueue | None = None  # made by the first read
        self._is_read = self._over = False

    async def __anext__(self) -> Piece:
        self._scheduler.check_caller()
        if self._is_read:
            raise RuntimeError("another task reads the stream")
        if self._over:
            raise StopAsyncIteration
        self._is_read = True
        try:
            if self._queue is None:
                self._queue = LoopQueue(asyncio.get_running_loop())
                weakref.finalize(self, self._scheduler.cancel, self.text).atexit = False
            if not self.text.is_open:  # the first time, or after an error of `open`
                self._scheduler.open(self.text, self._queue)
            while callable(item := await self._next(self._queue)):
                if inspect.isawaitable(told := item()):
                    await told
        except BaseException as error:
            self._scheduler.cancel(self.text)
            if isinstance(error, (StopIteration, StopAsyncIteration)):  # a reader would take it for the end
                raise RuntimeError(f"{type(error).__name__} was raised by `progress`") from error
            raise
        finally:
            self._is_read = False
        if item is None:
            raise StopAsyncIteration if self.text.error is None else self.text.error
        self._scheduler.note_read(self.text, item)
        return item

    @property
    def result(self) -> GenerationResult:
        """The whole result, once the stream is exhausted or closed. Raises RuntimeError before."""
        if not self._over:
            raise RuntimeError("the stream has not been read to its end")
        return self.text.result()

    async def finish(self) -> GenerationResult:
        """Read the rest and return the whole result."""
        async with self:
            async for _ in self:
                pass
        return self.result

    async def aclose(self) -> None:
        """Stop after the current pass. If another task is reading, its iteration ends."""
        self._scheduler.cancel(self.text)
        self._over |= not self.text.is_open
        while self._queue and self._scheduler.can_wait and not (self._over or self._is_read):
            await self._next(self._queue)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _next(self, queue: LoopQueue) -> Item:
        """The next item of the text."""
        if queue.loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "the stream was begun in another event loop; begin, read and close it in the same asyncio.run()"
            )
        item = await queue.items.get()
        if item is None:
            self._over = True
            queue.items.put_nowait(None)  # for other tasks that wait for the end
        return item
