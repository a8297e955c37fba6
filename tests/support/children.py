"""Children of fork(), for what must not hang in one."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

import pytest


def forks(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that forks."""
    skip = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
    marked: Callable[..., None] = skip(pytest.mark.filterwarnings("ignore::DeprecationWarning")(test))
    return marked


def in_child(work: Callable[[], bool]) -> bool:
    """What a child finds; False where it fails, or takes longer than half a minute."""
    child = os.fork()
    if child == 0:
        found = False
        try:
            signal.alarm(30)
            found = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0 if found else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
