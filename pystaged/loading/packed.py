"""Packed weights kept in the user's cache folder: a model loads from there at once, and processes share the memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pystaged.files import check_room, part_file
from pystaged.loading.kept import PACKED

if TYPE_CHECKING:
    from pystaged._core import Model


def load_packed(path: Path, kernel: str, num_threads: int, report: Callable[[str], None], kv: str = "f16") -> Model:
    """The model of a GGUF file, its weights mapped from the cache, into which they are put first if they are not there.

    Where they cannot be put there the model is loaded all the same. `report` is told, also of weights there that are of
    no use: of another file or version, or damaged.

    Raises:
        ModelError, ValueError: as Model.
    """
    from pystaged._core import Model  # noqa: PLC0415  who lists models needs none

    target, source = PACKED.path(path), os.fsencode(path.absolute())
    model = Model(source, kernel, num_threads, kv=kv, packed=os.fsencode(target))
    if model.is_mapped:
        return model
    try:
        if model.packed_problem:
            report(f"packed again: {model.packed_problem}")
            target.unlink(missing_ok=True)  # another process may have done so just now
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
