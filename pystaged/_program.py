"""The program's first steps: what must be in place before anything is imported that takes time."""

from __future__ import annotations

import io
import os
import sys

from pystaged import _ctrl_c

NOBODY_READS = 141


def main() -> None:
    """Run the command line."""
    _ctrl_c.leave_at_once()
    _open_streams()
    from pystaged.cli import main as run  # noqa: PLC0415

    run()


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
