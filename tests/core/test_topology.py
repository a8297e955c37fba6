"""Which cores passes use, from the files of machines that are not here; and where the pool's workers may run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from pystaged import _core

CPU = "sys/devices/system/cpu/cpu"


def cores(threads: Iterable[Sequence[int]], cache: str = "", capacity: int = 0) -> dict[str, str]:
    """Linux's files about cores, each the logical CPUs of one, that share an L3 cache with those of `cache`."""
    files = {}
    for siblings in threads:
        for cpu in siblings:
            files[f"{CPU}{cpu}/topology/thread_siblings_list"] = ",".join(map(str, siblings)) + "\n"
            files[f"{CPU}{cpu}/cache/index2/shared_cpu_list"] = f"{cpu}\n"
            if cache:
                files[f"{CPU}{cpu}/cache/index3/shared_cpu_list"] = cache + "\n"
            if capacity:
                files[f"{CPU}{cpu}/cpu_capacity"] = f"{capacity}\n"
    return files


def pairs(first: int, count: int) -> list[tuple[int, int]]:
    """The logical CPUs of cores with two each, which follow each other."""
    return [(first + 2 * i, first + 2 * i + 1) for i in range(count)]


def single(first: int, count: int) -> list[tuple[int]]:
    """The same of cores with one each."""
    return [(first + i,) for i in range(count)]


def intel(fast: str, slow: str) -> dict[str, str]:
    """The files that name the classes."""
    return {"sys/devices/cpu_core/cpus": fast + "\n", "sys/devices/cpu_atom/cpus": slow + "\n"}


ULTRA_155H = intel("0-11", "12-21") | cores(pairs(0, 6), "0-19") | cores(single(12, 8), "0-19") | cores(single(20, 2))
TWO_CPUS = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}
RYZEN = {
    file: content
    for die in (0, 6)  # whose cores have CPUs 0 and 12, 1 and 13, ...
    for file, content in cores(
        [(cpu, cpu + 12) for cpu in range(die, die + 6)], f"{die}-{die + 5},{die + 12}-{die + 17}"
    ).items()
}
STRIX = cores([(i, i + 12) for i in range(4)], "0-3,12-15") | cores([(i, i + 12) for i in range(4, 12)], "4-11,16-23")
# What such processors would be with classes in a system's files, as Windows has them.
STRIX_CLASSES = cores(single(0, 4), "0-3", 1024) | cores(single(4, 8), "4-11", 660)
# By name: files, logical CPUs that the process may use; cores found, left out, for few rows and for many.
MACHINES: dict[str, tuple[Mapping[str, str], Iterable[int], tuple[int, int, int, int]]] = {
    "6P+8E+2LPE": (ULTRA_155H, range(22), (16, 2, 6, 14)),
    "4P+8E": (
        intel("0-7", "8-15") | cores(pairs(0, 4), "0-15") | cores(single(8, 8), "0-15"),
        range(16),
        (12, 0, 4, 12),
    ),
    # Two fast cores alone would leave most of the power unused.
    "2P+8E": (
        intel("0-3", "4-11") | cores(pairs(0, 2), "0-11") | cores(single(4, 8), "0-11"),
        range(12),
        (10, 0, 10, 10),
    ),
    "4P+4LPE": (intel("0-3", "4-7") | cores(single(0, 4), "0-3") | cores(single(4, 4)), range(8), (8, 0, 4, 8)),
    "8 equal": (cores(single(0, 8), "0-7"), range(8), (8, 0, 8, 8)),
    "8 equal, no caches": (cores(pairs(0, 8)), range(16), (8, 0, 8, 8)),
    "two dies": (RYZEN, range(24), (12, 0, 12, 12)),
    "4+8c": (STRIX, range(24), (12, 0, 12, 12)),
    "4+8c, classes": (STRIX_CLASSES, range(12), (12, 0, 12, 12)),
    "4 A76 + 4 A55": (cores(single(0, 4), "", 414) | cores(single(4, 4), "", 1024), range(8), (8, 0, 4, 8)),
    "1 X1 + 3 A78 + 4 A55": (
        cores(single(0, 4), "0-7", 250) | cores(single(4, 3), "0-7", 850) | cores(single(7, 1), "0-7", 1024),
        range(8),
        (8, 0, 4, 8),
    ),
    "container": (ULTRA_155H | TWO_CPUS, range(22), (16, 2, 2, 2)),
    "container with few cores": (cores(single(0, 8), "0-7") | TWO_CPUS, [3], (1, 0, 1, 1)),
    "taskset, one P core": (ULTRA_155H, [2, 3], (1, 0, 1, 1)),
    "taskset, E cores": (ULTRA_155H, range(12, 20), (8, 0, 8, 8)),
    "taskset, LP-E cores": (ULTRA_155H, [20, 21], (2, 0, 2, 2)),
    "taskset, half a pair each": (ULTRA_155H, [1, 3, 5], (3, 0, 3, 3)),
    "empty": ({}, [0, 1, 5], (3, 0, 3, 3)),
    "broken": (
        {
            "sys/devices/cpu_core/cpus": "",
            f"{CPU}0/topology/thread_siblings_list": "0-\n",
            f"{CPU}1/topology/thread_siblings_list": "-2000000000-99999999999\n",
            f"{CPU}2/topology/thread_siblings_list": "ff,ff\n",
            f"{CPU}3/topology/thread_siblings_list": "0\n",
            f"{CPU}3/cache/index3/shared_cpu_list": "many\n",
            f"{CPU}3/cpu_capacity": "fast\n",
            f"{CPU}2/cpu_capacity": "-7\n",
        },
        range(4),
        (4, 0, 4, 4),
    ),
}


@pytest.mark.parametrize(("files", "cpus", "expected"), MACHINES.values(), ids=MACHINES)
def test_machines(
    tmp_path: Path, files: Mapping[str, str], cpus: Iterable[int], expected: tuple[int, int, int, int]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    chosen = _core.choose_cores(tmp_path, list(cpus))
    assert (chosen.found, chosen.apart, chosen.few, chosen.many) == expected


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    chosen = _core.choose_cores(tmp_path, [])
    assert chosen.found == chosen.few == chosen.many == os.cpu_count()


# A thread that is pinned to one CPU makes the first pass. Prints the cores chosen there and elsewhere, and where the
# process and each thread that came with the pass may run.
PINNED = """
import os, threading
from pathlib import Path
from pystaged import _core

def threads():
    return {each.name for each in Path("/proc/self/task").iterdir()}

def allowed(thread):
    return next(line.split()[1] for line in Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
                if line.startswith("Cpus_allowed_list:"))

def first_pass():
    os.sched_setaffinity(threading.get_native_id(), {min(os.sched_getaffinity(0))})
    print(_core.choose_cores().found, allowed(threading.get_native_id()))
    before = threads()
    _core.read_bandwidth(8 << 20, 3)
    workers.extend(threads() - before)

workers = []
pinned = threading.Thread(target=first_pass)
pinned.start()
pinned.join()
_core.read_bandwidth(8 << 20, 3)
print(_core.choose_cores().found, allowed(os.getpid()))
print(*(allowed(each) for each in workers))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files about threads")
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: "")(0)) < 2, reason="one CPU")
def test_workers_do_not_inherit_where_the_first_caller_is_pinned() -> None:
    ran = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=True)
    (found, there), (elsewhere, process), workers = map(str.split, ran.stdout.splitlines())
    assert there != process
    assert found == elsewhere
    assert workers == [process] * 2
