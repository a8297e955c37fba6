"""Files in the user's cache folder, one for each model, which its first lines name."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from pystaged.files import cache_folder, open_regular

_TEXT_BYTES = 16 << 10


@dataclass(frozen=True)
class KeptFile:
    """A file that is kept for a model.

    Args:
        model: path of the model's file; "?" where the file does not name it.
    """

    path: Path
    bytes: int
    model: str


class KeptFiles:
    """Kept files of one kind.

    Args:
        kind: name of their folder.
        title: their first words; the model's path and content follow, see `head`.
        suffix: of their names; `kind` if not given.
    """

    def __init__(self, kind: str, title: str, suffix: str = "") -> None:
        self._kind, self._suffix = kind, suffix or kind
        self._name = re.compile(rf".*\.[0-9a-f]{{16}}\.{self._suffix}", re.DOTALL)
        self._title = f"{title}\nof ".encode()
        self._model = re.compile(self._title + rb"(.*)\nwhose content is ", re.DOTALL)

    def folder(self) -> Path:
        """The folder of these files."""
        return cache_folder() / self._kind

    def path(self, model: Path) -> Path:
        """Path of the file kept for a model."""
        key = hashlib.sha256(os.fsencode(model.absolute())).hexdigest()[:16]
        return self.folder() / f"{model.stem[:40]}.{key}.{self._suffix}"

    def head(self, model: Path, content: str) -> bytes:
        """The first lines of the file kept for a model.

        Args:
            content: identifies the content of the model's file.
        """
        return self._title + os.fsencode(model.absolute()) + f"\nwhose content is {content}\n".encode()

    def all(self) -> list[KeptFile]:
        """All files of this kind, by name."""
        found = [
            self._describe(path) for path in sorted(self.folder().glob(f"*.{self._suffix}")) if self._is_ours(path)
        ]
        return [each for each in found if each]

    def remove(self, path: Path) -> int:
        """Remove a file if it exists; returns its bytes, which are freed once no process maps it."""
        try:
            if not self._is_ours(path):
                return 0
            freed = path.lstat().st_size
            path.unlink()
        except FileNotFoundError:  # another process removed it
            return 0
        return freed

    def _is_ours(self, path: Path) -> bool:
        try:
            return self._name.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)
        except OSError:  # gone
            return False

    def _describe(self, path: Path) -> KeptFile | None:
        try:
            size = path.lstat().st_size
        except OSError:  # gone
            return None
        try:
            model = self._model_of(path)
        except (FileNotFoundError, ValueError):  # gone, or replaced by something else
            return None
        except OSError:
            model = "?"
        # Terminals show it, so unprintable characters are replaced.
        return KeptFile(path, size, "".join(each if each.isprintable() else "?" for each in model))

    def _model_of(self, path: Path) -> str:
        """The model that a file names, "?" for none. Raises OSError, and ValueError for what is no regular file."""
        with open_regular(path) as file:
            found = self._model.match(file.read(_TEXT_BYTES))
        return os.fsdecode(found[1]) if found else "?"


RECYCLED = KeptFiles("memory", "pystaged memory 1")
PACKED = KeptFiles("packed", "pystaged packed weights")
