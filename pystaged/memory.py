"""How much memory of this machine is free."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may take without swapping, as far as the system tells: of a machine that does not, half
    of its memory.

    Args:
        root: where proc and sys lie, for tests.
    """
    try:
        free = 1024 * _field(root / "proc/meminfo", "MemAvailable:")
    except (OSError, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    # A container may be granted less.
    with suppress(OSError, ValueError):
        group = _group(root)
        for folder in [group, *group.parents]:
            with suppress(OSError, ValueError):
                # "max" where there is no limit. Pages of files that nobody has used lately make room at once.
                used = int((folder / "memory.current").read_text()) - _field(folder / "memory.stat", "inactive_file")
                free = min(free, int((folder / "memory.max").read_text()) - used)
    return max(free, 0)


def _group(root: Path) -> Path:
    """The folder of this process's control group."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return root / "sys/fs/cgroup" / line[3:].lstrip("/")
    raise ValueError("there are no control groups of version 2")


def _field(path: Path, name: str) -> int:
    """The number behind a name.

    Raises:
        OSError: no such file.
        ValueError: no such name in it.
    """
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(f"{path} has no {name}")
