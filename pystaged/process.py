"""Python processes of our own: what may crash, or must end at once, runs in one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def start(module: str, *args: str | os.PathLike[str], **popen_options: Any) -> subprocess.Popen[Any]:
    """Call `main()` of a module in a new Python; what it returns is the exit status.

    The child finds modules where this process does, so it gets the same pystaged whatever the current folder holds.

    Args:
        module: full name, such as "pystaged.loading.quantize".
        args: become sys.argv[1:].
        popen_options: as in subprocess.Popen.
    """
    path = [os.path.abspath(folder) for folder in sys.path]  # noqa: PTH100  "" is the current folder
    code = f"import sys; sys.path[:] = {path!r}; sys.argv[0] = {module!r}; from {module} import main; sys.exit(main())"
    return subprocess.Popen([sys.executable, "-c", code, *args], **popen_options)


def end_with_parent() -> None:
    """Called in the child: it ends when its standard input, a pipe from the parent, does; even if that was killed."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would be held when Python ends
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM unwind a command as Ctrl-C does, so that its temporary files and its children end too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
