"""T(n): the time of one pass over n rows, beside the machine's floor for it and beside llama.cpp."""

from __future__ import annotations

import ctypes
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from pystaged._core import Model, Session, dot_rate, read_bandwidth
from pystaged.bench import conditions
from pystaged.bench.worker import Worker, WorkerError

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
CONTEXT_TOKENS = 256
BANDWIDTH_BYTES = 1 << 30
_SECONDS = 7200.0  # after which llama.cpp is taken to hang


@dataclass(frozen=True, slots=True)
class PassTime:
    """Medians over n rows; floor_ms: what no pass can be faster than, max(bytes / bandwidth, n * work / rate)."""

    n: int
    ms: float
    floor_ms: float
    llama_cpp_ms: float | None


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One run.

    llama_cpp: "measured", or why not. read_bandwidth: bytes per second that the threads read; dot_rate: int8
    multiply-adds per second that they do from registers. read_ms: time to read the weights once; row_ms: time for the
    multiply-adds of one row.
    """

    passes: list[PassTime]
    llama_cpp: str
    read_bandwidth: float
    dot_rate: float
    read_ms: float
    row_ms: float
    kernel: str
    threads: int
    model: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"machine": conditions.machine()}

    def table(self) -> Table:
        """For a terminal."""
        table = Table(title=f"{self.model}: kernel {self.kernel}, {self.threads} threads")
        for heading in ("n", "ms", "T(n)/T(1)", "of floor", "llama.cpp ms", "llama.cpp / ours"):
            table.add_column(heading, justify="right")
        one = self.passes[0].ms
        for each in self.passes:
            peer = each.llama_cpp_ms
            theirs = (f"{peer:.2f}", f"{peer / each.ms:.2f}") if peer else ("-", "-")
            table.add_row(
                str(each.n), f"{each.ms:.2f}", f"{each.ms / one:.2f}", f"{each.floor_ms / each.ms:.0%}", *theirs
            )
        peer_note = "" if self.llama_cpp == "measured" else f"; llama.cpp: {self.llama_cpp}"
        table.caption = (
            f"floor: {self.read_ms:.2f} ms to read the weights at {self.read_bandwidth / 1e9:.1f} GB/s, "
            f"{self.row_ms:.2f} ms for the products of a row at {self.dot_rate / 1e9:.0f} G/s; "
            f"T(1) is {one / self.read_ms:.2f} times the reading; "
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
    bandwidth, rate = statistics.median(bandwidths), dot_rate(kernel, model.num_threads)
    read_ms, row_ms = 1e3 * model.weight_bytes / bandwidth, 1e3 * model.num_weights / rate
    theirs: dict[int, float] = {}
    how = "not asked"
    if peer:
        setup = {"path": str(path), "rows": rows, "repeats": repeats, "context_tokens": context_tokens}
        theirs, how = _measure_llama_cpp(setup | {"threads": model.num_threads})
    passes = [
        PassTime(n, 1e3 * statistics.median(seconds), max(read_ms, n * row_ms), theirs.get(n))
        for n, seconds in times.items()
    ]
    return PassTimes(passes, how, bandwidth, rate, read_ms, row_ms, model.kernel, model.num_threads, path.name)


def _time_pass(session: Session, tokens: NDArray[np.int32]) -> float:
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
    start = time.perf_counter()
    session.evaluate(tokens, parents)
    elapsed = time.perf_counter() - start
    session.discard()
    return elapsed


def _measure_llama_cpp(setup: dict[str, Any]) -> tuple[dict[int, float], str]:
    """The fastest of llama.cpp's buffer types that works here; some crash, so each runs in a process of its own."""
    results, failures = list[dict[int, float]](), list[str]()
    for extra_buffers in (True, False):
        worker = Worker(("", setup | {"runner": __name__, "extra_buffers": extra_buffers}))
        try:
            results.append(worker.run({}, _SECONDS))
        except WorkerError as error:
            failures.append(f"with{'' if extra_buffers else 'out'} extra buffers: {error}")
        worker.close()
    if not results:
        return {}, "; ".join(failures)
    return min(results, key=lambda times: times[setup["rows"][-1]]), "measured"


class Runner:
    """Times llama.cpp's passes, in a worker.

    Args:
        setup: path; rows to time; repeats of each; threads; context_tokens; extra_buffers: whether weights may be
            repacked.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup

    def run(self, _: dict[str, Any]) -> dict[int, float]:
        """Median milliseconds of one llama_decode over n rows of logits, by n."""
        setup = self._setup
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = setup["extra_buffers"]
        model = llama_cpp.llama_model_load_from_file(setup["path"].encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        # One row runs on n_threads, several on n_threads_batch.
        params.n_threads = params.n_threads_batch = setup["threads"]
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        memory = llama_cpp.llama_get_memory(context)
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        tokens = np.random.default_rng(0).integers(0, vocab_size, setup["context_tokens"])
        decode(context, tokens, 0)
        times: dict[int, list[float]] = {n: [] for n in setup["rows"]}
        for repeat in range(setup["repeats"] + 1):
            for n in setup["rows"]:
                start = time.perf_counter()
                decode(context, tokens[:n], len(tokens))
                elapsed = time.perf_counter() - start
                llama_cpp.llama_memory_seq_rm(memory, 0, len(tokens), -1)
                if repeat > 0:
                    times[n].append(elapsed)
        return {n: 1e3 * statistics.median(values) for n, values in times.items()}

    def close(self) -> None:
        pass


def decode(context: Any, tokens: Any, position: int) -> None:
    """One llama_decode of a chain of tokens from `position` on, with logits for all."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i] = int(token)
        batch.pos[i] = position + i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = 1
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama_decode returned {status}")
    # The logits are lazily computed where a device is asynchronous.
    ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.c_void_p)
