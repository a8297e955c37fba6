"""What passes cost on this machine: measured when a model is first used, kept in a file, refined while running."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs

from pystaged.files import whole_file

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LARGEST = MEASURED_ROWS[-1]
_BUDGET = 0.8  # seconds for one model
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 15
_BLEND = 0.05  # weight of a new observation


class PassCost:
    """T(n) of one model: seconds for a pass over n rows.

    Args:
        seconds: by number of rows, at least for one row.
    """

    def __init__(self, seconds: dict[int, float]) -> None:
        rows = sorted(seconds)
        self.measured = {n: seconds[n] for n in rows}
        self._curve = [0.0] + [_interpolate(rows, seconds, n) for n in range(1, _LARGEST + 1)]
        # Fewer rows never cost more: what says so is noise, and noise only ever adds.
        for n in range(_LARGEST - 1, 0, -1):
            self._curve[n] = min(self._curve[n], self._curve[n + 1])
        self._slope = max(0.0, (self._curve[-1] - self._curve[_LARGEST // 2]) / (_LARGEST - _LARGEST // 2))
        self.scale = 1.0

    def __call__(self, num_rows: int) -> float:
        """Seconds for a pass over that many rows, as things go now."""
        if num_rows <= _LARGEST:
            return self.scale * self._curve[num_rows]
        return self.scale * (self._curve[-1] + (num_rows - _LARGEST) * self._slope)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a pass that was made anyway: contexts grow and machines get busy."""
        ratio = seconds / self(num_rows) if num_rows > 0 else 1.0
        # One pass that the scheduler interrupted must not count for a hundred.
        self.scale *= 1 + _BLEND * (min(max(ratio, 0.5), 2.0) - 1)


def measure(run_pass: Callable[[int], None], *, most_rows: int = _LARGEST) -> PassCost:
    """Time passes of 1 to `most_rows` rows, in turn, for less than a second.

    Args:
        run_pass: makes a pass over that many rows.
    """
    rows = [n for n in MEASURED_ROWS if n <= most_rows]
    for n in rows:
        run_pass(n)
    times: dict[int, list[float]] = {n: [] for n in rows}
    begin = time.perf_counter()
    for done in range(_MOST_ROUNDS):
        if done >= _LEAST_ROUNDS and time.perf_counter() - begin > _BUDGET:
            break
        for n in rows:
            start = time.perf_counter()
            run_pass(n)
            times[n].append(time.perf_counter() - start)
    return PassCost({n: statistics.median(values) for n, values in times.items()})


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
                path.write_text(json.dumps({"key": key, "seconds": cost.measured}))
        except OSError:
            pass

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        return self._folder / f"{name}.json"


def _interpolate(rows: list[int], seconds: dict[int, float], n: int) -> float:
    above = next((m for m in rows if m >= n), rows[-1])
    below = max((m for m in rows if m <= n), default=rows[0])
    if above == below or n > rows[-1]:
        return seconds[above] * max(1.0, n / above)
    share = (n - below) / (above - below)
    return (1 - share) * seconds[below] + share * seconds[above]
