"""The command: children try cases one after the other; when one dies, the next begins after the case it died of."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

from fuzz.target import Case, Target

TARGETS = {  # by name: module and class; each of what is read without being trusted
    "gguf": "fuzz.gguf:Gguf",
    "assistant": "fuzz.drafts:Assistants",
    "eagle3": "fuzz.drafts:Eagles",
    "mtp": "fuzz.drafts:Ahead",
    "dflash": "fuzz.drafts:Blocks",
    "checkpoint": "fuzz.checkpoints:Checkpoint",
    "tokenizer": "fuzz.checkpoints:Tokenizer",
    "template": "fuzz.templates:Template",
    "grammar": "fuzz.grammars:Grammatical",
    "table": "fuzz.tables:Table",
    "receipt": "fuzz.receipts:Receipts",
    "http": "fuzz.http:Http",
}
CHUNK = 500  # cases of a child
SECONDS = 120  # of a case, by the clock, after which it hangs
CPU_SECONDS = 20.0  # of a case, by the processor
MOST_BYTES, TIMES = 96 << 20, 16  # memory of a case: so much, and so many times its size
ADDRESSES = 8 << 30  # that a child may have mapped beside those it began with
MOST_FAILURES = 20


@dataclass
class Tally:
    """What became of a target's cases."""

    accepted: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0
    most: float = 0.0  # bytes

    @property
    def cases(self) -> int:
        return self.accepted + self.refused + len(self.failures)


def main(arguments: list[str]) -> int:
    """Exit status 1 where a case fails."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    names = ", ".join(TARGETS)
    parser.add_argument("--target", action="append", help=f"{names}, or MODULE:CLASS; each of those named by default")
    parser.add_argument("--cases", type=int, default=1000, help="of each target (1000)")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="K", help="the first of them (0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for files, which are left there; only the last case's are")
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"after which a case hangs ({SECONDS})")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    targets = given.target or list(TARGETS)
    if unknown := [name for name in targets if name not in TARGETS and ":" not in name]:
        parser.error(f"there is no target {unknown[0]}; there are {names}")
    if given.child:
        try_cases(targets[0], given.seed, given.first, given.first + given.cases, given.folder, given.seconds)
        return 0
    return report(fuzz(targets, given.seed, given.first, given.cases, folder=given.folder, seconds=given.seconds))


# ---- In the child ----


def try_cases(name: str, seed: int, first: int, last: int, folder: Path, limit: int) -> None:
    """Write a line of JSON before each case, {begins, words}, and after it, {ends, outcome, seconds, most}. A line
    that begins None is of sound input, which must be accepted."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder = folder / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    target = make(name, folder)
    for case in target.sound():
        tell(lines, begins=None, words=case.words)
        outcome = attempt(target, case, limit)[0]
        if outcome != "accepted":
            raise RuntimeError(f"{case.words}: {outcome}")
    if addresses := memory("VmSize"):
        resource.setrlimit(resource.RLIMIT_AS, (addresses + ADDRESSES, addresses + ADDRESSES))
    for k in range(first, last):
        case = target.case(random.Random(f"{seed} {name} {k}"))
        os.ftruncate(2, os.lseek(2, 0, os.SEEK_SET))
        tell(lines, begins=k, words=case.words)
        outcome, seconds, most = attempt(target, case, limit)
        tell(lines, ends=k, outcome=outcome, seconds=seconds, most=most)


def make(name: str, folder: Path) -> Target:
    module, _, kind = TARGETS.get(name, name).partition(":")
    target: Target = getattr(importlib.import_module(module), kind)(folder)
    return target


def tell(lines: TextIO, **what: Any) -> None:
    lines.write(json.dumps(what) + "\n")
    lines.flush()


def attempt(target: Target, case: Case, limit: int) -> tuple[str, float, float]:
    """What becomes of a case, seconds of processor time, and bytes that it took at most."""
    faulthandler.dump_traceback_later(limit, exit=True)
    reset_peak()
    before, begun = memory("VmRSS"), time.process_time()
    outcome = use(target, case)
    seconds, most = time.process_time() - begun, memory("VmHWM") - before
    faulthandler.cancel_dump_traceback_later()
    if seconds > CPU_SECONDS:
        outcome = f"took {seconds:.1f} s"
    if most > MOST_BYTES + TIMES * case.size:
        outcome = f"took {most / 1e6:.0f} MB for {case.size / 1e6:.3f} MB"
    return outcome, seconds, most


def use(target: Target, case: Case) -> str:
    """What becomes of it: "accepted", "refused", or what is wrong."""
    try:
        case.use()
    except UnicodeDecodeError as error:  # of a message, which is then lost
        return f"UnicodeDecodeError: {error}"
    except target.refusals as error:
        return "refused" if str(error) else f"{type(error).__name__} without a message"
    except Exception as error:  # whatever else it is, the case fails with it
        return "".join(traceback.format_exception_only(error)) + traceback.format_exc()[-1500:]
    return "accepted"


def memory(name: str) -> int:
    """Bytes of this process, by /proc; 0 where there is none, and nothing is measured."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def reset_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# ---- In the parent ----


def fuzz(
    names: list[str], seed: int, first: int, count: int, *, folder: Path | None = None, seconds: int = SECONDS
) -> dict[str, Tally]:
    """Try so many cases of each target, in turns."""
    tallies = {name: Tally() for name in names}
    for begin in range(first, first + count, CHUNK):
        for name, tally in tallies.items():
            if len(tally.failures) >= MOST_FAILURES:
                continue
            begun, last = time.monotonic(), min(begin + CHUNK, first + count)
            with tempfile.TemporaryDirectory() as scratch:
                run(name, seed, begin, last, (folder or Path(scratch)).absolute(), seconds, tally)
            tally.seconds += time.monotonic() - begun
            failures = len(tally.failures)
            say(f"{name}: {tally.cases} cases, next --from {last}, {failures} failures, {tally.seconds:.0f} s")
    return tallies


def run(name: str, seed: int, first: int, last: int, folder: Path, seconds: int, tally: Tally) -> None:
    """Cases one after the other, by as many children as that takes."""
    while first < last and len(tally.failures) < MOST_FAILURES:
        with tempfile.TemporaryFile() as stderr:
            at, words = None, "before the first"
            numbers = {"--seed": seed, "--from": first, "--cases": last - first, "--seconds": seconds}
            for line in child({"--target": name, **numbers, "--folder": folder}, stderr):
                if "begins" in line:
                    at, words = line["begins"], line["words"]
                elif "ends" in line:
                    tally.slowest, tally.most = max(tally.slowest, line["seconds"]), max(tally.most, line["most"])
                    outcome, first = line["outcome"], line["ends"] + 1
                    tally.accepted += outcome == "accepted"
                    tally.refused += outcome == "refused"
                    if outcome not in ("accepted", "refused"):
                        tally.failures.append(failure(name, seed, at, words, outcome))
            if first < last:
                said = os.pread(stderr.fileno(), 1 << 20, 0).decode(errors="replace")[-1500:]
                tally.failures.append(failure(name, seed, at, words, f"died or hung\n{said}"))
            if at is None:  # no child comes to its cases
                return
            first = max(first, at + 1)


def child(options: dict[str, Any], stderr: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The lines that a child writes about its cases, one by one; it is killed when nobody reads on."""
    command = [sys.executable, "-m", "tests.fuzz", "--child"]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [*command, *(str(each) for option in options.items() for each in option)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            for line in process.stdout or ():
                yield json.loads(line)
        finally:
            process.kill()


def failure(name: str, seed: int, k: int | None, words: str, outcome: str) -> str:
    """What is wrong, and the command that repeats it."""
    again = f"python -m tests.fuzz --target {name} --seed {seed} --from {k} --cases 1"
    text = f"{name} {k}: {outcome.rstrip()}\n  {words}\n  {again}"
    say(text)
    return text


def report(tallies: dict[str, Tally]) -> int:
    """A table; the exit status."""
    say("| target | cases | accepted | refused | failures | seconds | slowest, s | most memory, MB |")
    say("|---|---|---|---|---|---|---|---|")
    for name, each in tallies.items():
        counts = f"{each.cases} | {each.accepted} | {each.refused} | {len(each.failures)}"
        say(f"| {name} | {counts} | {each.seconds:.0f} | {each.slowest:.2f} | {each.most / 1e6:.0f} |")
    return any(each.failures for each in tallies.values())


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
