"""Tensors of PyTorch's own files (`pytorch_model.bin`), found without torch and without running what a file says.

Such a file is a zip archive of a pickled dictionary of tensors and of the tensors' numbers. Of the pickle, only those
instructions are followed that make dictionaries, tuples, numbers, strings and tensors.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

_MOST_BYTES = 1 << 20  # of the pickle, and of the archive's directory
_MOST_SIZES = 8  # of a tensor
# Bytes of a number of each storage, and safetensors' name of its type.
_STORAGES = {
    "torch DoubleStorage": (8, "F64"),
    "torch FloatStorage": (4, "F32"),
    "torch HalfStorage": (2, "F16"),
    "torch BFloat16Storage": (2, "BF16"),
    "torch LongStorage": (8, "I64"),
    "torch IntStorage": (4, "I32"),
    "torch BoolStorage": (1, "BOOL"),
}
# What may be called. A tensor is (storage, start, sizes, strides), a storage as the pickle describes it.
_CALLS: dict[str, Any] = {
    "collections OrderedDict": lambda *_: {},
    "torch._utils _rebuild_tensor_v2": lambda *given: given[:4],
    "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
}
_EMPTY: dict[str, Any] = {"EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "NEWFALSE": bool}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "NONE", "NEWTRUE"}
_FOREIGN = "its pickle is not that of a dictionary of tensors"
_DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    OverflowError,
    RuntimeError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
)


class Place(NamedTuple):
    """Where a tensor's numbers are in a file, row after row. dtype: as safetensors names it. offset: in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class _SmallReads(io.BufferedReader):
    """A file of which little is read at once, as zipfile reads a directory of any size."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _MOST_BYTES:
            raise ValueError("its directory is too large")
        return super().read(_MOST_BYTES if size is None or size < 0 else size)


def tensors_of(path: Path) -> dict[str, Place]:
    """The tensors of a file that torch.save wrote (PyTorch 1.6 or newer), by name.

    Raises:
        ValueError: it is damaged, or holds anything else than a dictionary of tensors.
        OSError: it cannot be opened.
    """
    with _SmallReads(io.FileIO(path)) as file:
        try:
            archive = zipfile.ZipFile(file)
            folder = archive.namelist()[0].partition("/")[0]
            data = _entry(archive, f"{folder}/data.pkl", 0)
            if data.file_size > _MOST_BYTES:
                raise ValueError("its pickle is too large")
            found = _unpickled(archive.read(data))
            return {name: _place(file, archive, f"{folder}/data/", tensor) for name, tensor in found.items()}
        except _DAMAGED as error:
            raise ValueError(f"{path} cannot be read ({str(error)[:200]}); save its tensors as safetensors") from None


def _entry(archive: zipfile.ZipFile, name: str, size: int) -> zipfile.ZipInfo:
    found = archive.getinfo(name)
    if found.compress_type != zipfile.ZIP_STORED or found.file_size < size:
        raise ValueError(f"{name!r} is compressed or too short")
    return found


def _place(file: io.BufferedReader, archive: zipfile.ZipFile, folder: str, tensor: Any) -> Place:
    (_, kind, key, _, count), start, shape, strides = tensor
    size, dtype = _STORAGES[_text(kind)]
    if len(shape) > _MOST_SIZES or not all(
        type(each) is int and each >= 0 for each in (count, start, *shape, *strides)
    ):
        raise ValueError("a tensor has impossible sizes")
    usual = [prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(own != stride for own, stride, rows in zip(strides, usual, shape, strict=True) if rows != 1):
        raise ValueError("a tensor is not stored row after row")
    if start + prod(shape) > count:
        raise ValueError("a tensor ends beyond its storage")
    entry = _entry(archive, folder + _text(key), size * count)
    file.seek(entry.header_offset + 26)
    begin = entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
    if begin + entry.file_size > file.seek(0, io.SEEK_END):
        raise ValueError("it is too short")
    return Place(dtype, tuple(shape), begin + size * start)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(_FOREIGN)
    return value


def _dictionary(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(_FOREIGN)
    return value


def _unpickled(data: bytes) -> dict[str, Any]:
    """The dictionary of a pickle; a damaged or foreign pickle raises one of _DAMAGED here, or in _place."""
    stack: list[Any] = []
    marks: list[int] = []
    known: dict[Any, Any] = {}

    def taken(start: int) -> list[Any]:
        found = stack[start:]
        del stack[start:]
        return found

    for instruction, value, _ in pickletools.genops(data):
        name = instruction.name
        if name in _VALUES:
            stack.append(True if name == "NEWTRUE" else value)
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "GLOBAL":
            if value not in _STORAGES and value not in _CALLS:
                raise ValueError(f"its pickle names {value!r}, which is no part of a tensor")
            stack.append(value)
        elif name == "REDUCE":
            function, arguments = taken(-2)
            stack.append(_CALLS[_text(function)](*arguments))
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(taken(marks.pop() if name == "TUPLE" else -int(name[-1]))))
        elif name in ("SETITEM", "SETITEMS"):
            items = taken(marks.pop() if name == "SETITEMS" else -2)
            _dictionary(stack[-1]).update(zip(map(_text, items[::2]), items[1::2], strict=True))
        elif name in ("BINPUT", "LONG_BINPUT"):
            known[value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(known[value])
        elif name == "BUILD":
            stack.pop()  # attributes of the dictionary, such as _metadata
        elif name == "STOP":
            return _dictionary(stack.pop())
        elif name not in ("PROTO", "BINPERSID"):  # BINPERSID makes a storage of its description
            raise ValueError(f"its pickle has the instruction {name}, which no dictionary of tensors needs")
    raise ValueError("its pickle has no end")
