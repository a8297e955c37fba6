"""Packed weights in the user's cache folder: models load at once, and processes share the memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pystaged.loading.kept import PACKED
from pystaged.platform.files import check_room, part_file

if TYPE_CHECKING:
    from pystaged._core import Model


def load_packed(path: Path, kernel: str, num_threads: int, report: Callable[[str], None], kv: str = "f16") -> Model:
    """Load a model with its weights mapped from the cache; they are packed there first if missing.

    If writing fails, the model is loaded without the cache. `report` gets the reason, also for cached weights that are
    unusable because they are damaged or of another file or version.

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
            target.unlink(missing_ok=True)  # another process may have removed it
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
