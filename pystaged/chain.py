"""A receipt chain: the receipts of a whole evaluation in one file, with one hash."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pystaged.files import open_regular, whole_file
from pystaged.receipt import MOST_BYTES, Receipt

_FIRST_LINE = b'{"format": "pystaged chain 1"}\n'


@dataclass(frozen=True, slots=True)
class Chain:
    """A file of receipts, one per line after the first line.

    sha256: of the whole file, which shows whether a text was changed, added, removed or moved later.
    """

    path: Path
    count: int
    sha256: str

    @classmethod
    def save(cls, path: str | Path, receipts: Iterable[Receipt]) -> Chain:
        """Write a file atomically.

        Raises:
            OSError: it cannot be written.
            ValueError: there is no receipt, or one is too large for `load`.
            TypeError: something is no receipt.
        """
        digest, count = hashlib.sha256(_FIRST_LINE), 0
        with whole_file(Path(path)) as part, part.open("wb") as file:
            file.write(_FIRST_LINE)
            for receipt in receipts:
                if not isinstance(receipt, Receipt):
                    raise TypeError(
                        f"a chain is made of receipts, as [result.receipt for result in results], not of "
                        f"{type(receipt).__name__}"
                    )
                line = json.dumps(json.loads(receipt.to_json()), separators=(",", ":")).encode() + b"\n"
                if len(line) > MOST_BYTES:
                    raise ValueError(f"receipt {count + 1} would be larger than {MOST_BYTES / 1e6:.0f} MB")
                file.write(line)
                digest.update(line)
                count += 1
            if not count:
                raise ValueError("a chain needs at least one receipt")
        return cls(Path(path), count, digest.hexdigest())

    @classmethod
    def load(cls, path: str | Path) -> Chain | None:
        """Read an untrusted file's number of receipts and hash; None if it is no chain.

        Raises:
            OSError, ValueError: it cannot be read, has no receipts, or a line is too large for one.
        """
        digest, count = hashlib.sha256(), -1
        for line in _lines(Path(path)):
            if count < 0 and line != _FIRST_LINE:
                return None
            if len(line) > MOST_BYTES:
                raise ValueError(f"{path} has a line larger than {MOST_BYTES / 1e6:.0f} MB, so it is no receipt chain")
            digest.update(line)
            count += 1
        if count == 0:
            raise ValueError(f"{path} holds no receipts")
        return None if count < 0 else cls(Path(path), count, digest.hexdigest())

    def sample(self, most: int | None, seed: int) -> list[int]:
        """Sorted positions of a random sample of `most` receipts, None for all; it depends on hash and seed alone."""
        if most is None or most >= self.count:
            return list(range(self.count))

        def drawn(position: int) -> bytes:
            return hashlib.sha256(f"{self.sha256} {seed} {position}".encode()).digest()

        return sorted(heapq.nsmallest(most, range(self.count), drawn))

    def receipts(
        self, positions: Iterable[int], damaged: Callable[[int, ValueError], object] | None = None
    ) -> Iterator[tuple[int, Receipt]]:
        """Read the receipts at positions.

        Args:
            damaged: called with the position of a line that is no receipt, and the reason; without it that is raised.

        Raises:
            ValueError: a line is no receipt; the message names the line, counted from 1.
        """
        wanted = set(positions)
        for position, line in enumerate(_lines(self.path), -1):
            if position in wanted:
                try:
                    yield position, _receipt(line)
                except (ValueError, RecursionError) as error:
                    reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
                    found = ValueError(f"line {position + 2} of {self.path} is no receipt: {reason}")
                    if damaged is None:
                        raise found from None
                    damaged(position, found)


def _receipt(line: bytes) -> Receipt:
    if not line.endswith(b"\n"):
        raise ValueError("it is cut off")
    return Receipt.from_json(line.decode())


def _lines(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        while line := file.readline(MOST_BYTES + 1):
            yield line
