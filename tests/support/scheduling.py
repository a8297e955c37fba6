"""Waiting for the thread of an engine, and keeping it from stepping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pystaged import Engine


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def is_idle(engine: Engine) -> bool:
    """Whether no text is left."""
    return engine.runtime.scheduler.is_idle


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """No text goes on for as long as the context lasts."""
    stepper, go_on, stands = engine.runtime.stepper, threading.Event(), threading.Event()
    step = stepper.step

    def wait(sequences: Any) -> None:
        stands.set()
        assert go_on.wait(60)
        step(sequences)

    stepper.step = wait  # type: ignore[method-assign]
    try:
        wait_until(lambda: is_idle(engine) or stands.is_set())
        yield
    finally:
        stepper.step = step  # type: ignore[method-assign]
        go_on.set()
