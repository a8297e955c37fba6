"""The parent's end of a worker: asks it, and notices when it crashes or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_SECONDS_TO_LOAD = 600.0
_SECONDS_TO_END = 10.0


class WorkerError(RuntimeError):
    """A worker crashed, hung or could not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt continued once.

    tokens: the new ones, empty where a peer does not tell. counted: tokens that came in `seconds` of decoding;
    first_token_seconds: from the prompt to the first token. steps: passes of the target, 0 where not known.
    relative_weight_bytes: weights read per token relative to plain decoding, 0 where not known. parts: seconds by part
    of the step. emitted: tokens by stage. peak_bytes: most memory of the process so far.
    """

    counted: int
    seconds: float
    first_token_seconds: float
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    relative_weight_bytes: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    emitted: dict[str, int] = field(default_factory=dict)
    offered: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, without the prompt."""
        return self.counted / self.seconds


class Worker:
    """A child process with a model loaded.

    Args:
        setup: names the runner and what it needs; see worker.py.

    Raises:
        WorkerError: it cannot load.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the worker
        # A session of its own: Ctrl-C is for the parent, which ends its workers in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pystaged.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._replies: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self._ask(setup, _SECONDS_TO_LOAD)
        except BaseException:
            self.close()
            raise

    def run(self, job: dict[str, Any], seconds: float) -> Measurement:
        """Have one prompt continued, within that many seconds.

        Raises:
            WorkerError: it crashed, hung or failed; the worker is closed.
        """
        try:
            return Measurement(**self._ask(job, seconds))
        except WorkerError:
            self.close()
            raise

    def close(self, *, at_once: bool = False) -> None:
        """End the process and what it started.

        Args:
            at_once: even in the middle of a job.
        """
        if at_once:
            self._kill()
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._kill()
        self._listener.join()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()

    def _kill(self) -> None:
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        if self._process.stdout:
            for line in self._process.stdout:
                self._replies.put(line)
        self._replies.put("")

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            if self._process.stdin:
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            self._kill()
            raise WorkerError(f"gave no answer within {seconds:.0f} s") from None
        except OSError:
            line = ""
        if not line:
            self._process.wait()
            raise WorkerError(f"crashed: {describe_exit(self._process.returncode)}{self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({last[:120]})" if last else ""


def describe_exit(code: int) -> str:
    """An exit status in words: the signal's name where there was one."""
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit status {code}"


class Fallback:
    """A worker made from the first of several setups that works, the next one when it crashes.

    Args:
        setups: with a word on each, for the report; the best first.

    Attributes:
        notes: what crashed, and a word on what runs now.
    """

    def __init__(self, setups: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self._left = list(setups)
        self._failures: list[str] = []
        self._worker: Worker | None = None

    @property
    def notes(self) -> list[str]:
        return [*self._failures, *filter(None, (note for note, _ in self._left[:1]))]

    def run(self, job: dict[str, Any], seconds: float) -> Measurement:
        """As Worker.run, with the next setup when one fails.

        Raises:
            WorkerError: the last one failed too.
        """
        while True:
            note, setup = self._left[0]
            try:
                if self._worker is None:
                    self._worker = Worker(setup)
                return self._worker.run(job, seconds)
            except WorkerError as error:
                self.close()
                if len(self._left) == 1:
                    raise
                self._failures.append(f"{note}: {error}" if note else str(error))
                del self._left[0]

    def close(self, *, at_once: bool = False) -> None:
        """End the worker; as Worker.close."""
        if self._worker:
            self._worker.close(at_once=at_once)
            self._worker = None
