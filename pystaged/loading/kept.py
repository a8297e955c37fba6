"""Files in the user's cache folder, one for each model."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from pystaged.platform.files import cache_folder


class KeptFiles:
    """Kept files of one kind.

    Args:
        kind: name of their folder.
        suffix: of their names; `kind` if not given.
    """

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
