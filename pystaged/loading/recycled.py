"""What drafting learns from texts, kept in the user's cache folder between runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pystaged._core import RecycledCandidates
from pystaged.drafting.calibration import Calibration
from pystaged.loading.kept import RECYCLED
from pystaged.platform.files import keep, kept
from pystaged.platform.seen import SeenModel

_KEPT = RecycledCandidates.num_candidates
_SECONDS = 10.0  # least time between two writes while the model is in use
_STORED = np.dtype([("key", np.int64), ("tokens", np.int32, _KEPT), ("chances", np.float16, _KEPT)])
_MOST_DRAFTS = 4  # whose calibrations are kept


class KeptCandidates:
    """A model's recycled candidates, the calibrations of its drafters, and their file of some 11 MB at most.

    They begin empty if the file is missing, damaged, or of another model, vocabulary (its fingerprint) or version.
    Processes may share a file; the last writer wins.
    model, draft: paths of its file and of its draft's, which has calibrations of its own; clock: returns seconds.
    """

    def __init__(
        self, model: Path, vocabulary: str, draft: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._head = f"pystaged memory 3\n{SeenModel.now(model).key} {vocabulary}\n".encode()
        self._path, self._clock = RECYCLED.path(model), clock
        self._draft = SeenModel.now(draft).key if draft else ""
        self.candidates, self.calibrations = RecycledCandidates(), {True: Calibration(), False: Calibration()}
        self._learnt: dict[str, list[Any]] = {}  # by draft, the one used last at the end
        self._load()
        self._saved, self._saved_at = 0, clock()
        self._writer: threading.Thread | None = None

    def save_now_and_then(self) -> None:
        """Start writing new candidates, at most once in ten seconds; a thread does it, so that decoding never waits for
        the disk."""
        if self._clock() - self._saved_at < _SECONDS or (self._writer and self._writer.is_alive()):
            return
        if self.candidates.num_learnt != self._saved:
            # Not a daemon, so that an exiting program waits for it.
            writer = threading.Thread(target=self._write, name="pystaged recycled")
            with suppress(RuntimeError):  # the system refuses threads, or the program is exiting
                writer.start()
                self._writer = writer

    def save(self) -> None:
        """Write new candidates."""
        if self._writer:
            with suppress(RuntimeError):  # the garbage collector may call this in the writer
                self._writer.join()
        if self.candidates.num_learnt != self._saved:
            self._write()

    def _write(self) -> None:
        learnt = self.candidates.num_learnt
        entries = self.candidates.entries().astype(_STORED)
        self._learnt.pop(self._draft, None)
        self._learnt[self._draft] = [each.counts() for each in self.calibrations.values()]
        calibrations = json.dumps(dict([*self._learnt.items()][-_MOST_DRAFTS:])).encode()
        keep(self._path, b"".join((self._head, calibrations, b"\n", entries.data)))
        self._saved, self._saved_at = learnt, self._clock()

    def _load(self) -> None:
        data = kept(self._path)
        if data is None or not data.startswith(self._head):
            return
        calibrations, _, entries = data[len(self._head) :].partition(b"\n")
        self._learnt = json.loads(calibrations)
        for calibration, learnt in zip(self.calibrations.values(), self._learnt.get(self._draft, ()), strict=False):
            calibration.restore(learnt)
        self.candidates.restore(np.frombuffer(entries, _STORED).astype(self.candidates.entries().dtype))
