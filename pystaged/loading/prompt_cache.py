"""Ended texts kept on disk with their keys, values and recurrent states, for prompts that begin like them."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session, read_texts, write_texts
from pystaged.decoding.drafter import common_prefix
from pystaged.platform import system
from pystaged.platform.files import cache_folder, check_room, expanded, open_regular, remove_leftover, whole_file

_TITLE = b"pystaged prompt 1\n"
_NAME = re.compile(r"[0-9a-f]{16}\.[0-9a-f]{16}\.prompt")
_FILES = (".bin", ".gguf", ".prompt", ".session")  # as llama.cpp's users name theirs
_LEAST = 128  # tokens; prefill of fewer is quick
_NEARLY = 7 / 8  # a conversation is written again when it has grown so much, not at every turn
_MOST_WAITING = 2  # copies of texts that are or wait to be written


class KeptPrompts:
    """The texts of a model in a folder, a file each; `find`, `load` and `keep` are for one thread.

    Args:
        folder: "auto" for one in the cache folder. It is made, and must belong to the user alone.
        content: identifies the models and all else that the bytes depend on.
        most_bytes: bytes of all files in the folder. The texts used longest ago are removed first.
        report: called with a line for a file that cannot be written or read.

    Raises:
        OSError: the folder cannot be made.
        ValueError: others can write into the folder, or it is a file, or is named like one.
    """

    def __init__(self, folder: str | Path, content: str, most_bytes: int, report: Callable[[str], None]) -> None:
        self._folder = cache_folder() / "prompts" if folder == "auto" else expanded(folder)
        if not self._folder.is_dir() and (self._folder.suffix in _FILES or self._folder.exists()):
            raise ValueError(f"{self._folder} looks like a file; name a folder")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not system.is_own(self._folder.stat()):
            raise ValueError(f"others can write into {self._folder}; name a folder that is yours alone (chmod 700)")
        for part in self._folder.iterdir():  # nothing of the user's
            if _NAME.match(part.name) and part.suffix == ".part":
                remove_leftover(part)
        self._content = hashlib.sha256(content.encode()).hexdigest()
        self._start = _TITLE + self._content.encode() + b"\n"
        self._most_bytes, self._report = most_bytes, report
        self._texts: dict[Path, NDArray[np.int32]] = {}
        self._writer = ThreadPoolExecutor(1, "pystaged prompts")
        self._waiting: list[Future[None]] = []
        self._thread = 0  # the writing thread
        self._has_failed = False  # the last one that was written

    def find(self, prompt: NDArray[np.int32], n_ctx: int, length: int) -> tuple[Path, NDArray[np.int32]] | None:
        """The file and the tokens of the text of at most n_ctx tokens that begins most like a prompt; None if it is
        faster to prefill what that has of the prompt after `length` tokens."""
        self._look()
        fitting = [each for each in self._texts.items() if len(each[1]) <= n_ctx]
        path, text = max(fitting, key=lambda each: common_prefix(each[1], prompt), default=(None, prompt[:0]))
        is_worth = common_prefix(text, prompt) - length >= max(_LEAST // 2, len(text) // 16)  # all of it is read
        return (path, text) if path and is_worth else None

    def load(self, path: Path, sessions: Sequence[Session]) -> None:
        """Read a text that `find` returned into empty sessions; a file that cannot be used is removed then."""
        try:
            read_texts(os.fsencode(path), self._head(self._texts[path]), sessions)
            os.utime(path)
        except OSError as error:
            self._drop(path, str(error))

    def keep(self, sessions: Sequence[Session], *, last: bool = False) -> None:
        """Write the text of a context in the background, unless nearly all of it is kept, or too many are being
        written. last: write it unless all of it is kept."""
        tokens = sessions[0].tokens
        if len(tokens) < _LEAST or self._is_writing():
            return
        self._look()
        kept = max((common_prefix(text, tokens) for text in self._texts.values()), default=0)
        if kept == len(tokens) or (not last and kept >= len(tokens) * _NEARLY):
            return
        self._waiting = [each for each in self._waiting if not each.done()]
        if last:
            wait(self._waiting)
        elif len(self._waiting) >= _MOST_WAITING:
            return
        copies = [session.fork(len(session.tokens)) for session in sessions]
        with suppress(RuntimeError):  # the program is exiting
            self._waiting.append(self._writer.submit(self._write, copies))

    def close(self) -> None:
        """Wait for the end of writing."""
        self._writer.shutdown(wait=not self._is_writing())

    def _is_writing(self) -> bool:
        """Whether this is the writing thread, where the garbage collector may close an engine."""
        return threading.get_ident() == self._thread

    def _write(self, copies: Sequence[Session]) -> None:
        self._thread = threading.get_ident()
        tokens = copies[0].tokens
        head, num_bytes = self._head(tokens), sum(session.num_bytes for session in copies)
        path = self._folder / f"{self._content[:16]}.{hashlib.sha256(head).hexdigest()[:16]}.prompt"
        try:
            if num_bytes > self._most_bytes:
                return
            self._make_room(num_bytes)
            check_room(self._folder, num_bytes)
            with whole_file(path) as part:
                part.chmod(0o600)
                write_texts(os.fsencode(part), head, copies)
        except OSError as error:
            if not self._has_failed:  # every text would, where the disk is full
                self._report(f"a prompt is not kept: {error}")
            self._has_failed = True
            return
        self._has_failed = False
        for other, text in list(self._texts.items()):
            # Without a text that this one can go back to, nothing is lost.
            length = len(text)
            if common_prefix(text, tokens) == length < len(tokens) and copies[0].reachable(length) == length:
                other.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the texts used longest ago, of any model, until a file of so many bytes is within the bound."""
        files = []
        for path in self._folder.glob("*.prompt"):
            if _NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):  # another process removed it
                    files.append((path.stat().st_mtime, path.stat().st_size, path))
        excess = num_bytes - self._most_bytes + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if excess > 0:
                path.unlink(missing_ok=True)
                excess -= size

    def _look(self) -> None:
        """Read the tokens of new files of these models, and forget removed ones."""
        there = set(self._folder.glob(f"{self._content[:16]}.*.prompt"))
        self._texts = {path: text for path, text in self._texts.items() if path in there}
        for path in there - self._texts.keys():
            try:
                self._texts[path] = self._tokens(path)
            except (OSError, ValueError) as error:
                self._drop(path, str(error))

    def _tokens(self, path: Path) -> NDArray[np.int32]:
        """The tokens in the head of a file. Raises OSError and ValueError for what is none."""
        with open_regular(path) as file:
            if file.read(len(self._start)) != self._start:
                raise ValueError(f"{path}: of another model or version")
            length = int.from_bytes(file.read(8), "little")
            data = file.read(4 * length) if 4 * length <= os.fstat(file.fileno()).st_size else b""
        if length == 0 or len(data) != 4 * length:
            raise ValueError(f"{path}: damaged")
        return np.frombuffer(data, "<i4").astype(np.int32)

    def _head(self, tokens: NDArray[np.int32]) -> bytes:
        return self._start + len(tokens).to_bytes(8, "little") + tokens.astype("<i4").tobytes()

    def _drop(self, path: Path, problem: str) -> None:
        """Remove a file that cannot be used; another process may have removed it already."""
        self._texts.pop(path, None)
        with suppress(OSError):
            path.unlink()
            self._report(f"a kept prompt is removed: {problem}")
