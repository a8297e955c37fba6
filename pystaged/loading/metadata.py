"""What a GGUF file says about itself."""

from __future__ import annotations

from pathlib import Path


def read_metadata(path: Path) -> dict[str, str]:
    """Single values of a GGUF file's metadata, as text; empty where it cannot be read."""
    from pystaged._core import ModelError, metadata  # noqa: PLC0415  who lists no models needs none

    try:
        return metadata(path)
    except ModelError:
        return {}
