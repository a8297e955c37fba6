"""What POSIX and Windows do differently, told apart by what this Python has."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Otherwise Windows, where open files cannot be renamed or removed.
POSIX = fcntl is not None
# For os.open: without waiting for a pipe's other end, not passed on to children, and without changes to the bytes.
READ_ONLY = os.O_RDONLY
for _name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    READ_ONLY |= getattr(os, _name, 0)


def lock(file: IO[Any]) -> None:
    """Lock an open file until it is closed, without waiting. Raises BlockingIOError where another process has locked
    it, and OSError where the file system has no locks."""
    if POSIX:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt  # noqa: PLC0415

    file.seek(1 << 30)  # far beyond the file's end: a lock keeps others from reading the byte
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except PermissionError as error:
        raise BlockingIOError(error.errno, f"{file.name} is locked") from None


def is_own(folder: os.stat_result) -> bool:
    """Whether a folder is this user's and nobody else may write into it. On Windows a user's folders are by default."""
    if not hasattr(os, "getuid"):
        return True
    return folder.st_uid == os.getuid() and not folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def memory() -> tuple[int, int]:
    """Bytes of this machine's memory, and of what is free of it; half where the system does not say."""
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total // 2
    found = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(found)):  # type: ignore[attr-defined]
        raise OSError("Windows does not say how much memory there is")
    # All memory that is asked for counts against the page file at once.
    return found.total, min(found.free, found.free_with_page_file)


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        ("total_with_page_file", ctypes.c_uint64),
        ("free_with_page_file", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 3),
    )


# Options of subprocess.Popen: Ctrl-C does not reach the child. Windows ignores the first one.
GROUP_OF_ITS_OWN = {"start_new_session": True, "creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}


def inheriting(pipe: Connection) -> tuple[str, dict[str, Any]]:
    """A number by which a child finds a connection, and the options of subprocess.Popen that pass it on."""
    number = pipe.fileno()
    if hasattr(os, "killpg"):
        return str(number), {"pass_fds": [number]}
    os.set_handle_inheritable(number, True)  # type: ignore[attr-defined]
    startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [number]})  # type: ignore[attr-defined]
    return str(number), {"startupinfo": startup}


def inherited(number: str) -> Connection:
    """In a child: the connection that its parent passed on."""
    found: Connection = getattr(connection, "PipeConnection", Connection)(int(number))
    return found


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that has a group of its own, on POSIX with its children."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
