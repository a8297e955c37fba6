"""A model's files as they were at one time, to detect later changes."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from pystaged.platform.files import open_regular, update

_FIRST_PART = re.compile(r"-00001-of-(\d{5})\.gguf$")


class SeenFile(NamedTuple):
    """A file as it was. stamp: device, inode and time of the last change."""

    path: Path
    size: int
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> SeenFile:
        return cls(path, found.st_size, (found.st_dev, found.st_ino, found.st_mtime_ns))


class SeenModel(NamedTuple):
    """A GGUF file as it was, or all files of a split model in order."""

    path: Path
    size: int
    files: tuple[SeenFile, ...]

    @classmethod
    def now(cls, path: Path) -> SeenModel:
        """The model as it is now; `path` is its first file. Raises OSError."""
        first = _FIRST_PART.search(path.name)
        count = int(first[1]) if first else 1
        names = (_FIRST_PART.sub(f"-{number:05}-of-{count:05}.gguf", path.name) for number in range(1, count + 1))
        files = tuple(SeenFile.of(each, each.stat()) for each in map(path.with_name, names))
        return cls(path, sum(each.size for each in files), files)

    def sha256(self) -> str:
        """SHA-256 of the files' concatenated content, computed once a process.

        Raises:
            OSError: a file cannot be read, or has changed.
            ValueError: a file is not a regular one.
        """
        return _sha256(self)


@functools.lru_cache(maxsize=64)
def _sha256(seen: SeenModel) -> str:
    digest = hashlib.sha256()
    for each in seen.files:
        with open_regular(each.path) as file:
            update(digest, file)
            if SeenFile.of(each.path, os.fstat(file.fileno())) != each:
                raise OSError(f"{each.path} was replaced or changed after it was loaded")
    return digest.hexdigest()
