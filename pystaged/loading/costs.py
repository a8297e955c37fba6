"""Seconds of forward passes: sampled at loading or estimated, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Model, Session, Tokenizer
from pystaged.backends.devices import open_session
from pystaged.decoding.cost import MEASURED_ROWS, SAMPLING, PassCost, measure
from pystaged.decoding.requests import perform
from pystaged.options.config import SamplingConfig
from pystaged.platform.files import cache_folder, keep, kept
from pystaged.platform.seen import SeenModel

COMPARING = 2.0  # seconds of sampling a model on each of several devices
# Text of the passes that are timed.
_TEXT = "The sky is blue because air scatters blue light more than red, which is left when light comes a longer way."
_CELLS = 2048  # past length, in tokens, at which passes are timed
_LEAST_CELLS = 256  # a shorter past adds less than the noise


def measure_passes(model: Model, text: Sequence[int] | NDArray[np.int32], seconds: float = SAMPLING) -> PassCost:
    """Sample a model's passes with an empty and with a long past, including candidate selection.

    Args:
        text: tokens of the rows, repeated if there are more rows; neighbours in a text have some experts in common.
        seconds: time of sampling.
    """
    greedy = SamplingConfig().native
    most_rows = min(MEASURED_ROWS[-1], model.max_context)
    room = model.max_context - most_rows
    # llama.cpp would really read so many tokens.
    cells = min(_CELLS, room) if room >= _LEAST_CELLS and not model.devices else 0
    most_rows = min(most_rows, model.most_pending)
    sessions, tokens = dict[int, Session](), np.resize(text, most_rows)
    clock = time.perf_counter if model.devices else time.thread_time

    def timed(num_rows: int, cells: int) -> float:
        if cells not in sessions:
            sessions[cells] = open_session(model, cells + most_rows)
            if cells:
                # A real prefill of this many tokens would take longer than all else.
                perform(sessions[cells], "read", [0])
                sessions[cells].stretch(cells)
        parents, start = np.arange(-1, num_rows - 1, dtype=np.int32), clock()
        perform(sessions[cells], "propose", tokens[:num_rows], parents, num_rows, 1, greedy)
        took = clock() - start
        sessions[cells].discard()
        return took

    try:
        return measure(timed, most_rows=most_rows, cells=cells, seconds=seconds)
    finally:
        for session in sessions.values():
            session.close()


class Costs:
    """Seconds of models' passes: sampled or loaded, refined while running, and saved. report: called with a line before
    devices are compared."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._known: dict[tuple[Path, str, bool], tuple[str, PassCost]] = {}  # with their keys

    def of(
        self,
        path: Path,
        device: str,
        model: Model,
        *,
        like: PassCost | None = None,
        compared: bool = False,
        again: bool = False,
    ) -> PassCost:
        """Seconds of a pass of a model on a device: sampled now if they are not known, and refined by its user.

        Args:
            like: what to begin with instead, for a draft that reads hidden states.
            compared: whether devices are: passes of all sizes are sampled, for up to two seconds.
            again: sample so even if the cost is known.
        """
        # The file may have vanished or changed since its model was loaded.
        place = path, device, like is None  # a file may hold a model and its draft
        if place in self._known and not again:
            return self._known[place][1]
        machine = (platform.node(), platform.machine(), os.cpu_count(), device)
        runs = (model.kernel, model.num_threads, model.num_few_threads, model.kv)
        key = "|".join(map(str, (*machine, *runs, like is None, SeenModel.now(path).key)))
        cost = None if again else kept_cost(key)
        if like and not (cost and any(cost.samples.values())):
            cost = like
        elif cost is None or (compared and not all(cost.samples.values())):
            if compared:
                self._report(f"measuring once how fast {path.name} is on {device}")
            seconds = COMPARING if compared or again else SAMPLING
            cost = measure_passes(model, Tokenizer(os.fsencode(path)).encode(_TEXT), seconds)
            keep_cost(key, cost)
        self._known[place] = key, cost
        return cost

    def save(self) -> None:
        """Save the costs with their corrections."""
        for key, cost in self._known.values():
            keep_cost(key, cost)


def kept_cost(key: str) -> PassCost | None:
    """The measured costs of that key in the user's cache folder; None where there are none."""
    found = kept(_path(key))
    if found is None:
        return None
    stored = json.loads(found)
    names = "seconds", "slopes", "samples"
    return PassCost(*({int(n): value for n, value in stored.get(name, {}).items()} for name in names))


def keep_cost(key: str, cost: PassCost) -> None:
    """Keep a measurement there; if writing fails, passes are measured again next time."""
    known = {"seconds": cost.seconds, "slopes": cost.slopes, "samples": cost.samples}
    keep(_path(key), json.dumps(known).encode())


def _path(key: str) -> Path:
    name = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return cache_folder() / "costs" / f"{name}.json"
