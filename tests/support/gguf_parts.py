"""GGUF files taken apart and put together, without gguf or ggml but for the sizes of types."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from gguf.constants import GGML_QUANT_SIZES

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ALIGNMENT = 32
# ggml's number of each tensor type, with bytes per block and weights per block; gguf's Q8_1, 9, is an old one.
TENSOR_TYPES = {int(kind): (size, block) for kind, (block, size) in GGML_QUANT_SIZES.items()} | {9: (36, 32)}


@dataclass(frozen=True)
class Entry:
    key: bytes
    kind: int
    value: bytes  # as in the file


@dataclass(frozen=True)
class Tensor:
    name: bytes
    shape: tuple[int, ...]
    kind: int
    data: bytes


@dataclass(frozen=True)
class Field:
    """A place in the file: an integer, or the bytes of a text."""

    group: str
    name: str
    at: int
    size: int


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


class Gguf:
    """A GGUF file taken apart."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.fields = data, 0, list[Field]()
        self._take("header", "magic", 4)
        self._integer("header", "version", 4)
        num_tensors, num_entries = self._integer("header", "tensors", 8), self._integer("header", "entries", 8)
        self.entries = [self._entry() for _ in range(num_entries)]
        infos = [self._info() for _ in range(num_tensors)]
        self.start = -(-self.at // ALIGNMENT) * ALIGNMENT
        self.tensors = [
            Tensor(name, shape, kind, data[self.start + at :][: num_bytes(shape, kind)])
            for name, shape, kind, at in infos
        ]

    def _take(self, group: str, name: str, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise ValueError("the file ends early")
        self.fields.append(Field(group, name, self.at, size))
        self.at += size
        return self.data[self.at - size : self.at]

    def _integer(self, group: str, name: str, size: int) -> int:
        return int.from_bytes(self._take(group, name, size), "little")

    def _text(self, group: str, name: str) -> bytes:
        return self._take(group, name, self._integer(f"{group} length", f"length of {name}", 8))

    def _entry(self) -> Entry:
        key = self._text("key", "a key")
        name = key.decode()
        kind = self._integer("kind", f"kind of {name}", 4)
        at = self.at
        self._value(name, kind)
        return Entry(key, kind, self.data[at : self.at])

    def _value(self, name: str, kind: int) -> None:
        if kind == STRING:
            self._text("text", name)
        elif kind == ARRAY:
            item, length = self._integer("array kind", name, 4), self._integer("array length", name, 8)
            for i in range(length):
                if item == STRING:
                    self._text(name, f"{name}[{i}]")
                else:
                    self._take(name, f"{name}[{i}]", SIZES[item])
        else:
            self._take("number", name, SIZES[kind])

    def _info(self) -> tuple[bytes, tuple[int, ...], int, int]:
        name = self._text("tensor name", "a tensor's name")
        rank = self._integer("tensor rank", f"rank of {name!r}", 4)
        shape = tuple(self._integer("tensor shape", f"shape of {name!r}", 8) for _ in range(rank))
        kind = self._integer("tensor kind", f"kind of {name!r}", 4)
        return name, shape, kind, self._integer("tensor offset", f"offset of {name!r}", 8)


def num_bytes(shape: tuple[int, ...], kind: int) -> int:
    size, block = TENSOR_TYPES[kind]
    count = 1
    for n in shape:
        count *= n
    if count > 1 << 20:
        raise ValueError("an absurd tensor")
    return count // block * size


def assemble(entries: list[Entry], tensors: list[Tensor], alignment: int = ALIGNMENT) -> bytes:
    """A file of these parts, offsets reckoned anew."""
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))]
    head += [text(entry.key) + struct.pack("<I", entry.kind) + entry.value for entry in entries]
    weights = b""
    for tensor in tensors:
        place = struct.pack(f"<I{len(tensor.shape)}QIQ", len(tensor.shape), *tensor.shape, tensor.kind, len(weights))
        head.append(text(tensor.name) + place)
        weights += tensor.data + bytes(-len(tensor.data) % alignment)
    start = b"".join(head)
    return start + bytes(-len(start) % alignment) + weights


# ---- Changed files ----

Change: TypeAlias = Callable[[list[Entry], list[Tensor]], object]


def changed(data: bytes, path: Path, *changes: Change) -> Path:
    """Write a file whose parts are changed."""
    parts = Gguf(data)
    for change in changes:
        change(parts.entries, parts.tensors)
    path.write_bytes(assemble(parts.entries, parts.tensors))
    return path


def put(key: str, kind: int, value: bytes) -> Change:
    """Set a key, in its place if it is there."""

    def change(entries: list[Entry], _: list[Tensor]) -> None:
        new = Entry(key.encode(), kind, value)
        at = next((i for i, entry in enumerate(entries) if entry.key == new.key), len(entries))
        entries[at : at + 1] = [new]

    return change


def drop(*names: str) -> Change:
    """Leave out keys and tensors."""
    left_out = {name.encode() for name in names}

    def change(entries: list[Entry], tensors: list[Tensor]) -> None:
        entries[:] = [entry for entry in entries if entry.key not in left_out]
        tensors[:] = [tensor for tensor in tensors if tensor.name not in left_out]

    return change


def alter(name: str, **fields: Any) -> Change:
    """Give a tensor other fields."""

    def change(_: list[Entry], tensors: list[Tensor]) -> None:
        at = [tensor.name for tensor in tensors].index(name.encode())
        tensors[at] = replace(tensors[at], **fields)

    return change
