"""Costs of passes: measured when a model is first used, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import platformdirs

from pystaged._core import Model
from pystaged.backends.devices import open_session
from pystaged.config import SamplingConfig
from pystaged.decoding.cost import MEASURED_ROWS, PassCost, measure
from pystaged.files import whole_file


def measure_passes(model: Model) -> PassCost:
    """Time a model's passes, candidates included."""
    session = open_session(model)
    greedy = SamplingConfig().native

    def run(num_rows: int) -> None:
        session.evaluate(np.zeros(num_rows, np.int32), np.arange(-1, num_rows - 1, dtype=np.int32))
        session.candidates([num_rows - 1], 1, greedy)
        session.discard()

    try:
        return measure(run, most_rows=min(MEASURED_ROWS[-1], session.n_ctx))
    finally:
        session.close()


class CostStore:
    """Measured costs in the user's cache folder, by machine, model, kernel and threads.

    Args:
        folder: where to keep them; the user's cache folder by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(platformdirs.user_cache_dir("pystaged")) / "costs"

    def load(self, key: str) -> PassCost | None:
        """What was measured under a key; None where nothing was, or where the file cannot be used."""
        try:
            stored = json.loads(self._path(key).read_text())
            seconds = {int(n): float(value) for n, value in stored["seconds"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        usable = stored.get("key") == key and 1 in seconds and all(0 < value < 3600 for value in seconds.values())
        return PassCost(seconds) if usable else None

    def save(self, key: str, cost: PassCost) -> None:
        """Keep a measurement. Costs are a convenience: where they cannot be written they are measured again."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self._path(key)) as path:
                path.write_text(json.dumps({"key": key, "seconds": cost.seconds}))
        except OSError:
            pass

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        return self._folder / f"{name}.json"
