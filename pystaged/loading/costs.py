"""Measured seconds of forward passes, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import HiddenRows, Model, Session, Tokenizer, Work, run
from pystaged.backends.devices import open_session
from pystaged.config import SamplingConfig
from pystaged.decoding.cost import MEASURED_ROWS, PassCost, measure
from pystaged.decoding.experts import ExpertCost
from pystaged.files import cache_folder, keep, read_small

# Acceptance rates of first guesses, assumed until a drafter has been scored.
DRAFT_RATE, HEAD_RATE, NGRAM_RATE = 0.75, 0.6, 0.53
# Text of the passes that are timed.
_TEXT = (
    "The sky is blue because air scatters blue light more than red light. In the evening the light comes a longer way "
    "through the air, so that more of the blue is lost, and what is left is red. On the Moon, which has no air, the "
    "sky is black even when the Sun shines. Question: What would the sky look like if the air were much thicker?"
)
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 600.0  # limits of a pass on any machine
_LEAST_RISE = 0.5  # more rows never cost less, but corrections while running are noisy
_MOST_RISE = 1.25  # times as many one-row passes; more means that another program disturbed the measurement
_MOST_SLOPE = 100.0  # most that 1000 past tokens add, in passes with no past
_MOST_BYTES = 1 << 16
_CELLS = 2048  # past length, in tokens, at which passes are timed
_EXPERT_ROWS, _EXPERT_ROUNDS = (2, 4, 8), 5  # of passes that tell the price of an expert
_LEAST_CELLS = 256  # a shorter past adds less than the noise


def measure_passes(model: Model, text: NDArray[np.int32]) -> PassCost:
    """Time a model's passes with an empty and with a long past, including candidate selection.

    Args:
        text: tokens of the rows, int32[n], repeated if there are more rows. Of a mixture of experts, neighbours in a
            text have some experts in common.
    """
    greedy = SamplingConfig().native
    most_rows = min(MEASURED_ROWS[-1], model.max_context)
    room = model.max_context - most_rows
    cells = min(_CELLS, room) if room >= _LEAST_CELLS else 0
    sessions: dict[int, Session] = {}

    tokens = np.resize(text, most_rows)

    def run(num_rows: int, cells: int) -> None:
        session = sessions[cells]
        session.evaluate(tokens[:num_rows], np.arange(-1, num_rows - 1, dtype=np.int32))
        session.candidates([num_rows - 1], 1, greedy)
        session.discard()

    try:
        for length in {0, cells}:
            sessions[length] = open_session(model, length + most_rows)
            if length:
                # A real prefill of this many tokens would take longer than all else.
                sessions[length].prefill([0])
                sessions[length].stretch(length)
        clock = time.perf_counter if model.devices else time.thread_time
        cost = measure(run, most_rows=most_rows, cells=cells, clock=clock)
        return _measure_experts(cost, sessions[0], tokens) if model.experts_per_row else cost
    finally:
        for session in sessions.values():
            session.close()


def _measure_experts(cost: PassCost, session: Session, tokens: NDArray[np.int32]) -> ExpertCost:
    """Time passes over rows of a text beside ones over as many equal rows, which use the experts of one row."""

    def used(rows: NDArray[np.int32], equal: bool) -> tuple[int, float]:
        parents = np.full(len(rows), -1) if equal else np.arange(-1, len(rows) - 1)
        begin = time.thread_time()
        session.evaluate(rows, parents.astype(np.int32))
        took = time.thread_time() - begin
        distinct = session.experts[1]
        session.discard()
        return distinct, took

    seconds = cost.seconds
    unions = {n: used(tokens[:n], equal=False)[0] for n in seconds}
    experts, took = 0, 0.0
    for n in _EXPERT_ROWS:
        if n in seconds:
            pairs = [(used(tokens[:n], False), used(tokens[:1].repeat(n), True)) for _ in range(_EXPERT_ROUNDS)]
            experts += pairs[0][0][0] - pairs[0][1][0]
            took += median(text[1] - equal[1] for text, equal in pairs)
    price = min(max(0.0, took / experts), seconds[1] / unions[1]) if experts > 0 else 0.0
    return ExpertCost(seconds, cost.slopes, price, unions)


def _measure_features(draft: Model, target: Model) -> PassCost:
    """As measure_passes, for a draft that reads a target's hidden states: blocks, or rows that read the draft's own."""
    greedy, chain = SamplingConfig().native, range(-1, MEASURED_ROWS[-1] - 1)
    cells = min(_CELLS, target.max_context - MEASURED_ROWS[-1])
    cells = cells if cells >= _LEAST_CELLS else 0
    sources: list[Session] = []
    sessions: dict[int, Session] = {}
    hidden: HiddenRows | None = None

    def pass_over(session: Session, n: int, hidden: HiddenRows | None) -> None:
        tokens = np.zeros(n, np.int32)
        run([Work.propose(session, tokens, chain[:n], n, 1, greedy, hidden=hidden)])

    try:
        for length in {0, cells}:
            sources.append(source := open_session(target, max(1, length)))
            source.prefill([0])
            session = sessions[length] = Session(draft, length + MEASURED_ROWS[-1], source)
            if not draft.block_size:
                pass_over(session, 1, source.hidden)
                hidden = session.hidden_of([0])
                session.discard()
            if length and draft.borrows_cells:
                source.stretch(length)
            elif length:
                run([Work.read(session, [0], source.hidden)])
                session.stretch(length)
        rows = {n: sum([hidden] * (n - 1), hidden) if hidden else None for n in MEASURED_ROWS}

        def timed(num_rows: int, cells: int) -> None:
            pass_over(sessions[cells], num_rows, rows[num_rows])
            sessions[cells].discard()

        return measure(timed, cells=cells)
    finally:
        for session in (*sources, *sessions.values()):
            session.close()


class Costs:
    """Seconds of models' passes: measured or loaded, corrected while running, and saved.

    Args:
        report: called with a line before each measurement.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._store = CostStore()
        self._known: dict[tuple[Path, str, bool], tuple[str, PassCost]] = {}  # with their keys in the store

    def of(
        self, path: Path, device: str, model: Model, target: Model | None = None, *, again: bool = False
    ) -> PassCost:
        """Seconds of a pass of a model on a device.

        Args:
            target: of a draft that reads its hidden states.
            again: measure even if the cost is known.
        """
        # The file may have vanished or changed since its model was loaded.
        place = path, device, target is None  # a file may hold a model and its draft
        if place in self._known and not again:
            return self._known[place][1]
        info = path.stat()
        # "processor" keeps out files of earlier releases, which hold wall time.
        machine = ("processor", platform.node(), platform.machine(), os.cpu_count(), device)
        runs = (model.kernel, model.num_threads, model.kv)
        lent = (target.name, target.weight_bytes) if target else ()  # the draft may use the target's head
        key = "|".join(map(str, (*machine, *runs, *lent, path, info.st_size, info.st_mtime_ns)))
        cost = None if again else self._store.load(key)
        if cost is None or isinstance(cost, ExpertCost) != bool(model.experts_per_row and not target):
            is_ahead = target is not None and model.architecture == target.architecture
            what = f"the MTP layer in {path.name}" if is_ahead else path.name
            self._report(f"measuring passes of {what} on {device}")
            if target:
                cost = _measure_features(model, target)
            else:
                cost = measure_passes(model, Tokenizer(os.fsencode(path)).encode(_TEXT))
            self._store.save(key, cost)
        self._known[place] = key, cost
        return cost

    def save(self) -> None:
        """Save the costs with their corrections."""
        for key, cost in self._known.values():
            self._store.save(key, cost)


class CostStore:
    """Measured costs in the user's cache folder, by machine, model, kernel and threads.

    Args:
        folder: where to keep them; the user's cache folder by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder() / "costs"

    def load(self, key: str) -> PassCost | None:
        """The costs stored under a key; None where there are none or the file is unusable."""
        try:
            stored = json.loads(read_small(self._path(key), _MOST_BYTES))
            seconds, slopes, unions = (
                {int(n): float(value) for n, value in stored.get(name, {}).items()}
                for name in ("seconds", "slopes", "unions")
            )
            price = float(stored.get("price", 0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None
        if stored.get("key") != key or not _is_believable(seconds, slopes):
            return None
        if "unions" not in stored:
            return PassCost(seconds, slopes)
        if unions.keys() != seconds.keys() or not all(0 < union < math.inf for union in unions.values()):
            return None
        if not 0 <= price * unions[1] <= seconds[1]:
            return None
        return ExpertCost(seconds, slopes, price, unions)

    def save(self, key: str, cost: PassCost) -> None:
        """Save a measurement; if writing fails, passes are measured again next time."""
        known: dict[str, Any] = {"key": key, "seconds": cost.seconds, "slopes": cost.slopes}
        if isinstance(cost, ExpertCost):
            known |= {"unions": cost.unions, "price": cost.price}
        keep(self._path(key), json.dumps(known).encode())

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        return self._folder / f"{name}.json"


def _is_believable(seconds: dict[int, float], slopes: dict[int, float]) -> bool:
    """Whether seconds by number of rows, and seconds added by 1000 past tokens, are plausible."""
    return (
        1 in seconds
        and seconds.keys() <= set(MEASURED_ROWS)
        and seconds.keys() == slopes.keys()
        and all(0 <= slopes[n] <= _MOST_SLOPE * seconds[n] for n in slopes)
        and _rises_believably(seconds)
        and _rises_believably({n: seconds[n] + slopes[n] for n in seconds})
    )


def _rises_believably(seconds: dict[int, float]) -> bool:
    values = [seconds[n] for n in sorted(seconds)]
    return all(
        _LEAST_SECONDS <= value <= min(_MOST_SECONDS, n * seconds[1] * _MOST_RISE) for n, value in seconds.items()
    ) and all(more >= _LEAST_RISE * fewer for fewer, more in itertools.pairwise(values))
