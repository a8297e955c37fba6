"""T(n): time of a pass over n rows, by past length, and of a prompt, with the machine's lower bound and llama.cpp's."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from pystaged._core import Model, Sampling, Session, Work, dot_rate, read_bandwidth, run
from pystaged.bench import conditions
from pystaged.bench.worker import Worker, WorkerError
from pystaged.decoding.cost import PassCost
from pystaged.loading.progress import Progress

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
CONTEXT_TOKENS = 256
BANDWIDTH_BYTES = 1 << 30
_BASELINE_PIECE = 512  # tokens in a prefill batch of llama.cpp
_SECONDS = 7200.0  # after which llama.cpp counts as hung


@dataclass(frozen=True, slots=True)
class PassTime:
    """Medians for n rows after `context` past tokens; after none, one run of a prompt of n tokens.

    floor_ms: max(bytes / bandwidth, n * work / rate). cost_ms: the processor time with which decoding reckons, None if
    not asked.

    Bytes are those of the weights and of the keys and values that a layer without a window reads. Work is that of the
    weights only.
    """

    context: int
    n: int
    ms: float
    floor_ms: float
    llama_cpp_ms: float | None
    cost_ms: float | None = None


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One run.

    llama_cpp: "measured", or why not. read_bandwidth: bytes per second that the threads read. dot_rate: int8
    multiply-adds per second from registers. read_ms: to read the weights once; cells_ms: to read the keys and values of
    1,000 tokens; row_ms: for the multiply-adds of one row.
    """

    passes: list[PassTime]
    llama_cpp: str
    read_bandwidth: float
    dot_rate: float
    read_ms: float
    cells_ms: float
    row_ms: float
    kernel: str
    threads: int
    model: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"machine": conditions.machine()}

    def table(self) -> Table:
        """The times as a table for terminals."""
        table = Table(title=f"{self.model}: kernel {self.kernel}, {self.threads} threads")
        for heading in ("context", "n", "ms", "T(n)/T(1)", "of floor", "cost ms", "llama.cpp ms", "llama.cpp / ours"):
            table.add_column(heading, justify="right")
        one = {each.context: each.ms for each in self.passes if each.n == 1}
        for each in self.passes:
            if each.n == 1:
                table.add_section()
            baseline = each.llama_cpp_ms
            theirs = (f"{baseline:.2f}", f"{baseline / each.ms:.2f}") if baseline else ("-", "-")
            relative = f"{each.ms / one[each.context]:.2f}" if each.context in one else "-"
            cost = "-" if each.cost_ms is None else f"{each.cost_ms:.2f}"
            ours = (f"{each.ms:.2f}", relative, f"{each.floor_ms / each.ms:.0%}", cost)
            table.add_row(f"{each.context:,}", f"{each.n:,}", *ours, *theirs)
        baseline_note = "" if self.llama_cpp == "measured" else f"; llama.cpp: {self.llama_cpp}"
        shortest = min(one)
        table.caption = (
            f"floor: {self.read_ms:.2f} ms to read the weights at {self.read_bandwidth / 1e9:.1f} GB/s, "
            f"{self.cells_ms:.2f} ms for the keys and values of 1,000 tokens; or {self.row_ms:.2f} ms for a row's "
            f"products at {self.dot_rate / 1e9:.0f} G/s, attention not counted; at {shortest:,} tokens of context T(1) "
            f"is {one[shortest] / self.read_ms:.2f} times the reading; all logits, medians; the "
            f"rows after no context are a prompt, read once, with the logits of its last; cost: processor time with "
            f"which drafting reckons, refined while texts are written; --again samples it anew{baseline_note}"
        )
        return table


def measure(
    path: Path,
    *,
    contexts: Sequence[int] = (),
    repeats: int,
    num_threads: int = 0,
    baseline: bool = True,
    cost: Callable[[Model], PassCost] | None = None,
    progress: Progress = lambda *_: None,
) -> PassTimes:
    """Measure one model; row counts take turns, so that changes in the machine's speed affect all alike.

    Args:
        path: GGUF file.
        contexts: past lengths in tokens; by default 256, or half of the model's trained context.
        repeats: timed passes for each row count and past length.
        num_threads: 0 for as many as the machine's cores allow.
        baseline: also measure llama.cpp, in its own process.
        cost: called with the loaded model for its costs, to show beside the times.
        progress: called with what is measured, the rounds done, and their number.

    Raises:
        ModelError: the file cannot be loaded.
        ValueError: a past length exceeds the model's context.
    """
    kernel, loading = os.environ.get("PYSTAGED_KERNEL", ""), f"loading {path.name}, and the machine's limits"
    progress(loading, 0, 1)
    model = Model(str(path), kernel, num_threads)
    lengths = sorted(set(contexts)) or [min(CONTEXT_TOKENS, model.max_context // 2)]
    if lengths[0] < 0 or lengths[-1] >= model.max_context:
        raise ValueError(
            f"{path.name} can be measured after 0 to {model.max_context - 1} tokens of context, "
            f"not {lengths[0] if lengths[0] < 0 else lengths[-1]}"
        )
    costs = cost(model) if cost else None
    session = Session(model, min(lengths[-1] + ROWS[-1], model.max_context))
    rows = {length: [n for n in ROWS if length + n <= session.n_ctx] for length in lengths}
    bandwidths = [read_bandwidth(BANDWIDTH_BYTES, model.num_threads)]
    tokens = _tokens(model.vocab_size, lengths[-1])
    _time_pass(session, tokens[:1])  # the first pass of a process reads the file
    progress(loading, 1, 1)

    def times(length: int) -> tuple[float, dict[int, float]]:
        start = time.perf_counter()
        if unread := length - len(session.tokens):
            run([Work.read(session, tokens[length - unread : length])])
        seconds = time.perf_counter() - start
        return seconds, {n: _time_pass(session, tokens[-n:]) for n in rows[length]}

    ours = _medians(lengths, repeats, times, partial(progress, f"passes of {path.name}"))
    bandwidths.append(read_bandwidth(BANDWIDTH_BYTES, model.num_threads))
    session.close()
    theirs: dict[tuple[int, int], float] = {}
    how = "not asked"
    if baseline:
        setup = {"path": str(path), "longest": lengths[-1], "threads": model.num_few_threads}
        theirs, how = _measure_llama_cpp(setup, rows, repeats, progress)
    bandwidth, rate = statistics.median(bandwidths), dot_rate(kernel, model.num_threads)
    read_ms, cells_ms = (1e3 * size / bandwidth for size in (model.weight_bytes, 1000 * model.cell_bytes))
    row_ms = 1e3 * model.num_weights / rate
    passes = [
        PassTime(
            context,
            n,
            ms,
            max(read_ms + cells_ms * context / 1000, n * row_ms),
            theirs.get((context, n)),
            1e3 * costs(n, context) if costs else None,
        )
        for (context, n), ms in ours.items()
    ]
    return PassTimes(
        passes, how, bandwidth, rate, read_ms, cells_ms, row_ms, model.kernel, model.num_threads, path.name
    )


def _tokens(vocab_size: int, length: int) -> NDArray[np.int32]:
    """Arbitrary tokens, for a past or for the rows of a pass."""
    return np.random.default_rng(0).integers(0, vocab_size, max(length, ROWS[-1]), dtype=np.int32)


def _medians(
    lengths: Collection[int],
    repeats: int,
    times: Callable[[int], tuple[float, dict[int, float]]],
    progress: Callable[[int, int], None],
) -> dict[tuple[int, int], float]:
    """Median milliseconds by past length and rows, without the first round of a length; and those of each length as a
    prompt, after 0 tokens.

    Args:
        times: makes a round behind that many tokens; returns the seconds that it read those, and seconds by rows.
    """
    order = [length for length in lengths for _ in range(repeats + 1)]
    rounds: dict[int, list[dict[int, float]]] = {length: [] for length in lengths}
    reading, prompts = 0.0, dict[tuple[int, int], float]()
    for done, length in enumerate(order):
        progress(done, len(order))
        seconds, found = times(length)
        if length and not rounds[length]:
            reading += seconds
            prompts[0, length] = 1e3 * reading
        rounds[length].append(found)
    progress(len(order), len(order))
    return prompts | {
        (length, n): 1e3 * statistics.median(each[n] for each in found[1:])
        for length, found in rounds.items()
        for n in found[0]
    }


def _time_pass(session: Session, tokens: NDArray[np.int32]) -> float:
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
    start = time.perf_counter()
    run([Work.propose(session, tokens, parents, len(tokens), 0, Sampling())])
    elapsed = time.perf_counter() - start
    session.discard()
    return elapsed


def _measure_llama_cpp(
    setup: dict[str, Any], rows: dict[int, list[int]], repeats: int, progress: Progress
) -> tuple[dict[tuple[int, int], float], str]:
    """Times with the fastest of llama.cpp's buffer types; some crash, so each runs in its own process."""
    if not util.find_spec("llama_cpp"):
        return {}, "llama-cpp-python is not installed"
    results, failures = list[dict[tuple[int, int], float]](), list[str]()
    for extra_buffers, weights in ((True, "repacked"), (False, "plain")):
        worker = Worker(("", setup | {"runner": __name__, "extra_buffers": extra_buffers}))

        def times(length: int, worker: Worker = worker) -> tuple[float, dict[int, float]]:
            found: tuple[float, dict[int, float]] = worker.run({"context": length, "rows": rows[length]}, _SECONDS)
            return found

        try:
            results.append(_medians(rows, repeats, times, partial(progress, f"llama.cpp, {weights} weights")))
        except WorkerError as error:
            failures.append(f"{weights} weights: {error}")
        worker.close()
    if not results:
        return {}, "; ".join(failures)
    return min(results, key=lambda times: times[max(times)]), "measured"


class Runner:
    """Times llama.cpp's passes, in a worker.

    Args:
        setup: path; longest: most past tokens; threads; extra_buffers: whether to repack weights.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        import llama_cpp  # noqa: PLC0415  wheels come without it

        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = setup["extra_buffers"]
        model = llama_cpp.llama_model_load_from_file(setup["path"].encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = setup["longest"] + _BASELINE_PIECE
        params.n_seq_max, params.kv_unified = 2, True
        params.n_batch = params.n_ubatch = _BASELINE_PIECE
        # llama.cpp uses n_threads for one row and n_threads_batch for several.
        params.n_threads = params.n_threads_batch = setup["threads"]
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._tokens, self._length = _tokens(vocab_size, setup["longest"]), 0
        self.run({"context": 0, "rows": [1]})  # the first pass of a process reads the file

    def run(self, job: dict[str, Any]) -> tuple[float, dict[int, float]]:
        """Seconds to read the past tokens, and of one llama_decode with logits for all n rows, by n.

        Args:
            job: context: past tokens, at least those of the last job; rows: each n.
        """
        import llama_cpp  # noqa: PLC0415

        memory, length, start = llama_cpp.llama_get_memory(self._context), job["context"], time.perf_counter()
        for first in range(self._length, length, _BASELINE_PIECE):
            decode(self._context, self._tokens[first : min(first + _BASELINE_PIECE, length)], first, judged=1)
        self._length, seconds = length, time.perf_counter() - start
        found: dict[int, float] = {}
        for n in job["rows"]:
            # In a copy of the sequence, which shares its past: recurrent states cannot be cut back.
            llama_cpp.llama_memory_seq_cp(memory, 0, 1, -1, -1)
            start = time.perf_counter()
            decode(self._context, self._tokens[-n:], length, sequence=1)
            found[n] = time.perf_counter() - start
            llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)
        return seconds, found

    def close(self) -> None:
        pass


def decode(context: Any, tokens: Any, position: int, judged: int | None = None, sequence: int = 0) -> None:
    """One llama_decode of a chain of tokens at `position`, with logits for the last `judged`, by default for all."""
    import llama_cpp  # noqa: PLC0415

    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i] = int(token)
        batch.pos[i] = position + i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = judged is None or i >= len(tokens) - judged
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama_decode returned {status}")
    # An asynchronous device computes logits only when they are read.
    ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.c_void_p)
