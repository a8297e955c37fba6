"""Files that tests read."""

from __future__ import annotations

from pathlib import Path

from pystaged.loading import names

DATA = Path(__file__).parents[1] / "data"


def smollm2() -> Path:
    """The file of the one real model that tests use, which the extra `test` brings."""
    return names.resolve("smollm2")
