"""Ctrl-C of the command line. Imported before anything that takes time."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
_BURST = 6  # presses that count as one interrupt
_presses = _BURST  # the next one ends the program


def leave_at_once() -> None:
    """Let Ctrl-C end the program without an exception, unless SIGINT is ignored, as in a shell's background jobs.
    While modules are imported there is nothing to clean up, and an exception might get lost."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _press)


def let_tidy_up(presses: int = 0) -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt; the next few are ignored, so that cleanup is not interrupted.
    presses: how many have come."""
    global _presses  # noqa: PLW0603
    _presses = presses


def _press(_number: int, _frame: FrameType | None) -> None:
    let_tidy_up(_presses + 1)
    if _presses == 1:
        raise KeyboardInterrupt
    if _presses > _BURST:
        os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)


class Interrupts:
    """While entered, Ctrl-C raises KeyboardInterrupt only in sections that allow it, because elsewhere it could lose
    state, and only once in a section, so that repeated presses do not disturb cleanup. One that still waits at the end
    is passed on."""

    def __init__(self) -> None:
        self._raises = self._waiting = False

    def __enter__(self) -> Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        if self._waiting:
            signal.raise_signal(signal.SIGINT)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """A section that Ctrl-C ends with KeyboardInterrupt, also if it was pressed since the last section."""
        try:
            self._raises = True
            self.check()
            yield
        except SystemError as error:  # Python's, for a press in readline while the first one's exception is raised
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
            raise
        finally:
            self._raises = self._waiting = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed and its exception was lost, as in a finalizer."""
        if self._waiting:
            self._raises = False
            raise KeyboardInterrupt

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        self._waiting = True
        if self._raises:
            self.check()
