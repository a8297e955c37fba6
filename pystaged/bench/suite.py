"""Runs contenders over prompts in turn, A B C A B C, so that a drift of the machine falls on all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged.bench.contenders import Contender
from pystaged.bench.worker import Measurement, Worker, WorkerError
from pystaged.config import SamplingConfig

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt continued once by one contender."""

    contender: str
    sampling: str
    prompt: int
    measurement: Measurement

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = {"contender": self.contender, "sampling": self.sampling, "prompt": self.prompt}
        return names | asdict(self.measurement)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A text and its tokens, int32[n]."""

    text: str
    tokens: NDArray[np.int32]


@dataclass(slots=True)
class Outcome:
    """What was measured so far.

    notes: by contender, what went wrong or differs. memory: by contender, most bytes of a process that ran it alone.
    complete: False when interrupted.
    """

    runs: list[Run] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = False


class Suite:
    """A benchmark that may be interrupted: what was measured by then stands in `outcome`.

    Args:
        contenders: the first one is plain decoding.
        prompts: what ours continue. peer_prompts: indices of those that the peers continue too.
        samplings: by name.
        max_tokens: new tokens per prompt.
        repeats: of everything.
        progress: called with the seconds passed and the seconds left, as far as can be told.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        prompts: Sequence[Prompt],
        peer_prompts: Sequence[int],
        samplings: dict[str, SamplingConfig],
        max_tokens: int,
        repeats: int,
        progress: Callable[[str, float, float], None],
    ) -> None:
        self.outcome = Outcome(notes={each.key: [each.missing] if each.missing else [] for each in contenders})
        self._contenders = {each.key: each for each in contenders if not each.missing}
        self._workers = {each.worker: Worker(*each.setups) for each in self._contenders.values()}
        self._prompts = prompts
        self._samplings = samplings
        self._max_tokens = max_tokens
        self._progress = progress
        self._limit = 300.0 + 10.0 * max_tokens  # seconds after which a worker is taken to hang
        self._took: dict[str, list[float]] = {}
        self._scripts: dict[tuple[str, int], list[int]] = {}
        self._jobs = list(self._plan(repeats, set(peer_prompts)))

    def run(self) -> Outcome:
        """Measure everything, or until Ctrl-C."""
        begin, at_once = time.monotonic(), True
        try:
            for key in list(self._contenders):
                self._progress(f"warming up {key}", time.monotonic() - begin, 0.0)
                self._guarded(self._warm_up, self._contenders[key])
            for done, (sampling, prompt, key) in enumerate(self._jobs):
                if key in self._contenders:
                    self._progress(f"{sampling}: {key}", time.monotonic() - begin, self._left(done))
                    self._guarded(self._measure, self._contenders[key], sampling, prompt)
            self.outcome.complete, at_once = True, False
        except KeyboardInterrupt:
            pass  # whoever waits for a job to end presses Ctrl-C again, and loses the report
        finally:
            self.outcome.seconds = time.monotonic() - begin
            for worker in self._workers.values():
                worker.close(at_once=at_once)
        for key, contender in self._contenders.items():
            self.outcome.notes[key] += self._workers[contender.worker].notes
        return self.outcome

    def _plan(self, repeats: int, peer_prompts: set[int]) -> Iterator[tuple[str, int, str]]:
        """Sampling, prompt and contender of each job."""
        keys = list(self._contenders)
        scripted = any(each.way == "synthetic" for each in self._contenders.values())
        for sampling in self._samplings:
            for turn, prompt in enumerate(repeats * list(range(len(self._prompts)))):
                # Rotated, so that no one always follows the same one; but a script must be there to be followed.
                first = 0 if scripted else turn % len(keys)
                for key in keys[first:] + keys[:first]:
                    if not self._contenders[key].is_peer or prompt in peer_prompts:
                        yield sampling, prompt, key

    def _guarded(self, work: Callable[..., None], contender: Contender, *args: object) -> None:
        """A contender that fails takes part no more."""
        try:
            work(contender, *args)
        except WorkerError as error:
            self.outcome.notes[contender.key].append(str(error))
            del self._contenders[contender.key]

    def _warm_up(self, contender: Contender) -> None:
        job = self._job(contender, next(iter(self._samplings)), 0)
        job |= {"max_tokens": _WARM_UP_TOKENS, "script": [0] * _WARM_UP_TOKENS}
        # Ours share a process for the run, so their memory is told from processes of their own.
        worker = self._workers[contender.worker] if contender.is_peer else Worker(*contender.setups)
        try:
            found: Measurement = worker.run(job, self._limit)
        finally:
            if not contender.is_peer:
                worker.close()
        self.outcome.memory[contender.key] = found.peak_bytes
        seconds = found.first_token_seconds + found.seconds / found.counted * self._max_tokens
        self._took[contender.key] = [seconds]

    def _measure(self, contender: Contender, sampling: str, prompt: int) -> None:
        begin = time.monotonic()
        found: Measurement = self._workers[contender.worker].run(self._job(contender, sampling, prompt), self._limit)
        self._took[contender.key].append(time.monotonic() - begin)
        if contender.way == "plain" and not contender.is_peer:
            self._scripts[sampling, prompt] = found.tokens
        self.outcome.runs.append(Run(contender.key, sampling, prompt, found))
        if contender.is_peer:
            self.outcome.memory[contender.key] = found.peak_bytes

    def _job(self, contender: Contender, sampling: str, prompt: int) -> dict[str, Any]:
        return {
            "way": contender.way,
            "text": self._prompts[prompt].text,
            "prompt": self._prompts[prompt].tokens.tolist(),
            "sampling": self._samplings[sampling],
            "max_tokens": self._max_tokens,
            "script": self._scripts.get((sampling, prompt), []),
        }

    def _left(self, done: int) -> float:
        means = {key: statistics.fmean(seconds[-10:]) for key, seconds in self._took.items()}
        return sum(means.get(key, 0.0) for _, _, key in self._jobs[done:] if key in self._contenders)
