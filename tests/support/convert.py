"""What tests share of convert."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pystaged.loading.quantize import quantize_checkpoint
from support.logits import llama_tokenize, llama_vocabulary


def convert(folder: Path, out: Path, quantization: str = "F32", **options: Any) -> None:
    """A checkpoint as a GGUF file of floats."""
    quantize_checkpoint(folder, out, quantization, **options)


def llama_tokens(path: Path, text: str) -> list[int]:
    """The tokens of a text as llama-cpp-python sees them in a GGUF file."""
    with llama_vocabulary(path) as model:
        return llama_tokenize(model, text)


def write_bfloat16(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """A safetensors file by hand: numpy has no such type."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_pickled(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """A file as torch.save writes it, by hand: torch need not be installed."""
    kinds = {"float32": "Float", "float16": "Half", "int64": "Long", "bool": "Bool"}
    data = b"\x80\x02ccollections\nOrderedDict\n)R("
    with zipfile.ZipFile(path, "w") as archive:
        for key, (name, array) in enumerate(arrays.items()):
            storage = b"ctorch\n%bStorage\n" % kinds[array.dtype.name].encode() + _text(str(key)) + _text("cpu")
            storage = b"(" + _text("storage") + storage + _integers([array.size]) + b"tQ"
            sizes = [stride // array.itemsize for stride in array.strides]
            data += _text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + _integers([0])
            data += b"(" + _integers(array.shape) + b"t(" + _integers(sizes) + b"t\x89ccollections\nOrderedDict\n)RtR"
            archive.writestr(f"archive/data/{key}", array.tobytes())
        archive.writestr("archive/data.pkl", data + b"u.")


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _integers(values: Iterable[int]) -> bytes:
    return b"".join(b"J" + struct.pack("<i", value) for value in values)


def change_json(name: str, **changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))

    return change


def header(size: int, text: bytes = b"{}") -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + text) and None
