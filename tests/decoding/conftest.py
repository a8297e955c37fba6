"""The small model that most tests of texts decode with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def path(random_gguf: Callable[..., Path]) -> Path:
    return random_gguf(context=512)
