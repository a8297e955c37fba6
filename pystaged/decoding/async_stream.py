"""Asynchronous stream of one generation."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator
from typing import Any

from pystaged.decoding.scheduler import Scheduler
from pystaged.decoding.sequence import End, PrefillProgress, Sequence
from pystaged.result import GenerationResult, Piece


class AsyncStream(AsyncIterator[Piece]):
    """Asynchronous iterator of the pieces of one generation, to be read in one event loop.

    A thread of the engine decodes all sequences in batches, each at most 256 tokens ahead of its reader. `aclose`,
    leaving `async with`, or cancelling the task that reads stops it early; so does dropping the stream. The option
    `progress` may be a coroutine function here.
    """

    def __init__(self, scheduler: Scheduler, sequence: Sequence) -> None:
        self._scheduler, self.sequence = scheduler, sequence
        self._said = asyncio.Queue[Piece | PrefillProgress | End]()
        self._loop: asyncio.AbstractEventLoop | None = None  # set by the first read
        self._is_read = self._over = False

    async def __anext__(self) -> Piece:
        self._scheduler.check_caller()
        if self._is_read:
            raise RuntimeError("another task reads the stream")
        if self._over:
            raise StopAsyncIteration
        self._is_read = True
        try:
            if self._loop is None:
                self._open()
            while isinstance(said := await self._next(), PrefillProgress):
                told = said.progress(said.tokens, said.of)
                if inspect.isawaitable(told):
                    await told
        except BaseException:
            self._cancel()
            raise
        finally:
            self._is_read = False
        if isinstance(said, End):
            raise StopAsyncIteration if said.error is None else said.error
        self._scheduler.note_read(self.sequence, said)
        return said

    @property
    def result(self) -> GenerationResult:
        """The whole result, once the stream is exhausted or closed. Raises RuntimeError before."""
        if not self._over:
            raise RuntimeError("the stream has not been read to its end")
        return self.sequence.result()

    async def finish(self) -> GenerationResult:
        """Read the rest and return the whole result."""
        async with self:
            async for _ in self:
                pass
        return self.result

    async def aclose(self) -> None:
        """Stop after the current pass. If another task is reading, its iteration ends."""
        self._cancel()
        if self._loop is None:
            self._over = True
        while self._scheduler.can_wait and not (self._over or self._is_read):
            await self._next()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _next(self) -> Piece | PrefillProgress | End:
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "the stream was begun in another event loop; begin, read and close it in the same asyncio.run()"
            )
        said = await self._said.get()
        if isinstance(said, End):
            self._over = True
            self._said.put_nowait(said)  # for other tasks that wait for the end
        return said

    def _open(self) -> None:
        # The scheduler holds the sequence, never the stream, so that a stream is freed as soon as it is dropped.
        self._loop = loop = asyncio.get_running_loop()
        said = self._said

        def put(item: Any) -> None:
            try:
                loop.call_soon_threadsafe(said.put_nowait, item)
            except RuntimeError:
                # The loop is closed, which ends the sequence.
                if not isinstance(item, End):
                    raise

        weakref.finalize(self, self._scheduler.cancel, self.sequence).atexit = False
        self._scheduler.open(self.sequence, put)

    def _cancel(self) -> None:
        if self._loop:
            self._scheduler.cancel(self.sequence)
