"""Free memory of this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pystaged.platform import system


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can allocate without swapping; half of the memory on macOS. root: of /proc, for tests."""
    try:
        free = 1024 * _field(root / "proc/meminfo", "MemAvailable:")
    except (OSError, ValueError):
        free = system.memory()[1]
    for folder in _groups(root):  # a container may have a lower limit
        with suppress(OSError, ValueError):
            # memory.max is "max", which int() refuses, without a limit. Inactive file pages can be freed at once.
            used = int((folder / "memory.current").read_text()) - _field(folder / "memory.stat", "inactive_file")
            free = min(free, int((folder / "memory.max").read_text()) - used)
    return max(free, 0)


def loadable_memory(root: Path = Path("/")) -> int:
    """Bytes that a model may take at most: the memory of this machine, or of this container."""
    try:
        most = 1024 * _field(root / "proc/meminfo", "MemTotal:")
    except (OSError, ValueError):
        most = system.memory()[0]
    for folder in _groups(root):
        with suppress(OSError, ValueError):
            most = min(most, int((folder / "memory.max").read_text()))
    return most


def _groups(root: Path) -> list[Path]:
    """Folders of this process's control group and of those around it; none without groups of version 2."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = root / "sys/fs/cgroup" / line[3:].lstrip("/")
                return [group, *group.parents]
    return []


def _field(path: Path, name: str) -> int:
    """The number after a name in a file. Raises OSError for no such file, and ValueError for no such name in it."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(f"{path} has no {name}")
