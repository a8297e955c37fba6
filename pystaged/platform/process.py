"""Child processes for work that may crash or must be killed."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from pystaged.platform import system

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]
_HAS_LIMITS = resource is not None

_SECONDS_TO_END = 10.0
_SECONDS_BETWEEN_LOOKS = 1.0  # of a child at its parent
# glibc's parameters of mallopt, and their values.
_M_MMAP_THRESHOLD, _LARGE = -3, 1 << 17  # bytes
_M_ARENA_MAX, _HEAPS = -8, 2


def bound_heaps() -> None:
    """Let glibc return freed memory to the system: large blocks at once, and two heaps for all threads instead of one
    for each. For long-running programs, before threads start. Does nothing without glibc."""
    mallopt = os.name == "posix" and getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_ARENA_MAX, _HEAPS)


def start(module: str, *args: str | os.PathLike[str], **popen_options: Any) -> subprocess.Popen[Any]:
    """Call `main()` of a module in a new Python process, whose exit status is its result.

    The child has this process's sys.path, so that it imports the same pystaged in any current folder.

    Args:
        module: full name, such as "pystaged.loading.quantize".
        args: sys.argv[1:] of the child.
        popen_options: as in subprocess.Popen.
    """
    path = [os.path.abspath(folder) for folder in sys.path]  # noqa: PTH100  "" is the current folder
    code = f"import sys; sys.path[:] = {path!r}; sys.argv[0] = {module!r}; from {module} import main; sys.exit(main())"
    return subprocess.Popen([sys.executable, "-c", code, *args], **popen_options)


def end_with_parent() -> None:
    """In a child: exit when its standard input ends, a pipe from the parent, even if the parent was killed."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would be held at Python's exit
            pass
        os._exit(1)

    # If the parent has ended already, exit before anything is written. On Windows only sockets can be asked.
    if os.name == "posix" and select.select([0], [], [], 0)[0] and not os.read(0, 4096):
        os._exit(1)
    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that temporary files are removed and children end."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ChildError(RuntimeError):
    """A child process crashed or does not answer."""


class ChildKilledError(ChildError):
    """A signal ended a child process, such as that of a limit."""


class ChildSilentError(ChildError):
    """A child process did not answer in time."""


class Child:
    """A child process that answers calls, one at a time. It ends with this process.

    Args:
        module: a module whose `main` calls `serve`.
        environment: additional environment variables.
    """

    def __init__(self, module: str, **environment: str) -> None:
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the child
        with theirs:
            number, options = system.inheriting(theirs)
            # A group of its own, so that Ctrl-C reaches the parent alone and the child's children end with it.
            self._process = start(
                module,
                number,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=os.environ | environment,
                **options,
                **system.GROUP_OF_ITS_OWN,
            )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_asked = self._is_killed = False
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._connection, self._log)

    @property
    def is_free(self) -> bool:
        """Whether it is alive and not in a call."""
        return self._end.alive and not self._is_asked

    def call(self, name: str, *args: object, timeout: float) -> Any:
        """Call a method of the child's host; returns its result or raises its error.

        Args:
            timeout: longest time without an answer or a sign of life, in seconds.

        Raises:
            ChildError: the child crashed, by a signal (ChildKilledError) or otherwise, or did not answer in time
                (ChildSilentError) and was killed.
        """
        with self._lock:
            number = next(self._numbers)
            answered, good, value = -1, False, None
            self._is_asked = True
            try:
                self._transfer(self._connection.send, (number, name, args))
                # Skip signs of life and answers to calls that were interrupted.
                while answered != number:
                    if not self._connection.poll(timeout):
                        self._end()
                        raise ChildSilentError(f"gave no answer within {timeout:g} s")
                    answered, good, value = self._transfer(self._connection.recv)
            except (EOFError, OSError):
                how = self._describe_end()
                self._end()
                crashes = not 0 <= (self._process.returncode or 0) < 1 << 31  # by a signal; on Windows by an exception
                kind = ChildKilledError if self._is_killed or crashes else ChildError
                raise kind(f"crashed: {how}") from None
            self._is_asked = False
        if isinstance(value, BaseException) and not good:
            raise value
        return value

    def _transfer(self, transfer: Callable[..., Any], *message: object) -> Any:
        """Send or receive a message. Ctrl-C in the middle of one ends the child, as later messages cannot be parsed."""
        try:
            return transfer(*message)
        except KeyboardInterrupt:
            self._end()
            raise

    def kill(self) -> None:
        """Kill the process; a thread that waits in a call gets ChildKilledError."""
        self._is_killed = True
        self._process.kill()

    def close(self, seconds: float = 0.0) -> None:
        """End the process and its children.

        Args:
            seconds: time that it gets to end by itself.
        """
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._end()

    def _describe_end(self) -> str:
        """Exit status or signal, and the last line of its output."""
        if not self._end.alive:
            return "it was ended"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        code = self._process.poll() or 0
        how = f"exit status {code}" if code >= 0 else f"signal {-code}"
        with contextlib.suppress(ValueError):
            how = signal.Signals(-code).name
        try:
            self._log.seek(0)
            lines = self._log.read().decode("utf-8", "replace").split("\n")
        except ValueError:  # another thread has closed it in the meantime
            return "it was ended"
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how} ({last[:120]})" if last else how


class Workers:
    """A pool of child processes that answer calls. Each is started when it is needed, and ended if its caller did not
    wait for an answer. A child of fork() has a pool of its own.

    Args:
        module: as in Child.
        most: most child processes.
    """

    def __init__(self, module: str, most: int) -> None:
        self._module, self._most = module, most
        self._here: dict[int, _Workers] = {}

    @contextmanager
    def turn(self) -> Iterator[Child]:
        """Wait for a free child process and reserve it during the block."""
        here = self._here.setdefault(os.getpid(), _Workers(threading.Semaphore(self._most)))
        with here.turns:
            try:
                child = here.free.pop()
            except IndexError:
                child = Child(self._module)
            here.busy.add(child)
            try:
                yield child
            finally:
                here.busy.discard(child)
                if child.is_free:
                    here.free.append(child)
                else:
                    child.close()

    def close(self) -> None:
        """End all child processes; threads that wait in a call get ChildKilledError."""
        here = self._here.pop(os.getpid(), None)
        if here:
            for child in list(here.busy):
                child.kill()
            for child in here.free:
                child.close()


@dataclass
class _Workers:
    turns: threading.Semaphore
    free: list[Child] = field(default_factory=list)
    busy: set[Child] = field(default_factory=set)


def _end(owner: int, process: subprocess.Popen[bytes], connection: Connection, log: IO[bytes]) -> None:
    connection.close()
    if os.getpid() != owner:  # in a child of fork(), which must not end its parent's child
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a zombie
        system.end(process)
    process.wait()
    log.close()


@contextmanager
def limits(seconds: float, room: int) -> Iterator[None]:
    """In a child, limit the work of a block: after `seconds` of processor time the child is killed, and beyond `room`
    more bytes of address space it gets MemoryError, except on macOS, which has no /proc. Windows has
    neither limit, only the parent's patience."""
    if not _HAS_LIMITS:
        yield
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    had = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:  # noqa: PTH123  imports little
        most = int(file.read().split()[0]) * resource.getpagesize() + room
        if had[0] != resource.RLIM_INFINITY:
            most = min(most, had[0])
        resource.setrlimit(resource.RLIMIT_AS, (most, had[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, had)


def parent() -> Connection:
    """In a child: the connection to its parent."""
    return system.inherited(sys.argv[1])


def _exit_after(parent: int) -> None:
    """Exit with all children when the parent has ended, even during a call. On Windows the parent's number never
    changes."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.killpg(0, signal.SIGKILL)


def serve(connection: Connection, host: object) -> None:
    """In a child: answer calls with a host's methods until the parent ends."""
    threading.Thread(target=_exit_after, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            number, name, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (number, True, getattr(host, name)(*args))
        except Exception as error:  # the parent raises it
            answer = (number, False, error)
        connection.send(answer)
