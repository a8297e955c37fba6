"""Generate a request's sequences together, as far as the gate admits them."""

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
    """Receives pieces of sequences."""

    async def piece(self, i: int, piece: Piece) -> None:
        """Receive the next piece of sequence i."""
        ...

    async def ended(self, i: int) -> None:
        """Sequence i has ended."""
        ...


async def write(scheduler: Scheduler, gate: Gate, sequences: Sequence[Text], listener: Listener, wait: float) -> None:
    """Generate sequences; an error in one ends all.

    Args:
        wait: longest time, in seconds, that the first may wait for admission; the others wait without limit.

    Raises:
        ApiError: the first waited too long.
        Exception: the error that ended a sequence.
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
