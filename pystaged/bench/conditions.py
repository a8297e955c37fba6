"""The conditions of a measurement: machine, versions, files."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from pystaged.platform.seen import SeenModel

_UNSEEN = 0.5  # other threads, on average, that make no difference


def machine() -> dict[str, str | int]:
    """Processor, cores and system of this machine."""
    return {
        "processor": _processor(),
        "logical_cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def others() -> float:
    """Threads beside the caller's that run now on this machine; where the system does not say so, its load."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return 0.0


def load(found: Sequence[float], threads: int) -> dict[str, Any]:
    """What other programs did meanwhile: mean and most of `others`, and whether they took cores that `threads` need."""
    mean = fmean(found) if found else 0.0
    busy = mean + threads > (os.cpu_count() or 1) + _UNSEEN
    return {"mean": round(mean, 2), "most": max(found, default=0.0), "busy": busy}


def versions() -> dict[str, str]:
    """Versions of the packages that take part."""
    found = {}
    for name in ("pystaged", "llama-cpp-python", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def model_file(path: Path, about: str = "") -> dict[str, Any]:
    """A model's file, or all files of a split model: name, bytes, SHA-256, description."""
    seen = SeenModel.now(path)
    return {"name": path.name, "bytes": seen.size, "sha256": seen.sha256(), "about": about}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
