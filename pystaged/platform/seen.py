"""A model's files as they were at one time, to detect later changes."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from pystaged.platform.files import open_regular, update

PART = re.compile(r"-\d{5}(-of-(?!00001\.)(\d{5})\.gguf)$")


def parts_of(path: Path) -> list[Path]:
    """The files of a model in order, by the name of one of them; they need not exist."""
    found = PART.search(path.name)
    count = int(found[2]) if found else 0
    return [path.with_name(PART.sub(rf"-{number:05}\1", path.name)) for number in range(1, count + 1)] or [path]


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
        files = tuple(SeenFile.of(each, each.stat()) for each in parts_of(path))
        return cls(path, sum(each.size for each in files), files)

    @property
    def key(self) -> str:
        """What tells it from other models also after a copy or a restart: path, size and time of each file."""
        return repr([(str(each.path.absolute()), each.size, each.stamp[-1]) for each in self.files])

    def sha256(self) -> str:
        """SHA-256 of the files' concatenated content, computed once a process. Raises OSError for a file that cannot be
        read, or has changed, and ValueError for one that is not regular."""
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
