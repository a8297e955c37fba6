"""Files that tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from pystaged.loading import names

DATA = Path(__file__).parents[1] / "data"


def smollm2() -> Path:
    """The file of the one real model that tests use; where it is not installed, the test that asks is skipped."""
    try:
        return names.resolve("smollm2")
    except FileNotFoundError:
        pytest.skip("SmolLM2 is not installed")
