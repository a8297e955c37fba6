"""Who takes part in a benchmark: our ways to decode, and the peers that this machine has."""

from __future__ import annotations

from dataclasses import dataclass, field
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


def ours(pairing: Pairing, accept: list[float]) -> list[Contender]:
    """Our own ways; with `accept` plain decoding and a drafter of that acceptance at depth."""
    named = {way: name for way, name in OURS.items() if pairing.draft or way not in ("tree", "chain")}
    if accept:
        named = {"plain": OURS["plain"], "synthetic": f"synthetic, accept {', '.join(f'{rate:g}' for rate in accept)}"}
    setups = [("", pairing.setup("ways", accept=accept))]
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
    for way in ("plain", "prompt lookup"):
        key, setup = f"llama-cpp-python, {way}", pairing.setup("peer_llama_cpp_python", lookup=way != "plain")
        buffers = {"repacked weights": True, "plain weights": False}
        setups = [(note, setup | {"extra_buffers": extra}) for note, extra in buffers.items()]
        found.append(Contender(key, way, key, True, setups))
    return found


def _transformers(pairing: Pairing) -> list[Contender]:
    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    missing = f"not installed: {', '.join(absent)}; pip install 'pystaged[peers]'" if absent else ""
    setups = [("same weights in F32", pairing.setup("peer_transformers"))]
    return [
        Contender(f"transformers, {name}", way, "transformers", True, setups, missing)
        for way, name in {"plain": "plain", "assisted": "assisted", "lookup": "prompt lookup"}.items()
        if pairing.draft or way != "assisted"
    ]


def _programs(pairing: Pairing, folder: Path) -> list[Contender]:
    places = (folder, folder / "bin", folder / "build" / "bin")
    names = dict.fromkeys(name for name, *_ in PROGRAMS)
    paths = {name: path for name in names for place in reversed(places) if (path := place / name).is_file()}
    if not paths:
        raise FileNotFoundError(
            f"there is none of {', '.join(names)} in {folder}; give the folder of a llama.cpp build, or its bin folder"
        )
    found = []
    for name, way, arguments, needs_draft in PROGRAMS:
        if needs_draft and pairing.draft is None:
            continue
        key = ", ".join(filter(None, (name, way)))
        if name not in paths:
            found.append(Contender(key, way, key, True, missing=f"not in {folder.name}"))
            continue
        share = pairing.draft_share if needs_draft else 0.0
        setup = pairing.setup("peer_llama_cpp", program=str(paths[name]), draft_share=share)
        setup |= {} if needs_draft else {"draft": None}
        plain = {"arguments": [*arguments, "--no-repack"]}
        setups = [("", setup | {"arguments": arguments}), ("plain weights", setup | plain)]
        found.append(Contender(key, way, key, True, setups))
    return found
