"""Files in the user's cache folder, one for each model; packed weights are among them, which load at once and which
processes share."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pystaged.platform.files import cache_folder, check_room, part_file

if TYPE_CHECKING:
    from pystaged._core import Model


class KeptFiles:
    """Kept files of one kind. kind: name of their folder; suffix: of their names, `kind` if not given."""

    def __init__(self, kind: str, suffix: str = "") -> None:
        self._kind, self._suffix = kind, suffix or kind
        self._name = re.compile(rf".*\.[0-9a-f]{{16}}\.{self._suffix}", re.DOTALL)

    def folder(self) -> Path:
        """The folder of these files."""
        return cache_folder() / self._kind

    def path(self, model: Path) -> Path:
        """Path of the file kept for a model."""
        key = hashlib.sha256(os.fsencode(model.absolute())).hexdigest()[:16]
        return self.folder() / f"{model.stem[:40]}.{key}.{self._suffix}"

    def all(self) -> list[Path]:
        """All files of this kind, by name."""
        return [path for path in sorted(self.folder().glob(f"*.{self._suffix}")) if self._is_ours(path)]

    def remove(self, path: Path) -> int:
        """Remove a file if it exists; returns its bytes, which are freed once no process maps it."""
        with suppress(FileNotFoundError):  # another process removed it
            if self._is_ours(path):
                freed = path.stat().st_size
                path.unlink()
                return freed
        return 0

    def _is_ours(self, path: Path) -> bool:
        return self._name.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


RECYCLED = KeptFiles("memory")
PACKED = KeptFiles("packed")


def load_packed(path: Path, kernel: str, num_threads: int, report: Callable[[str], None], kv: str = "f16") -> Model:
    """Load a model with its weights mapped from the cache; they are packed there first if missing.

    If writing fails, the model is loaded without the cache. `report` gets the reason, also for cached weights that are
    unusable because they are damaged or of another file or version. Raises as Model."""
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
