"""Recycled candidates, kept in the user's cache folder between runs."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from pystaged._core import RecycledCandidates
from pystaged.files import keep, read_small
from pystaged.loading.kept import RECYCLED

_KEPT = RecycledCandidates.num_candidates

_SECONDS = 10.0  # least time between two writes while the model is in use
_ENTRY_BYTES = 8 + 6 * _KEPT  # a key, and each candidate's token and probability
_MOST_BYTES = 12_000_000


class KeptCandidates:
    """A model's recycled candidates and their file, at most 10.2 MB.

    They begin empty if the file is missing, damaged, or of another model or version. Processes may share a file; the
    last writer wins.

    Args:
        model: path of its file.
        vocabulary: its fingerprint; vocab_size: in tokens.
        clock: returns seconds.
    """

    def __init__(
        self, model: Path, vocabulary: str, vocab_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        info = model.stat()
        self._head = RECYCLED.head(model, f"{info.st_size} {info.st_mtime_ns} {vocabulary}")
        self._path, self._vocab_size, self._clock = RECYCLED.path(model), vocab_size, clock
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
                self._writer.join()  # returns at once in a child of fork(), which has no such thread
        if self.candidates.num_learnt != self._saved:
            self._write()

    def _write(self) -> None:
        learnt = self.candidates.num_learnt
        keys, tokens, chances = self.candidates.entries()
        payload = keys.tobytes() + tokens.tobytes() + chances.astype(np.float16).tobytes()
        keep(self._path, self._head + _digest(payload) + b"\n" + payload)
        self._saved, self._saved_at = learnt, self._clock()

    def _load(self) -> None:
        try:
            data = read_small(self._path, _MOST_BYTES)
        except (OSError, ValueError):
            return
        begin = len(self._head) + len(_digest(b"")) + 1
        payload = data[begin:]
        num_entries, rest = divmod(len(payload), _ENTRY_BYTES)
        if rest or data[:begin] != self._head + _digest(payload) + b"\n":
            return
        keys = np.frombuffer(payload, np.int64, num_entries)
        each = num_entries * _KEPT
        tokens = np.frombuffer(payload, np.int32, each, 8 * num_entries).reshape(-1, _KEPT)
        chances = np.frombuffer(payload, np.float16, each, 8 * num_entries + 4 * each).reshape(-1, _KEPT)
        # A matching digest does not prove that pystaged wrote the file.
        if ((tokens >= -1) & (tokens < self._vocab_size) & (chances >= 0) & (chances <= 1)).all():
            with suppress(ValueError):  # impossible keys, or no candidates
                self.candidates.restore(keys, tokens, chances.astype(np.float32))


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).hexdigest().encode()
