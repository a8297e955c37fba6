"""Who may begin, and when."""

from __future__ import annotations

import asyncio

import pytest
from support.scheduling import in_loop

from pystaged.server.errors import ApiError
from pystaged.server.gate import Gate


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Text:
    """One that is inside until it is told to leave."""

    def __init__(self, gate: Gate, begun: list[str], name: str) -> None:
        self.leave = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(gate, begun, name))

    async def _run(self, gate: Gate, begun: list[str], name: str) -> None:
        async with gate.inside():
            begun.append(name)
            await self.leave.wait()


@in_loop
async def test_texts_begin_in_order() -> None:
    gate, begun = Gate(2, 8), list[str]()
    texts = {name: Text(gate, begun, name) for name in "abcde"}
    await settle()
    assert (begun, gate.num_inside, gate.num_waiting) == (["a", "b"], 2, 3)
    texts["b"].leave.set()
    await settle()
    assert begun == ["a", "b", "c"]
    texts["d"].task.cancel()  # does not want to wait any more
    await settle()
    texts["a"].leave.set()
    await settle()
    assert begun == ["a", "b", "c", "e"]
    for text in texts.values():
        text.leave.set()
    await settle()
    assert (gate.num_inside, gate.num_waiting) == (0, 0)


@in_loop
async def test_who_leaves_when_its_turn_comes_lets_in_the_next() -> None:
    gate, begun = Gate(1, 8), list[str]()
    texts = {name: Text(gate, begun, name) for name in "abc"}
    await settle()
    texts["a"].leave.set()
    texts["b"].task.cancel()
    await settle()
    texts["b"].task.cancel()
    await settle()
    assert begun in (["a", "c"], ["a", "b", "c"])
    assert gate.num_inside == 1


@in_loop
async def test_a_full_queue_refuses_and_says_for_how_long() -> None:
    now = [0.0]
    gate, begun = Gate(2, 1, clock=lambda: now[0]), list[str]()
    with gate.coming():
        pass
    first = Text(gate, begun, "a")
    await settle()
    now[0] = 8.0
    first.leave.set()
    await settle()
    texts = [Text(gate, begun, name) for name in "bcd"]
    await settle()
    with pytest.raises(ApiError, match="texts in progress: 2, waiting: 1;") as refused, gate.coming():
        pass
    # One text of 8 seconds leaves every 4.
    assert refused.value.status == 429
    assert refused.value.headers == {"Retry-After": "4"}
    now[0] = 40.0  # those inside take longer than was usual
    with pytest.raises(ApiError, match="try again in 16 s"), gate.coming():
        pass
    for text in texts:
        text.leave.set()
    await settle()
    with gate.coming():
        pass


@in_loop
async def test_who_comes_when_a_place_is_free_does_not_take_it_from_who_waits() -> None:
    gate, begun = Gate(1, 8), list[str]()
    async with gate.inside():
        waiting = Text(gate, begun, "a")
        waiting.leave.set()
        await settle()
    async with gate.inside():
        assert begun == ["a"]
        assert gate.num_inside == 1


@in_loop
async def test_who_leaves_the_queue_at_its_end() -> None:
    gate, begun = Gate(1, 8), list[str]()
    async with gate.inside():
        waiting = Text(gate, begun, "a")
        await settle()
        waiting.task.cancel()
    await settle()
    assert waiting.task.cancelled()
    assert (gate.num_inside, gate.num_waiting) == (0, 0)


def test_requests_that_come_at_once_count() -> None:
    """While they are taken in, which may take a while, none of their texts waits yet."""
    gate = Gate(1, 1)
    with gate.coming(), gate.coming():
        with pytest.raises(ApiError, match="texts in progress: 0, waiting: 0;") as refused, gate.coming():
            pass
        assert refused.value.status == 429
    with gate.coming():
        pass
