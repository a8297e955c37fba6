"""A model's files as they were at one time, to detect later changes."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pystaged.files import open_regular, update
from pystaged.loading.metadata import read_metadata

_FIRST_PART = re.compile(r"-00001-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A file as it was. number: device and inode. modified: nanoseconds."""

    path: Path
    number: tuple[int, int]
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> SeenFile:
        return cls(path, (found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class SeenModel:
    """A GGUF file as it was, or all files of a split model in order."""

    files: tuple[SeenFile, ...]

    @classmethod
    def now(cls, path: Path) -> SeenModel:
        """The model as it is now; `path` is its first file. Raises OSError."""
        count = 1
        if _FIRST_PART.search(path.name):
            count = int(read_metadata(path).get("split.count", "1"))
        parts = [path]
        for number in range(2, count + 1):
            parts.append(path.with_name(_FIRST_PART.sub(f"-{number:05}-of-{count:05}.gguf", path.name)))
        return cls(tuple(SeenFile.of(part, part.stat()) for part in parts))

    @property
    def path(self) -> Path:
        """Path of the first file."""
        return self.files[0].path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

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
