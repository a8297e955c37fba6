"""The methods that a benchmark compares: pystaged's own, and the baselines installed on this machine.

All get the same setup: model and draft (paths; draft is None for n-grams alone), threads and n_ctx. Each method adds
its runner's module and the runner's fastest options on this machine; a note in the report names these options.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

Setup = dict[str, Any]

OURS = {"plain": "plain", "tree": "draft alone", "staged": "staged", "n-grams": "n-grams alone"}
_SERVER = "llama-server"
# llama-server's names for drafting with a model and for prompt lookup with n-grams of 3 tokens; ik_llama.cpp's differ.
_SPECULATIONS = {
    "draft": ["--spec-type", "draft-simple"],
    "prompt lookup": [
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"),
        *("--spec-ngram-simple-size-m", "8"),
    ],
}
_IK_SPECULATIONS = {
    "draft": ["--spec-type", "draft"],
    "prompt lookup": ["--spec-type", "ngram-simple:ngram_size_n=3,ngram_size_m=8"],
}
_IK_REPACK = "--run-time-repack"


@dataclass(slots=True)
class Method:
    """A row of the report.

    key: the row's name. way: its name in the worker. worker: methods with the same worker share a process. setups: for
    the worker, with notes; if one crashes, the next is tried.
    """

    key: str
    way: str
    worker: str
    is_baseline: bool
    setups: list[tuple[str, Setup]]

    @property
    def meets_misleading(self) -> bool:
        """Whether it also runs on the misleading prompts."""
        return not self.is_baseline and self.way in ("plain", "staged")


def ours(setup: Setup) -> list[Method]:
    """pystaged's own methods."""
    with_model = setup["draft"]
    setups = [("", setup | {"runner": f"{__package__}.own_methods"})]
    named = {way: name for way, name in OURS.items() if with_model or way != "tree"}
    return [Method(name, way, "own", False, setups) for way, name in named.items()]


def baselines(setup: Setup, llama_cpp: Iterable[Path], names: str = "all") -> list[Method]:
    """The baselines to compare with.

    Args:
        llama_cpp: folders of llama.cpp's and ik_llama.cpp's programs, or of their builds.
        names: "all", "none", or beginnings of their names, separated by commas.

    Raises:
        FileNotFoundError: there is no such folder, or no llama-server in it.
        ValueError: no name begins so, or one is empty.
    """
    if names == "none":
        return []
    found = _llama_cpp_python(setup)
    for folder in llama_cpp:
        found += _server(setup, find_server(folder), {each.key for each in found})
    if names == "all":
        return found
    one = any(each.key == names for each in found)  # names have a comma
    words = (names,) if one else tuple(map(str.strip, names.split(",")))
    for word in words:
        if not word:
            raise ValueError(f"an empty name in {names!r}; name baselines with single commas between them")
        if not any(each.key.startswith(word) for each in found):
            there = "; ".join(each.key for each in found)
            raise ValueError(f"no baseline's name begins with {word}; there are {there}")
    return [each for each in found if each.key.startswith(words)]


def find_server(folder: Path) -> Path:
    """Find llama-server in a folder of programs, or of a build.

    Raises:
        FileNotFoundError: it is not there.
    """
    for place in (folder, folder / "bin", folder / "build" / "bin"):
        if (place / _SERVER).is_file():
            return place / _SERVER
    raise FileNotFoundError(
        f"there is no {_SERVER} in {folder}; give the folder of a build of llama.cpp or ik_llama.cpp, or its bin folder"
    )


def _llama_cpp_python(setup: Setup) -> list[Method]:
    """Its methods, or none where it is not installed."""
    found = list[Method]()
    if not util.find_spec("llama_cpp"):
        return found
    for way in ("plain", "prompt lookup"):
        key = f"llama-cpp-python, {way}"
        mine = setup | {"runner": f"{__package__}.baseline_llama_cpp_python", "lookup": way != "plain"}
        buffers = {"repacked weights, flash attention": True, "plain weights, flash attention": False}
        setups = [(note, mine | {"extra_buffers": extra}) for note, extra in buffers.items()]
        found.append(Method(key, way, key, True, setups))
    return found


def _server(setup: Setup, program: Path, taken: Collection[str]) -> list[Method]:
    """The methods of one llama-server."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True, errors="replace", check=False)
    is_ik = _IK_REPACK in done.stdout + done.stderr
    name = "ik_llama.cpp" if is_ik else "llama.cpp"
    if f"{name}, plain" in taken:
        name += f" of {program}"
    usual = ["-fa", "on", "--log-disable"]
    fast, safe = ([*usual, _IK_REPACK], usual) if is_ik else (usual, [*usual, "--no-repack"])
    found = []
    for way, arguments in {"plain": [], **(_IK_SPECULATIONS if is_ik else _SPECULATIONS)}.items():
        if way == "draft" and setup["draft"] is None:
            continue
        mine = setup | {"runner": f"{__package__}.baseline_llama_cpp", "program": str(program)}
        mine |= {} if way == "draft" else {"draft": None}
        key = f"{name}, {way}"
        setups = [
            (f"{_SERVER} {' '.join(options)}", mine | {"arguments": options})
            for options in (fast + arguments, safe + arguments)
        ]
        found.append(Method(key, way, key, True, setups))
    return found
