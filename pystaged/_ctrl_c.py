"""Handling of Ctrl-C in the command line. Imported before anything that takes time."""

from __future__ import annotations

import itertools
import os
import signal
from types import FrameType

INTERRUPTED = 130
_BURST = 5  # presses of Ctrl-C that count as one interrupt

_patience = itertools.repeat(None, _BURST)


def leave_at_once() -> None:
    """Let Ctrl-C end the program without an exception, unless SIGINT is ignored, as in a shell's background jobs.
    While modules are imported there is nothing to clean up, and an exception might get lost."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def let_tidy_up() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt; the next few are ignored, so that cleanup is not interrupted."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _interrupt)


def _leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    signal.signal(signal.SIGINT, _tidying)
    raise KeyboardInterrupt


def _tidying(number: int, frame: FrameType | None) -> None:
    """After more presses than a burst has, end without cleanup."""
    if next(_patience, _leave) is _leave:
        _leave(number, frame)
