"""Entry point of the command line: sets up Ctrl-C and the standard streams before slow imports."""

from __future__ import annotations

import io
import os
import sys

from pystaged.platform import ctrl_c as _ctrl_c

NOBODY_READS = 141


def main() -> None:
    """Run the command line."""
    _ctrl_c.leave_at_once()
    _open_streams()
    from pystaged.cli import main as run  # noqa: PLC0415

    run()


class _Output(io.FileIO):
    """Standard output. A broken pipe ends the program, wherever it was writing."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise SystemExit(NOBODY_READS) from None
        except OSError as error:
            raise OSError(f"standard output cannot be written: {error.strerror}") from None


class _ClosedInput(io.TextIOBase):
    """Standard input of a program that was started with it closed."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        del size
        raise OSError("standard input is closed")

    read = readline  # type: ignore[assignment]


def _open_streams() -> None:
    """Replace standard streams that are closed, and let broken ones raise clear errors."""
    for descriptor, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # Otherwise the next file that is opened would get this descriptor, and messages would be written into it.
            os.open(os.devnull, flags)
    if sys.stdin is None:
        sys.stdin = _ClosedInput()
    elif isinstance(sys.stdin, io.TextIOWrapper):
        # Invalid UTF-8 is refused where the text is used, with a better message than where it is read.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    # Other encodings lack letters that models write. Python writes to Windows' consoles by another way.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=stream.errors)
    if os.name == "nt" and sys.stdout is not None and sys.stdout.isatty():
        return
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    like = sys.stdout if isinstance(sys.stdout, io.TextIOWrapper) else sys.stderr
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(1, "w", closefd=False)),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=bool(like.line_buffering),
    )
