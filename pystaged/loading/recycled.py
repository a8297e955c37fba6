"""Recycled candidates, kept in the user's cache folder between runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from pystaged._core import RecycledCandidates
from pystaged.loading.kept import RECYCLED
from pystaged.platform.files import keep, kept

_KEPT = RecycledCandidates.num_candidates

_SECONDS = 10.0  # least time between two writes while the model is in use
_ENTRY_BYTES = 8 + 6 * _KEPT  # a key, and each candidate's token and probability


class KeptCandidates:
    """A model's recycled candidates and their file, at most 10.2 MB.

    They begin empty if the file is missing, damaged, or of another model, vocabulary (its fingerprint) or version.
    Processes may share a file; the last writer wins. model: path of its file; clock: returns seconds.
    """

    def __init__(self, model: Path, vocabulary: str, clock: Callable[[], float] = time.monotonic) -> None:
        info = model.stat()
        content = f"whose content is {info.st_size} {info.st_mtime_ns} {vocabulary}\n".encode()
        self._head = b"pystaged memory 1\nof " + os.fsencode(model.absolute()) + b"\n" + content
        self._path, self._clock = RECYCLED.path(model), clock
        self.candidates = RecycledCandidates()
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
        entries = self.candidates.entries()
        fields = entries["key"], entries["tokens"], entries["chances"].astype(np.float16)
        keep(self._path, self._head + b"".join(field.tobytes() for field in fields))
        self._saved, self._saved_at = learnt, self._clock()

    def _load(self) -> None:
        data = kept(self._path)
        if data is None or not data.startswith(self._head):
            return
        fields = data[len(self._head) :]
        entries = np.empty(num_entries := len(fields) // _ENTRY_BYTES, self.candidates.entries().dtype)
        each = num_entries * _KEPT
        entries["key"] = np.frombuffer(fields, np.int64, num_entries)
        entries["tokens"] = np.frombuffer(fields, np.int32, each, 8 * num_entries).reshape(-1, _KEPT)
        entries["chances"] = np.frombuffer(fields, np.float16, each, 8 * num_entries + 4 * each).reshape(-1, _KEPT)
        self.candidates.restore(entries)
