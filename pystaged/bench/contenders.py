"""Who takes part in a benchmark: our ways to decode, and the peers that this machine has.

All get the same setup: model and draft (paths, the latter None where n-grams alone draft), draft_share (weights of a
draft pass over those of a target pass), threads, n_ctx. Each adds the module of its runner, and what that asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Setup = dict[str, Any]

OURS = {
    "plain": "plain",
    "tree": "tree without stage 2",
    "staged": "staged",
    "chain": "chain",
    "n-grams": "n-grams alone",
}
# Program of llama.cpp, way, its arguments, and whether it needs a draft.
PROGRAMS: list[tuple[str, str, list[str], bool]] = [
    ("llama-speculative", "", [], True),
    ("llama-speculative-simple", "", ["--spec-type", "draft-simple"], True),
    ("llama-lookup", "", [], False),
    ("llama-server", "plain", [], False),
    ("llama-server", "draft-simple", ["--spec-type", "draft-simple"], True),
    ("llama-server", "ngram-simple", ["--spec-type", "ngram-simple"], False),
]


@dataclass(slots=True)
class Contender:
    """A row of the report.

    key: of the row. way: what its worker calls it. worker: contenders with the same one share a process. setups: of the
    worker, the next one being tried when one crashes. missing: why it cannot take part, "" if it can.
    """

    key: str
    way: str
    worker: str
    is_peer: bool
    setups: list[tuple[str, Setup]] = field(default_factory=list)
    missing: str = ""


def ours(setup: Setup, accept: list[float]) -> list[Contender]:
    """Our own ways; with `accept` plain decoding and a drafter of that acceptance at depth."""
    named = {way: name for way, name in OURS.items() if setup["draft"] or way not in ("tree", "chain")}
    if accept:
        named = {"plain": OURS["plain"], "synthetic": f"synthetic, accept {', '.join(f'{rate:g}' for rate in accept)}"}
    setups = [("", setup | {"runner": f"{__package__}.ways", "accept": accept})]
    return [Contender(name, way, "ways", False, setups) for way, name in named.items()]


def peers(setup: Setup, llama_cpp: Path | None) -> list[Contender]:
    """What people would use instead.

    Args:
        llama_cpp: folder of llama.cpp's programs, or of a build of it.

    Raises:
        FileNotFoundError: there is no such folder, or no program in it.
    """
    return _llama_cpp_python(setup) + _transformers(setup) + (_programs(setup, llama_cpp) if llama_cpp else [])


def _llama_cpp_python(setup: Setup) -> list[Contender]:
    found = []
    for way in ("plain", "prompt lookup"):
        key = f"llama-cpp-python, {way}"
        mine = setup | {"runner": f"{__package__}.peer_llama_cpp_python", "lookup": way != "plain"}
        buffers = {"repacked weights": True, "plain weights": False}
        setups = [(note, mine | {"extra_buffers": extra}) for note, extra in buffers.items()]
        found.append(Contender(key, way, key, True, setups))
    return found


def _transformers(setup: Setup) -> list[Contender]:
    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    missing = f"not installed: {', '.join(absent)}; pip install 'pystaged[peers]'" if absent else ""
    setups = [("same weights in F32", setup | {"runner": f"{__package__}.peer_transformers"})]
    return [
        Contender(f"transformers, {name}", way, "transformers", True, setups, missing)
        for way, name in {"plain": "plain", "assisted": "assisted", "lookup": "prompt lookup"}.items()
        if setup["draft"] or way != "assisted"
    ]


def find_programs(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Those programs of llama.cpp that are in a folder of programs, or of a build.

    Raises:
        FileNotFoundError: there is none of them.
    """
    places = (folder, folder / "bin", folder / "build" / "bin")
    paths = {name: path for name in names for place in reversed(places) if (path := place / name).is_file()}
    if not paths:
        raise FileNotFoundError(
            f"there is none of {', '.join(names)} in {folder}; give the folder of a llama.cpp build, or its bin folder"
        )
    return paths


def _programs(setup: Setup, folder: Path) -> list[Contender]:
    paths = find_programs(folder, dict.fromkeys(name for name, *_ in PROGRAMS))
    found = []
    for name, way, arguments, needs_draft in PROGRAMS:
        if needs_draft and setup["draft"] is None:
            continue
        key = ", ".join(filter(None, (name, way)))
        if name not in paths:
            found.append(Contender(key, way, key, True, missing=f"not in {folder.name}"))
            continue
        mine = setup | {"runner": f"{__package__}.peer_llama_cpp", "program": str(paths[name])}
        mine |= {} if needs_draft else {"draft": None, "draft_share": 0.0}
        plain = {"arguments": [*arguments, "--no-repack"]}
        setups = [("", mine | {"arguments": arguments}), ("plain weights", mine | plain)]
        found.append(Contender(key, way, key, True, setups))
    return found
