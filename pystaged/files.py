"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; it becomes `path` only if the block ends well."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_room(folder: Path, num_bytes: int) -> None:
    """Refuse to begin a file that the disk has no room for.

    Raises:
        OSError: naming the folder, what is needed and what is free.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(f"no room in {folder}: {num_bytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")
