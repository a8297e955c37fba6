"""Recycled candidates, kept in the user's cache folder from run to run."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pystaged.drafting.recycled import KEPT, RecycledCandidates
from pystaged.files import part_file, read_small
from pystaged.loading.kept import KeptFiles

_SECONDS = 10.0  # between two writes while the model is used
_ENTRY_BYTES = 8 + 6 * KEPT  # a key, and a token and a chance of each candidate
_MOST_BYTES = 12_000_000
FILES = KeptFiles("memory", "pystaged memory 1")
folder, memory_path, memories, remove_memory = FILES.folder, FILES.path, FILES.all, FILES.remove


class KeptMemory:
    """Recycled candidates of a model, as they were kept, and their file: 10.2 MB at most.

    They begin empty where there is no file, or one that is damaged, of another model or of another version. Several
    processes may have one: the last writer wins.

    Args:
        model: its file.
        vocabulary: fingerprint; vocab_size: tokens.
        clock: seconds.
    """

    def __init__(
        self, model: Path, vocabulary: str, vocab_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        info = model.stat()
        self._head = FILES.head(model, f"{info.st_size} {info.st_mtime_ns} {vocabulary}")
        self._path, self._vocab_size, self._clock = memory_path(model), vocab_size, clock
        self.candidates = RecycledCandidates()
        self._load()
        self._saved, self._saved_at = 0, clock()

    def save_now_and_then(self) -> None:
        """Write what is new, but not more than once in ten seconds."""
        if self._clock() - self._saved_at >= _SECONDS:
            self.save()

    def save(self) -> None:
        """Write what is new. A memory is a convenience: where it cannot be written it is not kept."""
        learnt = self.candidates.num_learnt
        if learnt == self._saved:
            return
        keys, tokens, chances = self.candidates.entries()
        payload = keys.tobytes() + tokens.tobytes() + chances.astype(np.float16).tobytes()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with part_file(self._path) as part:
                part.chmod(0o600)  # it tells of texts
                part.write_bytes(self._head + _digest(payload) + b"\n" + payload)
                part.replace(self._path)
        except OSError:
            pass
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
        each = num_entries * KEPT
        tokens = np.frombuffer(payload, np.int32, each, 8 * num_entries).reshape(-1, KEPT)
        chances = np.frombuffer(payload, np.float16, each, 8 * num_entries + 4 * each).reshape(-1, KEPT)
        # What has the right digest may still have been written by somebody else.
        is_sound = (
            (keys >= 0).all()
            and ((tokens >= -1) & (tokens < self._vocab_size)).all()
            and ((chances >= 0) & (chances <= 1)).all()
            and (chances.sum(1) > 0).all()
        )
        if num_entries and is_sound:
            self.candidates.restore(keys, tokens, chances.astype(np.float32))


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).hexdigest().encode()
