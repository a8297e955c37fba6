"""Run all methods on one prompt after the other, so that changes in the machine's speed affect all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pystaged.bench.conditions import others
from pystaged.bench.methods import Method
from pystaged.bench.prompts import Prompt
from pystaged.bench.worker import Measurement, Worker, WorkerError, tokens_per_second
from pystaged.options.config import SamplingConfig

SAMPLINGS = {"greedy": SamplingConfig(), "T=1 top-k 50": SamplingConfig(temperature=1.0, top_k=50)}
# The hardest sampling for drafts; also applied to the misleading prompts.
HOT = {"T=1.5": SamplingConfig(temperature=1.5)}
_WARM_UP_TOKENS = 8
_PAUSE = 0.3  # seconds before a text, since threads of a server run on for a moment after its last one
_TRIED = 2  # prompts after which a slow baseline may be stopped
_TOO_SLOW = 3  # times slower than the fastest baseline


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt continued once by one method. others: see conditions.others, before it; is_repeat: it shows how steady
    a baseline is, and is in no table."""

    method: str
    sampling: str
    prompt: int
    category: str
    is_misleading: bool
    measurement: Measurement
    others: float = 0.0
    is_repeat: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = asdict(self)
        return {**fields, **fields.pop("measurement")}


@dataclass(slots=True)
class Outcome:
    """The measurements so far.

    notes: by method, its settings and failures. memory: by method, peak bytes of a process that ran only this method.
    complete: False if interrupted.
    """

    runs: list[Run] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    sampling: str
    prompt: int
    key: str
    is_repeat: bool = False


class Suite:
    """A benchmark that can be interrupted; its measurements so far are in `outcome`.

    Args:
        methods: the first one is plain decoding.
        prompts: what all methods continue, one after the other while there is time, and the first in any case.
        misleading: what pystaged's plain and staged decoding continue in addition.
        max_tokens: most new tokens of a prompt; a text may end before.
        seconds: limit for everything.
        progress: called with the current work, the seconds passed, and the seconds left, as estimated.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        prompts: Sequence[Prompt],
        misleading: Sequence[Prompt],
        max_tokens: int,
        seconds: float,
        progress: Callable[[str, float, float], None],
    ) -> None:
        self.outcome = Outcome(notes={each.key: [] for each in methods})
        self._methods = {each.key: each for each in methods}
        self._workers = {each.worker: Worker(*each.setups) for each in self._methods.values()}
        self._num_prompts = len(prompts)
        self._prompts = [*prompts, *misleading]
        self._max_tokens = max_tokens
        self._seconds = seconds
        self._progress = progress
        self._begin = 0.0
        self._limit = 300.0 + 10.0 * max_tokens  # seconds after which a worker counts as hung
        self._took: dict[str, list[float]] = {}

    def run(self) -> Outcome:
        """Measure until there is no time for another prompt, or until Ctrl-C."""
        self._begin, at_once = time.monotonic(), True
        usual = [self._jobs(prompt) for prompt in range(self._num_prompts)]
        first = next(iter(self._methods))
        baselines = {first, *(key for key, each in self._methods.items() if each.is_baseline)}
        last = [replace(job, is_repeat=True) for job in usual[0] if job.key in baselines]
        last += [job for prompt in range(self._num_prompts, len(self._prompts)) for job in self._jobs(prompt)]
        try:
            for key in list(self._methods):
                self._progress(f"warming up {key}", self._passed, 0.0)
                self._guarded(self._warm_up, _Job(next(iter(SAMPLINGS)), 0, key))
            for prompt, jobs in enumerate(usual):
                if prompt and self._passed + self._expected(jobs + last) > self._seconds:
                    break
                self._run_jobs(jobs, last + [job for later in usual[prompt + 1 :] for job in later])
                if prompt + 1 == _TRIED < len(usual):
                    self._drop_slow_baselines()
            self._run_jobs(last, [])
            self.outcome.complete, at_once = True, False
        except KeyboardInterrupt:
            pass  # a second Ctrl-C, while a job ends, loses the report
        finally:
            self.outcome.seconds = self._passed
            for worker in self._workers.values():
                worker.close(at_once=at_once)
        for key in list(self._methods):
            self._drop(key)
        return self.outcome

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._begin

    def _run_jobs(self, jobs: Sequence[_Job], later: Sequence[_Job]) -> None:
        for done, job in enumerate(jobs):
            if job.key in self._methods:
                now = self._expected(jobs[done:])
                left = now + min(self._expected(later), max(self._seconds - self._passed - now, 0.0))
                self._progress(f"{job.sampling}: {job.key}", self._passed, left)
                self._guarded(self._measure, job)

    def _jobs(self, prompt: int) -> list[_Job]:
        """All jobs of a prompt."""
        is_misleading = prompt >= self._num_prompts
        keys = [key for key, each in self._methods.items() if each.meets_misleading or not is_misleading]
        random.Random(prompt).shuffle(keys)  # so that no method always follows the same one
        return [
            _Job(sampling, prompt, key)
            for sampling in (SAMPLINGS | HOT if is_misleading else SAMPLINGS)
            for key in keys
        ]

    def _guarded(self, work: Callable[[_Job], None], job: _Job) -> None:
        """Run a job; a method that fails is not run again."""
        try:
            work(job)
        except WorkerError as error:
            self._drop(job.key, str(error))

    def _drop(self, key: str, *why: str) -> None:
        """Stop a method, and note why."""
        worker = self._methods.pop(key).worker
        self.outcome.notes[key] += [*self._workers[worker].notes, *why]
        if all(each.worker != worker for each in self._methods.values()):
            self._workers[worker].close()  # the others may need its memory

    def _drop_slow_baselines(self) -> None:
        """Stop baselines that are far slower than the fastest one, to save time for the others."""
        measured: dict[str, list[Measurement]] = {key: [] for key, each in self._methods.items() if each.is_baseline}
        for run in self.outcome.runs:
            if run.method in measured and run.measurement.is_timed:
                measured[run.method].append(run.measurement)
        speeds = {key: tokens_per_second(runs) for key, runs in measured.items()}
        for key, speed in speeds.items():
            if 0 < speed * _TOO_SLOW < max(speeds.values()):
                self._drop(key, f"took part in {_TRIED} prompts: another baseline is over {_TOO_SLOW} times as fast")

    def _warm_up(self, job: _Job) -> None:
        method, task = self._methods[job.key], self._task(job)
        task["max_tokens"] = _WARM_UP_TOKENS
        if not method.is_baseline:  # these share a process, so their memory is measured in a separate one
            alone = Worker(*((note, setup | {"warm": []}) for note, setup in method.setups))
            try:
                found: Measurement = alone.run(task, self._limit)
            finally:
                alone.close()
            self.outcome.memory[job.key] = found.peak_bytes
        limit = self._limit * (1 + len(method.setups[0][1].get("warm", [])))
        found = self._workers[method.worker].run(task, limit)
        self.outcome.memory.setdefault(job.key, found.peak_bytes)
        seconds = found.first_token_seconds + found.seconds / max(found.counted, 1) * self._max_tokens
        self._took[job.key] = [seconds]

    def _measure(self, job: _Job) -> None:
        time.sleep(_PAUSE)
        method, running, begin = self._methods[job.key], others(), time.monotonic()
        found: Measurement = self._workers[method.worker].run(self._task(job), self._limit)
        self._took[job.key].append(time.monotonic() - begin)
        category, is_misleading = self._prompts[job.prompt].category, job.prompt >= self._num_prompts
        what = job.key, job.sampling, job.prompt, category, is_misleading
        self.outcome.runs.append(Run(*what, found, running, job.is_repeat))
        if method.is_baseline:
            self.outcome.memory[job.key] = found.peak_bytes

    def _task(self, job: _Job) -> dict[str, Any]:
        return {
            "way": self._methods[job.key].way,
            "prompt": self._prompts[job.prompt].tokens.tolist(),
            "sampling": (SAMPLINGS | HOT)[job.sampling],
            "max_tokens": self._max_tokens,
        }

    def _expected(self, jobs: Sequence[_Job]) -> float:
        """Seconds that jobs will take, estimated from earlier ones."""
        means = {key: statistics.fmean(seconds[-10:]) for key, seconds in self._took.items()}
        return sum(means.get(job.key, 0.0) for job in jobs if job.key in self._methods)
