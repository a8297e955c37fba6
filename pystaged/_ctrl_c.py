"""What Ctrl-C does to the program as a whole. Imported before anything that takes time."""

from __future__ import annotations

import itertools
import os
import signal
from types import FrameType

INTERRUPTED = 130
_BURST = 5  # presses of Ctrl-C that are one wish

_patience = itertools.repeat(None, _BURST)


def leave_at_once() -> None:
    """Let Ctrl-C end the program without an exception, unless it is ignored, as in what a shell runs in the background.
    While modules are imported there is nothing to tidy up, and an exception might get lost."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def let_tidy_up() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, once: what ends then is not disturbed by the rest of a burst."""
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
    """Who keeps pressing does not want to wait."""
    if next(_patience, _leave) is _leave:
        _leave(number, frame)
