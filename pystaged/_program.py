"""The program's first steps: what must be in place before anything is imported that takes time."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
NOBODY_READS = 141
_BURST = 5  # presses of Ctrl-C that are one wish

_patience = itertools.repeat(None, _BURST)


def main() -> None:
    """Run the command line."""
    # Else somebody wants interrupts ignored, as a shell does for what it runs in the background.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    _open_streams()
    from pystaged.cli import main as run  # noqa: PLC0415

    run()


def let_tidy_up() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, once: what ends then is not disturbed by the rest of a burst."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _interrupt)


def _leave(number: int, frame: FrameType | None) -> None:
    """Leave at once. While modules are imported there is nothing to tidy up, and an exception might get lost."""
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


class _Output(io.FileIO):
    """Standard output. That nobody reads it any more ends the program, whoever was writing."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise SystemExit(NOBODY_READS) from None
        except OSError as error:
            raise OSError(f"standard output cannot be written: {error.strerror}") from None


class _ClosedInput(io.TextIOBase):
    """Standard input of a program that was started without one."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        del size
        raise OSError("standard input is closed")

    read = readline  # type: ignore[assignment]


def _open_streams() -> None:
    """Standard streams that fail as they should."""
    for descriptor, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # Else the next file that is opened takes the number, and may be written to. What cannot be read or written
            # fails when it is tried; messages may get lost.
            os.open(os.devnull, flags)
    if sys.stdin is None:
        sys.stdin = _ClosedInput()
    elif isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no text are refused where the text is used, not where it happens to be read.
        sys.stdin.reconfigure(errors="surrogateescape")
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    like = sys.stdout if isinstance(sys.stdout, io.TextIOWrapper) else sys.stderr
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(1, "w", closefd=False)),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=bool(like.line_buffering),
    )
