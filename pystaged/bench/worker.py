"""A way of decoding in a process of its own: one that crashes takes nothing else with it.

What decodes there is the `Runner` of the module that a setup names. It is made from the setup; `run(job)` continues one
prompt and returns a Measurement, `close()` ends what was started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from pystaged.process import Child, ChildError, parent, serve

if sys.platform == "darwin":
    import resource

_SECONDS_TO_LOAD = 600.0
_SECONDS_TO_END = 10.0
_MOST_WORDS = 300  # characters that a failure is told in


class WorkerError(RuntimeError):
    """A worker crashed, hung or could not do what it was asked."""


def peak_bytes(pid: int | None = None) -> int:
    """Most memory this process, or another one that still runs, ever had; 0 where the system does not tell."""
    try:
        # Not from getrusage: on Linux a process inherits its parent's peak there.
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError):
        if sys.platform == "darwin" and pid is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt continued once.

    tokens: the new ones, empty where a baseline does not tell. counted: tokens that came in `seconds` of decoding;
    first_token_seconds: from the prompt to the first token. steps: passes of the target, 0 where not known.
    parts: seconds by part of the step. emitted: tokens by stage. offered, taken: as in GenerationStats. peak_bytes:
    most memory so far of the process that measured.
    """

    counted: int
    seconds: float
    first_token_seconds: float
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    emitted: dict[str, int] = field(default_factory=dict)
    offered: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    peak_bytes: int = field(default_factory=peak_bytes)

    @property
    def is_timed(self) -> bool:
        """Whether it says anything of speed: there were tokens, and they took time."""
        return self.counted > 0 and self.seconds > 0


def tokens_per_second(measured: Iterable[Measurement]) -> float:
    """Of decoding, without the prompts; all together."""
    found = list(measured)
    seconds = sum(each.seconds for each in found)
    return sum(each.counted for each in found) / seconds if seconds else 0.0


class Worker:
    """A runner in a process of its own, made from the first of several setups that works.

    Args:
        setups: with a word on each, for the report; the best first. Each names its runner's module and what that needs.

    Attributes:
        notes: what crashed, and a word on what runs now.
    """

    def __init__(self, *setups: tuple[str, dict[str, Any]]) -> None:
        self._left = list(setups)
        self._failures: list[str] = []
        self._child: Child | None = None

    @property
    def notes(self) -> list[str]:
        return [*self._failures, *filter(None, (note for note, _ in self._left[:1]))]

    def run(self, job: dict[str, Any], seconds: float) -> Any:
        """What the runner makes of a job within that many seconds; with the next setup when one fails.

        Raises:
            WorkerError: the last one crashed, hung or failed, too; the process is ended.
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
            at_once: even in the middle of a job.
        """
        if self._child:
            self._child.close(0.0 if at_once else _SECONDS_TO_END)
            self._child = None


class _Host:
    """The runner in the process. Whatever it raises is a row of the report, not a traceback."""

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
    """Serve jobs until whoever gives them is gone."""
    with closing(_Host()) as host:
        serve(parent(), host)
