"""Decoding methods in their own processes, so that a crash affects nothing else.

A process runs the `Runner` of the module that its setup names, made from that setup. `run(job)` continues one prompt
and returns a Measurement; `close()` ends what was started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from pystaged.platform.process import Child, ChildError, parent, serve

if sys.platform == "darwin":
    import resource

_SECONDS_TO_LOAD = 600.0
_SECONDS_TO_END = 10.0
_MOST_WORDS = 300  # characters of an error message


class WorkerError(RuntimeError):
    """A worker crashed, hung or failed."""


def peak_bytes(pid: int | None = None) -> int:
    """Peak memory in bytes of this process, or of another running one; 0 where the system does not report it."""
    try:
        # Not from getrusage: on Linux it includes the parent's peak.
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError):
        if sys.platform == "darwin" and pid is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt continued once.

    tokens: the new ones, empty if a baseline does not report them. counted: tokens decoded in `seconds`, without those
    of prefill. first_token_seconds: from the prompt to the first token. steps: passes of the target, 0 if unknown.
    parts: seconds by part of the step. offered, taken: see GenerationStats. peak_bytes: peak memory so far of the
    measuring process.
    """

    counted: int
    seconds: float
    first_token_seconds: float
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    offered: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    peak_bytes: int = field(default_factory=peak_bytes)

    @property
    def is_timed(self) -> bool:
        """Whether it measures speed: there were tokens, and they took time."""
        return self.counted > 0 and self.seconds > 0


def tokens_per_second(measured: Iterable[Measurement]) -> float:
    """Decoding speed of all measurements together, without prefill."""
    found = list(measured)
    seconds = sum(each.seconds for each in found)
    return sum(each.counted for each in found) / seconds if seconds else 0.0


class Worker:
    """A runner in its own process, made from the first of several setups that works.

    Args:
        setups: each with a note for the report, the best first; each has its runner's module and options.

    Attributes:
        notes: failures, and the note on the current setup.
    """

    def __init__(self, *setups: tuple[str, dict[str, Any]]) -> None:
        self._left = list(setups)
        self._failures: list[str] = []
        self._child: Child | None = None

    @property
    def notes(self) -> list[str]:
        return [*self._failures, *filter(None, (note for note, _ in self._left[:1]))]

    def run(self, job: dict[str, Any], seconds: float) -> Any:
        """Run a job within that many seconds; if it fails, try the next setup.

        Raises:
            WorkerError: the last setup crashed, hung or failed, too; the process has been ended.
        """
        while True:
            note, setup = self._left[0]
            try:
                if self._child is None:
                    self._child = Child("pystaged.bench.worker")
                    self._child.call("load", setup, timeout=_SECONDS_TO_LOAD)
                return self._child.call("run", job, timeout=seconds)
            except (ChildError, WorkerError) as error:
                self.close()
                if len(self._left) == 1:
                    raise WorkerError(str(error)) from None
                self._failures.append(f"{note}: {error}" if note else str(error))
                del self._left[0]

    def close(self, *, at_once: bool = False) -> None:
        """End the process and what it started.

        Args:
            at_once: even during a job.
        """
        if self._child:
            self._child.close(0.0 if at_once else _SECONDS_TO_END)
            self._child = None


class _Host:
    """The runner in the process; its errors are sent to the report without a traceback."""

    _runner: Any = None

    def load(self, setup: dict[str, Any]) -> None:
        self._runner = _told(import_module(setup["runner"]).Runner, setup)

    def run(self, job: dict[str, Any]) -> Any:
        return _told(self._runner.run, job)

    def close(self) -> None:
        if self._runner:
            self._runner.close()


def _told(work: Callable[[dict[str, Any]], Any], task: dict[str, Any]) -> Any:
    try:
        return work(task)
    except Exception as error:
        words = " ".join(str(error).split())[:_MOST_WORDS]
        raise WorkerError(f"{type(error).__name__}: {words}") from None


def main() -> None:
    """Serve jobs until the parent process is gone."""
    with closing(_Host()) as host:
        serve(parent(), host)
