"""Ctrl-C that ends a turn, not the program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """While this is entered, Ctrl-C raises KeyboardInterrupt in sections that allow it and nowhere else, for there it
    could lose something; and once in a section, so that a burst of presses does not disturb what tidies up.
    """

    def __init__(self) -> None:
        self._raises = False
        self._waiting = False

    def __enter__(self) -> Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """A section that ends with KeyboardInterrupt when Ctrl-C is pressed, or has been since the last section."""
        try:
            self._raises = True
            self.check()
            yield
        except SystemError as error:
            # Within readline the handler may be called for a second press while the exception of the first is on its
            # way, which Python takes for a fault of the handler.
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
            raise
        finally:
            self._raises = self._waiting = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed and whatever ran then let it get lost, as a finalizer does."""
        if self._waiting:
            self._raises = False
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._waiting = True
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block."""
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if presses:
            signal.raise_signal(signal.SIGINT)
