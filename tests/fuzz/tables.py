"""N-gram tables: archives of arrays."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.mutate import NUMBERS, damage
from fuzz.target import Case, Target
from pystaged.drafting.table import NgramTable

VOCAB = 50


class Table(Target):
    """Whatever is read as a table, all of its lookups are in the vocabulary and in order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        documents = [np.random.default_rng(0).integers(0, VOCAB, 3000) ** 2 // VOCAB]
        NgramTable.build(documents, vocab_size=VOCAB, vocab_hash=f"{VOCAB}-0123456789abcdef", max_successors=8).save(
            self.path
        )
        self._base = self.path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(self._base)) as archive:
            self._members = {name: archive.read(name) for name in archive.namelist()}
        self._arrays = dict(np.load(io.BytesIO(self._base)))

    def sound(self) -> Iterator[Case]:
        yield self.of("as it was", self._base)

    def case(self, r: random.Random) -> Case:
        what = r.choice(["bytes", "member", "array", "array", "array"])
        name = r.choice(list(self._arrays))
        if what == "bytes":
            return self.of("bytes", damage(r, self._base))
        if what == "member":
            zeros = bytes(r.choice([0, 0, 0, 1 << 24]))
            members = self._members | {f"{name}.npy": damage(r, self._members[f"{name}.npy"]) + zeros}
            packing = r.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
            return self.of(f"the member {name}", zipped(members, packing))
        array = damaged_array(r, self._arrays[name])
        made = io.BytesIO()
        np.savez_compressed(made, **self._arrays | {name: array})
        return self.of(f"{name} is {array.dtype}{array.shape}", made.getvalue())

    def use(self, data: bytes) -> None:
        self.path.write_bytes(data)
        table = NgramTable.load(self.path)
        if table.vocab_size > 10_000:
            return
        last = table.vocab_size - 1
        pairs = ([min(a, last), min(b, last)] for a in range(0, VOCAB, 7) for b in range(3))
        for context in ([], [0], [last], *pairs):
            found = table.after(context, table.max_successors)
            if not (found and 0 <= min(found) <= max(found) < table.vocab_size):
                raise AssertionError(f"after {context}: {found}")
            if not (sorted(found.values(), reverse=True) == [*found.values()] and 0 <= max(found.values()) <= 1):
                raise AssertionError(f"after {context}: {found}")


def damaged_array(r: random.Random, array: Any) -> Any:
    """With other items, of another type or shape."""
    what = r.randrange(7)
    if what < 3 and array.size and array.dtype.kind in "iu":
        array = array.copy()
        limits = np.iinfo(array.dtype)
        for _ in range(r.choice([1, 1, 3])):
            number = r.choice([*NUMBERS, -1, -(2**15), int(array.flat[r.randrange(array.size)])])
            array.flat[r.randrange(array.size)] = min(max(number, limits.min), limits.max)
        return array
    if what == 3:
        types = ["U9", "S3"] if array.dtype.kind == "U" else ["u1", "i8", "u8", "f8", "?", "U9", "S3"]
        return array.astype(r.choice(types))
    if what == 4:
        return np.concatenate([array.reshape(-1)] * r.choice([2, 3, 2000]))
    if what == 5:
        return array.reshape(-1)[: r.choice([0, 1, array.size // 2, array.size - 1])]
    return array.reshape(r.choice([(1, -1), (-1, 1), (1, 1, -1)]))


def zipped(members: dict[str, bytes], packing: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", packing) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()
