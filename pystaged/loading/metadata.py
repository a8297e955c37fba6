"""What a GGUF file says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class About:
    """What a new file says about its model; empty values are left out, except that an empty name becomes the
    checkpoint folder's."""

    name: str = ""
    license: str = ""
    source_url: str = ""


HEAD = "draft-head"  # GGUF architecture of draft heads


def read_metadata(path: Path) -> dict[str, str]:
    """Scalar metadata of a GGUF file as text; empty where it cannot be read."""
    from pystaged._core import ModelError, metadata  # noqa: PLC0415  who lists no models needs none

    try:
        return metadata(path)
    except ModelError:
        return {}


def is_head(path: Path) -> bool:
    """Whether a GGUF file holds a draft head, not a model. Raises ModelError for a file that is not GGUF."""
    from pystaged._core import metadata  # noqa: PLC0415

    return metadata(path).get("general.architecture") == HEAD
