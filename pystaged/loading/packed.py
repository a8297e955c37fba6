"""Packed weights kept in the user's cache folder: a model loads from there at once, and processes share the memory."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pystaged.files import cache_folder, check_room, part_file

if TYPE_CHECKING:
    from pystaged._core import Model

_NAME = re.compile(r".*\.[0-9a-f]{16}\.packed", re.DOTALL)
_TEXT_BYTES = 16 << 10
_MODEL = re.compile(rb"pystaged packed weights\nof (.*)\nwhose content is ", re.DOTALL)


@dataclass(frozen=True)
class PackedWeights:
    """Packed weights in the cache.

    Args:
        model: the file they were made of, "?" where they do not say.
    """

    path: Path
    bytes: int
    model: str


def folder() -> Path:
    """Where packed weights are kept."""
    return cache_folder() / "packed"


def packed_path(model: Path) -> Path:
    """Where those of a model's file are kept."""
    key = hashlib.sha256(os.fsencode(model.absolute())).hexdigest()[:16]
    return folder() / f"{model.stem[:40]}.{key}.packed"


def load_packed(path: Path, kernel: str, num_threads: int, report: Callable[[str], None], kv: str = "f16") -> Model:
    """The model of a GGUF file, its weights mapped from the cache, into which they are put first if they are not there.

    Where they cannot be put there the model is loaded all the same. `report` is told, also of weights there that are of
    no use: of another file or version, or damaged.

    Raises:
        ModelError, ValueError: as Model.
    """
    from pystaged._core import Model  # noqa: PLC0415  who lists models needs none

    target, source = packed_path(path), os.fsencode(path.absolute())
    model = Model(source, kernel, num_threads, kv=kv, packed=os.fsencode(target))
    if model.is_mapped:
        return model
    try:
        if model.packed_problem:
            report(f"packed again: {model.packed_problem}")
            target.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        check_room(target.parent, model.matrix_bytes)
        with part_file(target) as part:
            model.save_packed(os.fsencode(part))
            part.replace(target)
    except OSError as error:
        report(f"packed weights are not kept: {error}")
        return model
    del model  # or its weights would be in memory twice
    return Model(source, kernel, num_threads, kv=kv, packed=os.fsencode(target))


def packed_weights() -> list[PackedWeights]:
    """All that are in the cache."""
    found = [_describe(path) for path in sorted(folder().glob("*.packed")) if _is_ours(path)]
    return [each for each in found if each]


def remove_packed(path: Path) -> int:
    """Remove packed weights, if they are there; returns the bytes freed. Who has them mapped keeps them till then."""
    try:
        if not _is_ours(path):
            return 0
        freed = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:  # by another process just now
        return 0
    return freed


def _is_ours(path: Path) -> bool:
    try:
        return _NAME.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)
    except OSError:  # gone
        return False


def _describe(path: Path) -> PackedWeights | None:
    try:
        size = path.lstat().st_size
        with path.open("rb") as file:
            found = _MODEL.match(file.read(_TEXT_BYTES))
    except FileNotFoundError:
        return None
    except OSError:
        found = None
    # It is shown in terminals.
    model = "".join(each if each.isprintable() else "?" for each in os.fsdecode(found[1])) if found else "?"
    return PackedWeights(path, size, model)
