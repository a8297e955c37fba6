"""Ctrl-C that ends a turn of a chat, not the program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """While entered, Ctrl-C raises KeyboardInterrupt only in sections that allow it, because elsewhere it could lose
    state, and only once in a section, so that repeated presses do not disturb cleanup.
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
        """A section that Ctrl-C ends with KeyboardInterrupt, also if it was pressed since the last section."""
        try:
            self._raises = True
            self.check()
            yield
        except SystemError as error:
            # Within readline a second press may call the handler during the first one's exception; Python then raises
            # SystemError.
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

    def _press(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._waiting = True
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block ends."""
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if presses:
            signal.raise_signal(signal.SIGINT)
