"""What a measurement was made on: the machine, the versions, the files."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pystaged.files import update

_ABOUT = {
    "grown": "grown from the bundled target: it costs what GPT-2 Large costs and says what the small model says",
    "grown-smollm2": "grown from SmolLM2: it costs what a model of a billion weights costs and says what SmolLM2 says",
    **dict.fromkeys(
        ("random", "llama1b", "llama8b"), "random weights: only its costs mean something, its acceptance does not"
    ),
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
    """Of the packages that take part."""
    found = {}
    for name in ("pystaged", "llama-cpp-python", "numpy", "openvino-genai"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def model_file(path: Path, named: str = "") -> dict[str, Any]:
    """A model's file.

    Args:
        named: what the user called it.
    """
    about = _ABOUT.get(named, "")
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path), "about": about}


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        update(digest, file)
    return digest.hexdigest()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
