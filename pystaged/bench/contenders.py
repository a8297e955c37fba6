"""Who takes part in a benchmark: our ways to decode, and the peers that this machine has."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Setups = list[tuple[str, dict[str, Any]]]

OURS = {
    "plain": "plain",
    "tree": "tree without stage 2",
    "staged": "staged",
    "chain": "chain",
    "n-grams": "n-grams alone",
}
PROGRAMS = {
    "llama-speculative": [],
    "llama-speculative-simple": ["--spec-type", "draft-simple"],
    "llama-lookup": [],
}
SERVER_WAYS = {
    "plain": [],
    "draft-simple": ["--spec-type", "draft-simple"],
    "ngram-simple": ["--spec-type", "ngram-simple"],
}


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
    setups: Setups = field(default_factory=list)
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Pairing:
    """The files and settings that all contenders get.

    draft: None where n-grams alone draft. draft_share: weights of a draft pass over those of a target pass.
    """

    model: Path
    draft: Path | None
    draft_share: float
    threads: int
    n_ctx: int

    def setup(self, runner: str, **others: Any) -> dict[str, Any]:
        """What a worker needs to know; its runner is a module beside this one."""
        return {
            "runner": f"{__package__}.{runner}",
            "model": str(self.model),
            "draft": str(self.draft) if self.draft else None,
            "threads": self.threads,
            "n_ctx": self.n_ctx,
            **others,
        }


def ours(pairing: Pairing) -> list[Contender]:
    """Our own ways."""
    setups = [("", pairing.setup("ways", accept=[]))]
    ways = [way for way in OURS if pairing.draft or way not in ("tree", "chain")]
    return [Contender(OURS[way], way, "ways", False, setups) for way in ways]


def synthetic(pairing: Pairing, accept: list[float]) -> list[Contender]:
    """Plain decoding, and a drafter with a given acceptance at depth."""
    setups = [("", pairing.setup("ways", accept=accept))]
    named = {"plain": OURS["plain"], "synthetic": f"synthetic, accept {', '.join(f'{rate:g}' for rate in accept)}"}
    return [Contender(name, way, "ways", False, setups) for way, name in named.items()]


def peers(pairing: Pairing, llama_cpp: Path | None) -> list[Contender]:
    """What people would use instead.

    Args:
        llama_cpp: folder of llama.cpp's programs, or of a build of it.

    Raises:
        FileNotFoundError: there is no such folder, or no program in it.
    """
    return _llama_cpp_python(pairing) + _transformers(pairing) + (_programs(pairing, llama_cpp) if llama_cpp else [])


def _llama_cpp_python(pairing: Pairing) -> list[Contender]:
    found = []
    for way, lookup in (("plain", False), ("prompt lookup", True)):
        key = f"llama-cpp-python, {way}"
        setups = [
            (note, pairing.setup("peer_llama_cpp_python", lookup=lookup, extra_buffers=extra))
            for note, extra in (("repacked weights", True), ("plain weights", False))
        ]
        found.append(Contender(key, way, key, True, setups))
    return found


def _transformers(pairing: Pairing) -> list[Contender]:
    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    missing = f"not installed: {', '.join(absent)}; pip install 'pystaged[peers]'" if absent else ""
    setups = [("same weights in F32", pairing.setup("peer_transformers"))]
    ways = {"plain": "plain", "assisted": "assisted", "lookup": "prompt lookup"}
    return [
        Contender(f"transformers, {name}", way, "transformers", True, setups, missing)
        for way, name in ways.items()
        if pairing.draft or way != "assisted"
    ]


def _programs(pairing: Pairing, folder: Path) -> list[Contender]:
    paths = {name: _program(folder, name) for name in (*PROGRAMS, "llama-server")}
    if not any(paths.values()):
        raise FileNotFoundError(
            f"there is none of {', '.join(paths)} in {folder}; give the folder of a llama.cpp build, or its bin folder"
        )
    ways = [(name, "", arguments) for name, arguments in PROGRAMS.items()]
    ways += [("llama-server", way, arguments) for way, arguments in SERVER_WAYS.items()]
    found = []
    for name, way, arguments in ways:
        needs_draft = name.startswith("llama-speculative") or way == "draft-simple"
        if needs_draft and pairing.draft is None:
            continue
        key, path = ", ".join(filter(None, (name, way))), paths[name]
        if path is None:
            found.append(Contender(key, way, key, True, missing=f"not in {folder.name}"))
            continue
        setup = pairing.setup(
            "peer_llama_cpp", program=str(path), draft_share=pairing.draft_share if needs_draft else 0.0
        )
        setup |= {} if needs_draft else {"draft": None}
        setups = [
            ("", setup | {"arguments": arguments}),
            ("plain weights", setup | {"arguments": [*arguments, "--no-repack"]}),
        ]
        found.append(Contender(key, way, key, True, setups))
    return found


def _program(folder: Path, name: str) -> Path | None:
    suffix = ".exe" if os.name == "nt" else ""
    places = (folder, folder / "bin", folder / "build" / "bin")
    return next((path for place in places if (path := place / f"{name}{suffix}").is_file()), None)


def versions() -> dict[str, str]:
    """Of the packages that take part."""
    found = {}
    for name in ("pystaged", "llama-cpp-python", "numpy", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
