"""Files that are kept in the user's cache folder, one for each model, which it names."""

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
        model: the model's file, "?" where it does not say.
    """

    path: Path
    bytes: int
    model: str


class KeptFiles:
    """Kept files of one kind.

    Args:
        kind: the name of their folder, and the end of theirs.
        title: what they begin with; the model's file and what it holds follow, as `head` puts it.
    """

    def __init__(self, kind: str, title: str) -> None:
        self._kind = kind
        self._name = re.compile(rf".*\.[0-9a-f]{{16}}\.{kind}", re.DOTALL)
        self._title = f"{title}\nof ".encode()
        self._model = re.compile(self._title + rb"(.*)\nwhose content is ", re.DOTALL)

    def folder(self) -> Path:
        """The folder that they lie in."""
        return cache_folder() / self._kind

    def path(self, model: Path) -> Path:
        """Where the file kept for a model lies."""
        key = hashlib.sha256(os.fsencode(model.absolute())).hexdigest()[:16]
        return self.folder() / f"{model.stem[:40]}.{key}.{self._kind}"

    def head(self, model: Path, content: str) -> bytes:
        """The first lines of the file kept for a model.

        Args:
            content: names what the model's file holds.
        """
        return self._title + os.fsencode(model.absolute()) + f"\nwhose content is {content}\n".encode()

    def all(self) -> list[KeptFile]:
        """All of this kind, by name."""
        found = [self._describe(path) for path in sorted(self.folder().glob(f"*.{self._kind}")) if self._is_ours(path)]
        return [each for each in found if each]

    def remove(self, path: Path) -> int:
        """Remove one, if it is there; returns the bytes freed, which those who have it mapped keep as long."""
        try:
            if not self._is_ours(path):
                return 0
            freed = path.lstat().st_size
            path.unlink()
        except FileNotFoundError:  # by another process just now
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
            with open_regular(path) as file:
                found = self._model.match(file.read(_TEXT_BYTES))
        except (FileNotFoundError, ValueError):  # gone, or something else has come into its place
            return None
        except OSError:
            found = None
        # It is shown in terminals.
        model = "".join(each if each.isprintable() else "?" for each in os.fsdecode(found[1])) if found else "?"
        return KeptFile(path, size, model)


RECYCLED = KeptFiles("memory", "pystaged memory 1")
PACKED = KeptFiles("packed", "pystaged packed weights")
