"""Children of fork(), and threads that stand still: for what must not hang beside one."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def forks(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that forks."""
    skip = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
    marked: Callable[..., None] = skip(pytest.mark.filterwarnings("ignore::DeprecationWarning")(test))
    return marked


@contextmanager
def stuck(patch: pytest.MonkeyPatch, owner: object, name: str, work: Callable[[], object]) -> Iterator[None]:
    """Another thread does a work, and stands still in its first call of a function as long as the context lasts."""
    begun, go_on, honest = threading.Event(), threading.Event(), getattr(owner, name)

    def slow(*args: Any) -> Any:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(600)
        return honest(*args)

    patch.setattr(owner, name, slow)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(600)
    try:
        yield
    finally:
        go_on.set()
        thread.join(600)


def in_child(work: Callable[[], bool]) -> bool:
    """What a child finds; False where it fails, or takes longer than ten minutes."""
    child = os.fork()
    if child == 0:
        found = False
        try:
            signal.alarm(600)
            found = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0 if found else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
