"""Generates a request's texts together, as far as the gate admits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import anyio

from pystaged.async_stream import AsyncStream
from pystaged.result import Piece
from pystaged.scheduler import Scheduler
from pystaged.sequence import Sequence as Text
from pystaged.server.gate import Gate


class Listener(Protocol):
    """Receives pieces of texts."""

    async def piece(self, i: int, piece: Piece) -> None:
        """The next piece of text i."""
        ...

    async def ended(self, i: int) -> None:
        """Text i has ended."""
        ...


async def write(scheduler: Scheduler, gate: Gate, sequences: Sequence[Text], listener: Listener, wait: float) -> None:
    """Generate texts. An error of one ends all.

    Args:
        wait: seconds that the first may wait for its turn; the others come behind it.

    Raises:
        ApiError: the first waited too long.
        Exception: what ended a text.
    """
    failed: list[Exception] = []

    async def one(i: int) -> None:
        try:
            async with gate.inside(math.inf if i else wait), AsyncStream(scheduler, sequences[i]) as pieces:
                async for piece in pieces:
                    await listener.piece(i, piece)
            await listener.ended(i)
        except Exception as error:
            failed.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for i in range(len(sequences)):
            group.start_soon(one, i)
    if failed:
        raise failed[0]
