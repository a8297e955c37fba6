"""Write GGUF files: tensors that are made while they are written, and what is copied from other files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, ReaderField

from pystaged.loading.progress import Progress

_TYPES = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING, bool: GGUFValueType.BOOL}


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written; shape: outputs before inputs; rows: makes its rows as the file stores them, in
    one piece or more."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: Callable[[], Iterable[npt.NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape, dtype=np.int64)) // block * size


def write_tensors(writer: GGUFWriter, tensors: Sequence[Planned], progress: Progress = lambda *_: None) -> None:
    """Write a file whose metadata are added; `progress` is called with bytes."""
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout or []
    done, total = 0, sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        writer.write_padding(file, file.tell())
        for rows in tensor.rows():
            progress("converting", done, total)
            rows.tofile(file)
            done += rows.nbytes
    writer.write_padding(file, file.tell())
    progress("converting", done, total)


def add_value(writer: GGUFWriter, key: str, value: float | str) -> None:
    """Add a metadata entry of the type that its value has."""
    writer.add_key_value(key, value, _TYPES[type(value)])


def copy_field(writer: GGUFWriter, field: ReaderField, more: Sequence[Any] = ()) -> None:
    """Add a field of another file; `more` comes behind the values of a list."""
    if field.types[0] is GGUFValueType.ARRAY:
        writer.add_key_value(field.name, [*field.contents(), *more], GGUFValueType.ARRAY, sub_type=field.types[-1])
    else:
        writer.add_key_value(field.name, field.contents(), field.types[0])
