"""Waiting for the thread of an engine, and keeping it from stepping."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from math import inf
from typing import Any

from pystaged import Engine, FixedPolicy, Growth


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def in_loop(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test of a coroutine, in an event loop of its own."""

    @wraps(work)
    def test(*args: Any, **options: Any) -> None:
        asyncio.run(asyncio.wait_for(work(*args, **options), 600))

    return test


def is_idle(engine: Engine) -> bool:
    """Whether no text is running or waiting; ended ones may have unread pieces."""
    scheduler = engine._scheduler
    return scheduler._is_waiting and not scheduler._texts and scheduler._inbox.empty()


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """No text goes on for as long as the context lasts."""
    stepper, go_on, stands = engine._stepper, threading.Event(), threading.Event()
    step = stepper.step

    def wait(texts: Any) -> Any:
        stands.set()
        assert go_on.wait(600)
        return step(texts)

    stepper.step = wait  # type: ignore[method-assign]
    try:
        wait_until(lambda: engine._scheduler._is_waiting or stands.is_set())  # perhaps for readers
        yield
    finally:
        stepper.step = step  # type: ignore[method-assign]
        go_on.set()


class ActingPolicy:
    """Trees of one shape, and something that is done where it is asked for the `left`-th time which nodes to keep."""

    children = 4

    def __init__(self, do: Callable[[], object], left: float = inf, shape: FixedPolicy | None = None) -> None:
        self.do, self.left, self._shape = do, left, shape or FixedPolicy(2, 3, 6)

    def expand(self, growth: Growth) -> int:
        return self._shape.expand(growth)

    def keep(self, growth: Growth) -> int:
        self.left -= 1
        if self.left == 0:
            self.do()
        return self._shape.keep(growth)


class HeldPolicy:
    """A policy that stops in the middle of a step until it may go on."""

    children = 1

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def expand(self, growth: Growth) -> int:
        del growth
        if not self.go_on.is_set():
            self.reached.set()
        assert self.go_on.wait(600)
        return 0

    def keep(self, growth: Growth) -> int:
        del growth
        return 0
