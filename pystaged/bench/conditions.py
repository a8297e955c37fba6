"""The conditions of a measurement: machine, versions, files."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from pystaged.loading.seen import SeenModel

_ABOUT = {
    "grown": "grown from the bundled target: the cost of GPT-2 Large, the output of the small model",
    "grown-smollm2": "grown from SmolLM2: the cost of a billion weights, the output of SmolLM2",
    "mixed-smollm2": "made of SmolLM2: a mixture with its output; 4 of 32 experts for each token, half of its reads",
    **dict.fromkeys(("random", "llama1b", "llama8b"), "random weights: costs are meaningful, acceptance is not"),
    "bundled": "the small target in the package",
}


def machine() -> dict[str, str | int]:
    """Processor, cores and system of this machine."""
    return {
        "processor": _processor(),
        "logical_cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that take part."""
    found = {}
    for name in ("pystaged", "llama-cpp-python", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def model_file(path: Path, named: str = "") -> dict[str, Any]:
    """A model's file, or all files of a split model: name, bytes, SHA-256, description.

    Args:
        named: the name that the user gave.
    """
    seen = SeenModel.now(path)
    return {"name": path.name, "bytes": seen.size, "sha256": seen.sha256(), "about": _ABOUT.get(named, "")}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
