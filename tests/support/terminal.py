"""A pseudo-terminal with a screen, to see what a user sees. Linux and macOS."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Mapping, Sequence

import pyte


class Terminal:
    """A program running in a terminal.

    Args:
        command: argv.
        environment: replaces the process's own.
        columns, lines: size of the screen.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, columns: int = 80, lines: int = 24
    ) -> None:
        self.output = b""
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.process, self._descriptor = pty.fork()
        if self.process == 0:
            try:
                # The size is set before the program can ask for it.
                _set_size(0, columns, lines)
                _keep_output(0)
                os.execvpe(command[0], command, environment)
            finally:
                os._exit(127)  # else this child would go on with the tests

    def wait_for(self, words: bytes, seconds: float = 600.0, *, start: int = 0) -> None:
        """Read until the program has written these bytes, after the first `start` of its output."""
        deadline = time.monotonic() + seconds
        while words not in self.output[start:]:
            assert time.monotonic() < deadline, self.output
            assert self._read(0.1), self.output

    def type(self, keys: bytes) -> None:
        """Press keys; b"\\x03" is Ctrl-C."""
        os.write(self._descriptor, keys)

    def resize(self, columns: int, lines: int) -> None:
        """Drag the window to another size."""
        _set_size(self._descriptor, columns, lines)
        self.screen.resize(lines, columns)

    def finish(self, seconds: float = 600.0) -> int:
        """Read to the end; the program's exit status."""
        deadline = time.monotonic() + seconds
        while self._read(0.1):
            assert time.monotonic() < deadline, self.output
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    @property
    def shown(self) -> list[str]:
        """The lines on the screen, without trailing blanks."""
        return [line.rstrip() for line in self.screen.display]

    def color(self, line: int, column: int) -> str:
        """Of the character at that place."""
        return str(self.screen.buffer[line][column].fg)

    def _read(self, seconds: float) -> bool:
        """Take what there is within that time; False at the end."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # Linux, when the program has ended
            return False
        self.output += data
        self._stream.feed(data)
        return bool(data)


def _set_size(descriptor: int, columns: int, lines: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def _keep_output(descriptor: int) -> None:
    """On Ctrl-C a terminal drops what it has not shown yet, which would make the screen a matter of chance."""
    attributes = termios.tcgetattr(descriptor)
    attributes[3] |= termios.NOFLSH
    termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
