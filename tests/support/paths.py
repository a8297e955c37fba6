"""Files that tests read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pystaged.loading import names

DATA = Path(__file__).parents[1] / "data"


def table(name: str) -> list[Any]:
    """Rows of a table, a line of JSON each."""
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]


def smollm2() -> Path:
    """The file of the one real model that tests use, which the extra `test` brings."""
    return names.resolve("smollm2")
