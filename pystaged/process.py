"""Python processes of our own: what may crash, or must end at once, runs in one."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

_SECONDS_TO_END = 10.0
# glibc's names of what mallopt sets, and what it is set to.
_M_MMAP_THRESHOLD, _LARGE = -3, 1 << 17  # bytes
_M_ARENA_MAX, _HEAPS = -8, 2


def bound_heaps() -> None:
    """Have glibc give memory back that was freed: large blocks at once, and two heaps for all threads instead of one
    for each. For programs that run for days; before threads begin. Elsewhere it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_ARENA_MAX, _HEAPS)


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

    # A parent that ended while this process began must not find later what it writes.
    if select.select([0], [], [], 0)[0] and not os.read(0, 4096):
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


class ProcessLock:
    """A lock that a child of fork() finds free, whoever holds it in the parent.

    Args:
        make: threading.Lock, or threading.RLock where a thread may take it again.
    """

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make = make
        self._locks: dict[int, threading.Lock] = {}

    def here(self) -> threading.Lock:
        """This process's own. With it in a `with`, no Ctrl-C comes between taking and giving back."""
        return self._locks.setdefault(os.getpid(), self._make())


class ChildError(RuntimeError):
    """A child crashed or is silent."""


class ChildKilledError(ChildError):
    """A signal has ended a child, as that of a limit does."""


class ChildSilentError(ChildError):
    """A child has not answered in time."""


class Child:
    """A process that answers calls, one at a time. It ends with this one.

    Args:
        module: its `main` calls `serve`.
        environment: variables that it gets besides ours.
    """

    def __init__(self, module: str, **environment: str) -> None:
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the child
        with theirs:
            # A session of its own: Ctrl-C is for the parent, and what the child starts ends with it.
            self._process = start(
                module,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=os.environ | environment,
                start_new_session=True,
            )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_asked = False
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._connection, self._log)

    @property
    def is_free(self) -> bool:
        """Whether it lives, and owes no answer."""
        return self._end.alive and not self._is_asked

    def call(self, name: str, *args: object, timeout: float) -> Any:
        """What the host's method of that name returns or raises.

        Args:
            timeout: longest silence, in seconds.

        Raises:
            ChildError: it crashed, by a signal (ChildKilledError) or otherwise, or is silent (ChildSilentError); it is
                ended.
        """
        with self._lock:
            number = next(self._numbers)
            answered, good, value = -1, False, None
            self._is_asked = True
            try:
                self._transfer(self._connection.send, (number, name, args))
                # Signs of life, and answers to calls that were interrupted, are passed over.
                while answered != number:
                    if not self._connection.poll(timeout):
                        self._end()
                        raise ChildSilentError(f"gave no answer within {timeout:g} s")
                    answered, good, value = self._transfer(self._connection.recv)
            except (EOFError, OSError):
                how = self._describe_end()
                self._end()
                kind = ChildKilledError if (self._process.returncode or 0) < 0 else ChildError
                raise kind(f"crashed: {how}") from None
            self._is_asked = False
        if isinstance(value, BaseException) and not good:
            raise value
        return value

    def _transfer(self, transfer: Callable[..., Any], *message: object) -> Any:
        """Send or receive a message. What comes after one that was cut off, by Ctrl-C, could not be understood."""
        try:
            return transfer(*message)
        except KeyboardInterrupt:
            self._end()
            raise

    def kill(self) -> None:
        """End the process, from another thread than the one that uses it: that one gets ChildKilledError."""
        self._process.kill()

    def close(self, seconds: float = 0.0) -> None:
        """End the process and what it started.

        Args:
            seconds: that it has to end by itself.
        """
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._end()

    def _describe_end(self) -> str:
        """Exit status or signal, and the last line it wrote."""
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
    """A pool of children that answer calls. Each is started when it is needed, and ended when its caller has not waited
    for an answer. A process made by fork() has a pool of its own.

    Args:
        module: as in Child.
        most: at once.
    """

    def __init__(self, module: str, most: int) -> None:
        self._module, self._most = module, most
        self._here: dict[int, _Workers] = {}

    @contextmanager
    def turn(self) -> Iterator[Child]:
        """Wait until one is free, and have it for oneself."""
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
        """End them; who waits for an answer gets ChildKilledError."""
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
    if os.getpid() != owner:  # a child of fork(), which has a copy of this
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a zombie
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    log.close()


@contextmanager
def limits(seconds: float, room: int) -> Iterator[None]:
    """In a child, bound a piece of work: after so many seconds of processor time the child is killed, and beyond so
    many bytes of addresses more than it had it gets MemoryError; the latter not on macOS, which has no /proc."""
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
    """In a child: the connection to whoever started it."""
    return Connection(int(sys.argv[1]))


def serve(connection: Connection, host: object) -> None:
    """In a child: answer calls with a host's methods until whoever makes them is gone."""
    while True:
        try:
            number, name, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (number, True, getattr(host, name)(*args))
        except Exception as error:  # whatever it is, it belongs to the caller
            answer = (number, False, error)
        connection.send(answer)
