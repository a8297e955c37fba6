"""Mixed work for hours: `python -m tests.soak --minutes 120`, in the folder of the source.

Texts of all samplings, alone and many at once, cancelled, read slowly, of given forms; engines that come and go, on
the CPU and by llama.cpp; children that quantize. Every minute it says what this process takes, and at the end whether
that stayed as it was: memory within 2 %, threads, descriptors and children as many as before, speed within 10 %, and,
on the CPU, one text always the same. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

TESTS = Path(__file__).parent
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from support.families import CASES  # noqa: E402
from support.random_models import write  # noqa: E402
from support.sampling import samplings  # noqa: E402

import pystaged  # noqa: E402
from pystaged import Engine  # noqa: E402
from pystaged.loading.quantize import quantize  # noqa: E402
from pystaged.platform.process import bound_heaps  # noqa: E402

MEMORY, SPEED = 0.02, 0.10  # what may change, as a share
WARM = 0.3  # of the time, in which caches fill
SETTLE_SECONDS = 10.0  # that threads have to end
KV_MEMORY = 48 << 20
WORDS = ["the", "tree", "then", "over", "and", "out", "or", "in", "of", "one", "two", "stone", "river", "house", "slow"]
PROMPTS = [" ".join(WORDS[(i * 7 + j * (i + 3)) % len(WORDS)] for j in range(4 + i)) for i in range(12)]
SAMPLINGS = [*samplings("soak").values()]
FORMS: list[dict[str, Any]] = [
    {"regex": r"(cat|dog)(, (cat|dog)){1,3}\."},
    {"json_schema": {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}},
    {"grammar": 'root ::= "yes" | item ("," item)*\nitem ::= [0-9]+'},
]
FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "gpt2")


class Sample(NamedTuple):
    """What the process takes at a moment. speed: tokens per second of processor time, of one text that is always the
    same."""

    rss: int
    threads: int
    descriptors: int
    children: int
    speed: float


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--every", type=float, default=60, metavar="SECONDS", help="between two lines (60)")
    parser.add_argument("--device", default="cpu", help="of the engine that stays (cpu)")
    given = parser.parse_args(arguments)
    bound_heaps()  # as a server does
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        samples = soak(Path(folder), 60 * given.minutes, given.every, given.device)
    problems = verdict(samples)
    say("; ".join(problems) if problems else "flat: memory, threads, descriptors, children and speed as at the start")
    return bool(problems)


def soak(folder: Path, seconds: float, every: float, device: str = "cpu") -> list[Sample]:
    """Work so long; samples by the way, and one when all is closed but the first engine."""
    begun, samples = time.monotonic(), list[Sample]()
    work = Work(folder, device)
    say("minute | rounds | tokens/s | MB | threads | descriptors | children | tokens/s of processor time")
    for num_rounds in itertools.count(1):
        work.round(num_rounds)
        now = time.monotonic() - begun
        if now >= every * (len(samples) + 1) or now >= seconds:
            samples.append(work.sample(samples[0] if samples else None))
            each = samples[-1]
            say(
                f"{now / 60:6.1f} | {num_rounds:6} | {work.tokens / now:8.0f} | {each.rss / 1e6:.1f} | {each.threads} |"
                f" {each.descriptors} | {each.children} | {each.speed:.0f}"
            )
        if now >= seconds:
            work.engine.close()
            return samples
    raise AssertionError


class Work:
    """What is done in each round, with one engine that stays."""

    def __init__(self, folder: Path, device: str) -> None:
        self.tokens = 0
        self.engine = pystaged.load("bundled", device=device, n_ctx=512, kv_memory=KV_MEMORY, report=lambda _: None)
        self._models = [write(folder / f"{name}.gguf", CASES[name]) for name in FAMILIES]
        self._process = psutil.Process()
        self._text = self._usual().text if device == "cpu" else None  # the same on no other device

    def round(self, number: int) -> None:
        engine, seed = self.engine, number % 20
        prompt, sampling = PROMPTS[number % len(PROMPTS)], SAMPLINGS[number % len(SAMPLINGS)]
        self._count(engine.generate(prompt, max_tokens=48, seed=seed, **sampling))
        self._count(*engine.generate(prompt, n=3, max_tokens=24, seed=seed, temperature=1.0))
        self._count(engine.generate("Name one: ", max_tokens=40, **FORMS[number % len(FORMS)]))
        self._cancelled(prompt, 1 + number % 5)
        asyncio.run(self._cancelled_later(prompt, number % 4))
        with ThreadPoolExecutor(4) as pool:
            slow = pool.submit(self._slowly, prompt)
            texts = pool.map(lambda each: engine.generate(each, max_tokens=16, seed=seed, **sampling), PROMPTS[:6])
            self._count(*texts)
            self.tokens += slow.result()
        with suppress(pystaged.ContextFullError, ValueError):
            engine.generate("tree " * 600)
        engine.score(prompt)
        self._engines(number)
        if number % 10 == 0:
            quantize(self._models[0], self._models[0].with_suffix(".q8"), "q8_0")

    def _usual(self) -> pystaged.GenerationResult:
        return self.engine.generate("the tree and the house", max_tokens=100, temperature=1.0, seed=3)

    def _count(self, *results: pystaged.GenerationResult) -> None:
        self.tokens += sum(len(result.tokens) for result in results)

    def _cancelled(self, prompt: str, pieces: int) -> None:
        with self.engine.stream(prompt, max_tokens=64) as stream:
            for _ in itertools.islice(stream, pieces):
                self.tokens += 1
        left = self.engine.stream(prompt, max_tokens=64)
        next(left)
        del left

    def _slowly(self, prompt: str) -> int:
        """Reads a text later than it is written; returns the number of its pieces."""
        with self.engine.stream(prompt, max_tokens=24) as stream:
            return sum(time.sleep(0.02) is None for _ in stream)

    async def _cancelled_later(self, prompt: str, pieces: int) -> None:
        stream = self.engine.astream(prompt, max_tokens=64)
        async with stream:
            async for _ in stream:
                pieces -= 1
                if pieces < 0:
                    break

    def _engines(self, number: int) -> None:
        """Two engines beside this one: on the CPU and by llama.cpp; one is closed, the other is let go."""
        model = self._models[number % len(self._models)]
        options: dict[str, Any] = {"n_ctx": 128, "report": lambda _: None}
        device = "ggml-cpu" if number % 2 else "cpu"
        with pystaged.load(model, device=device, weight_cache=device == "cpu", **options) as engine:
            self._count(engine.generate("the tree", max_tokens=16), *engine.generate(["a", "b"], max_tokens=8))
        other = Engine(self._models[(number + 1) % len(self._models)], recycle=False, **options)
        self._count(other.generate("the tree", max_tokens=8))

    def sample(self, first: Sample | None) -> Sample:
        """What there is when what ends by itself has ended."""
        cpu = time.process_time()
        result = self._usual()
        speed = len(result.tokens) / (time.process_time() - cpu)
        if self._text not in (result.text, None):
            raise AssertionError(f"{result.text!r}, where there was {self._text!r}")
        end = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < end and first and self._process.num_threads() > first.threads:
            time.sleep(0.05)
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        process = self._process
        counts = process.num_threads(), process.num_fds(), len(process.children(recursive=True))
        return Sample(process.memory_info().rss, *counts, speed)


def verdict(samples: Sequence[Sample]) -> list[str]:
    """What is not as it was, comparing the earlier with the later half of the samples after caches have filled."""
    rest = samples[int(WARM * len(samples)) :]
    if len(rest) < 2:
        return [f"{len(samples)} samples are too few"]
    early, late = rest[: len(rest) // 2], rest[len(rest) // 2 :]

    def change(value: Callable[[Sample], float]) -> float:
        return statistics.median(map(value, late)) / statistics.median(map(value, early)) - 1

    memory, speed = change(lambda each: each.rss), change(lambda each: each.speed)
    problems = [f"memory grew by {memory:.1%}"] if memory > MEMORY else []
    problems += [f"speed fell by {-speed:.1%}"] if speed < -SPEED else []
    for name in ("threads", "descriptors", "children"):
        # The least of each half: what is about to end is not there in all samples, and what leaks slowly is in the
        # last ones of the earlier half, too.
        before, after = min(getattr(each, name) for each in early), min(getattr(each, name) for each in late)
        problems += [f"{after} {name}, where there were {before}"] if after > before else []
    return problems


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
