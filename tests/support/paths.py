"""Files that tests read."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
