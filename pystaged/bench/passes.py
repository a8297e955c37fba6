"""T(n): the time of one pass over n rows, beside the machine's floor for it and beside llama.cpp."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from pystaged._core import Model, Session, dot_rate, read_bandwidth
from pystaged.bench import machine

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
CONTEXT_TOKENS = 256
BANDWIDTH_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Medians of one run.

    milliseconds: per number of rows; llama_cpp: the same through llama-cpp-python, or why there is none.
    bandwidth: bytes per second that the threads read; rate: int8 multiply-adds per second that they do from registers.
    read_ms: time to read the weights once; row_ms: time for the multiply-adds of one row.
    """

    milliseconds: dict[int, float]
    llama_cpp: dict[int, float] | str
    bandwidth: float
    rate: float
    read_ms: float
    row_ms: float
    kernel: str
    threads: int
    model: str

    def floor_ms(self, n: int) -> float:
        """What no pass over n rows can be faster than: max(bytes / bandwidth, n * work / rate)."""
        return max(self.read_ms, n * self.row_ms)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.llama_cpp if isinstance(self.llama_cpp, dict) else {}
        return {
            "passes": [
                {"n": n, "ms": ms, "floor_ms": self.floor_ms(n), "llama_cpp_ms": found.get(n)}
                for n, ms in self.milliseconds.items()
            ],
            "llama_cpp": "measured" if found else self.llama_cpp,
            "read_bandwidth": self.bandwidth,
            "dot_rate": self.rate,
            "read_ms": self.read_ms,
            "row_ms": self.row_ms,
            "kernel": self.kernel,
            "threads": self.threads,
            "model": self.model,
            "machine": machine.describe(),
        }

    def table(self) -> Table:
        """For a terminal."""
        found = self.llama_cpp if isinstance(self.llama_cpp, dict) else {}
        table = Table(title=f"{self.model}: kernel {self.kernel}, {self.threads} threads")
        for heading in ("n", "ms", "T(n)/T(1)", "of floor", "llama.cpp ms", "llama.cpp / ours"):
            table.add_column(heading, justify="right")
        for n, ms in self.milliseconds.items():
            peer = found.get(n)
            table.add_row(
                str(n),
                f"{ms:.2f}",
                f"{ms / self.milliseconds[1]:.2f}",
                f"{self.floor_ms(n) / ms:.0%}",
                f"{peer:.2f}" if peer else "-",
                f"{peer / ms:.2f}" if peer else "-",
            )
        peer_note = "" if found else f"; llama.cpp: {self.llama_cpp}"
        table.caption = (
            f"floor: {self.read_ms:.2f} ms to read the weights at {self.bandwidth / 1e9:.1f} GB/s, "
            f"{self.row_ms:.2f} ms for the products of a row at {self.rate / 1e9:.0f} G/s; "
            f"T(1) is {self.milliseconds[1] / self.read_ms:.2f} times the reading; "
            f"{CONTEXT_TOKENS} tokens of context, all logits, medians{peer_note}"
        )
        return table


def measure(path: Path, *, repeats: int, kernel: str = "", num_threads: int = 0, peer: bool = True) -> PassTimes:
    """Measure one model, its passes in turn so that a drift of the machine falls on all row counts alike.

    Args:
        path: GGUF file.
        repeats: timed passes per row count.
        kernel: "" for the best. num_threads: 0 for one per physical core.
        peer: also measure llama.cpp, in a process of its own.

    Raises:
        ModelError: the file cannot be loaded.
    """
    model = Model(str(path), kernel, num_threads)
    session = Session(model)
    context_tokens = min(CONTEXT_TOKENS, session.n_ctx // 2)
    rows = [n for n in ROWS if context_tokens + n <= session.n_ctx]
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, context_tokens, dtype=np.int32)
    session.prefill(tokens)
    bandwidths = [read_bandwidth(BANDWIDTH_BYTES, model.num_threads)]
    times: dict[int, list[float]] = {n: [] for n in rows}
    for n in rows:
        _time_pass(session, tokens[:n])
    for _ in range(repeats):
        for n in rows:
            times[n].append(_time_pass(session, tokens[:n]))
    bandwidths.append(read_bandwidth(BANDWIDTH_BYTES, model.num_threads))
    session.close()
    bandwidth = statistics.median(bandwidths)
    rate = dot_rate(kernel, model.num_threads)
    return PassTimes(
        milliseconds={n: 1e3 * statistics.median(ms) for n, ms in times.items()},
        llama_cpp=_measure_llama_cpp(path, rows, repeats, model.num_threads, context_tokens) if peer else "not asked",
        bandwidth=bandwidth,
        rate=rate,
        read_ms=1e3 * model.weight_bytes / bandwidth,
        row_ms=1e3 * model.num_weights / rate,
        kernel=model.kernel,
        threads=model.num_threads,
        model=path.name,
    )


def _time_pass(session: Session, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> float:
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
    start = time.perf_counter()
    session.evaluate(tokens, parents)
    elapsed = time.perf_counter() - start
    session.discard()
    return elapsed


def _measure_llama_cpp(
    path: Path, rows: list[int], repeats: int, num_threads: int, context_tokens: int
) -> dict[int, float] | str:
    """The fastest of llama.cpp's buffer types that works here; some crash, so each runs in a process of its own."""
    results, failures = [], []
    for extra_buffers in (True, False):
        job = {
            "path": str(path),
            "rows": rows,
            "repeats": repeats,
            "threads": num_threads,
            "context_tokens": context_tokens,
            "extra_buffers": extra_buffers,
        }
        done = subprocess.run(
            [sys.executable, "-m", "pystaged.bench.llama_passes"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            results.append({int(n): ms for n, ms in json.loads(done.stdout).items()})
        else:
            failures.append(f"with{'' if extra_buffers else 'out'} extra buffers it ended with {done.returncode}")
    return min(results, key=lambda times: times[rows[-1]]) if results else "; ".join(failures)
