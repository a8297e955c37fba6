"""Convert Hugging Face checkpoints (safetensors) to GGUF files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from safetensors import SafetensorError, safe_open

from pystaged.files import check_room
from pystaged.loading.file_types import FILE_TYPES
from pystaged.loading.metadata import PARD_TOKEN, About
from pystaged.loading.progress import Progress
from pystaged.loading.shapes import Floats, Shape, Wanted, language_part
from pystaged.loading.vocabulary import read_json, read_vocabulary
from pystaged.recommended import sampling_keys

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
SAMPLING = "generation_config.json"
TYPES = ("F32", "F16", "BF16")
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_PREFIXES = ("", "transformer.", "model.", "language_model.model.", "model.language_model.")
# Tensors that older versions of transformers saved but never loaded: causal masks and rotary frequencies.
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_CHUNK = 1 << 24  # numbers converted at once


@dataclass(frozen=True)
class Stored:
    """The place of a checkpoint's tensor in its file; offset in bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, start: int, stop: int) -> Floats:
        """Rows `start` to `stop` as float32."""
        dtype, row = np.dtype(_DTYPES[self.dtype]), int(np.prod(self.shape[1:]))
        offset = self.offset + start * row * dtype.itemsize
        raw = np.fromfile(self.path, dtype, count=(stop - start) * row, offset=offset)
        if self.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32).reshape(stop - start, *self.shape[1:])


@dataclass(frozen=True)
class Tensor:
    """One tensor of the GGUF file and its source.

    Args:
        together: number of rows that `change` needs together.
        change: converts the checkpoint's numbers to the file's.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    stored: Stored
    quantization: GGMLQuantizationType
    together: int
    change: Callable[[Floats], Floats]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        block, size = GGML_QUANT_SIZES[self.quantization]
        return int(np.prod(self.shape)) // block * size

    def data(self) -> Iterator[npt.NDArray[Any]]:
        """The tensor's rows as the file stores them, in chunks.

        Raises:
            ValueError: a number is not finite, or too large for the type.
        """
        rows = self.stored.shape[0]
        groups = max(1, _CHUNK // (self.together * int(np.prod(self.stored.shape[1:]))))
        for start in range(0, rows, groups * self.together):
            values = self.stored.read(start, min(rows, start + groups * self.together))
            if not np.isfinite(values).all():
                raise ValueError(f"{self.stored.path}: tensor {self.source!r} holds numbers that are not finite")
            values = np.ascontiguousarray(self.change(values))
            if self.quantization is GGMLQuantizationType.F16 and np.abs(values).max() > np.finfo(np.float16).max:
                raise ValueError(f"{self.stored.path}: tensor {self.source!r} is too large for F16; choose BF16 or F32")
            yield quants.quantize(values, self.quantization)


def write_gguf(folder: Path, out: Path, quantization: str, about: About, progress: Progress) -> None:
    """Write a checkpoint as a GGUF file that llama.cpp loads too.

    Args:
        folder: holds config.json, model.safetensors or its index and shards, and the tokenizer's files. Sampling
            settings in generation_config.json are copied, too.
        out: may be left incomplete after an error.
        quantization: one of TYPES, for the matrices; "" for the smallest lossless one. Positions, norms and biases
            stay F32.
        progress: called with bytes.

    Raises:
        ValueError: the checkpoint is damaged, incomplete, or of a family that is not supported.
        OSError: a file cannot be read or written.
    """
    config_path = folder / CONFIG
    if not config_path.is_file():
        raise ValueError(f"{folder} holds no checkpoint: it has no {CONFIG}")
    config = language_part(read_json(config_path))
    sampling = sampling_keys(read_json(folder / SAMPLING)) if (folder / SAMPLING).is_file() else {}
    shape = Shape.of(config, config_path)
    stored = _stored_tensors(folder)
    quantization = quantization or _lossless_type(shape, stored)
    tensors, num_rows = _plan(folder, shape, stored, quantization)
    vocabulary = read_vocabulary(folder, num_rows, config)
    mask = config.get("pard_token")
    if mask is not None and (type(mask) is not int or not 0 <= mask < num_rows):
        raise ValueError(f"{config_path}: pard_token is {str(mask)[:20]}, which is no token of its {num_rows}")
    total = sum(tensor.nbytes for tensor in tensors)
    check_room(out.parent, total)
    with closing(GGUFWriter(out, shape.family.architecture)) as writer:
        writer.add_name(about.name or folder.resolve().name)
        if about.license:
            writer.add_license(about.license)
        if about.source_url:
            writer.add_source_url(about.source_url)
        _write_metadata(writer, shape, num_rows, FILE_TYPES[quantization.lower()])
        for key, number in sampling.items():
            if isinstance(number, int):
                writer.add_int32(key, number)
            else:
                writer.add_float32(key, number)
        vocabulary.write(writer)
        if mask is not None:
            writer.add_uint32(PARD_TOKEN, mask)
        for computed, factors in shape.computed.items():
            writer.add_tensor(computed, factors)
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.quantization
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for factors in shape.computed.values():
            writer.write_tensor_data(factors)
        (file,) = writer.fout or []
        done = 0
        for tensor in tensors:
            writer.write_padding(file, file.tell())
            for rows in tensor.data():
                progress("converting", done, total)
                rows.tofile(file)
                done += rows.nbytes
        writer.write_padding(file, file.tell())
        progress("converting", done, total)


def shard_names(index: Path) -> list[str]:
    """The names of the files in an index.

    Raises:
        ValueError: the index is damaged or names files outside its folder.
        OSError: the index cannot be read.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is damaged: it has no weight_map")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors") or re.search(r"[/\\:\0]", name):
            raise ValueError(f"{index} names the file {name!r}, which is not a safetensors file in its folder")
    return names


def _write_metadata(writer: GGUFWriter, shape: Shape, num_rows: int, file_type: int) -> None:
    metadata: dict[str, int | float | str] = {
        "vocab_size": num_rows,
        "context_length": shape.context,
        "embedding_length": shape.width,
        "feed_forward_length": shape.ffn_width,
        "block_count": shape.layers,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        f"attention.layer_norm_{'rms_' if shape.family.ropes else ''}epsilon": shape.epsilon,
        **shape.metadata,
    }
    adders: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in metadata.items():
        adders[type(value)](f"{shape.family.architecture}.{key}", value)
    writer.add_file_type(file_type)


def _lossless_type(shape: Shape, stored: dict[str, Stored]) -> str:
    """The smallest type that holds all matrices exactly."""
    kinds = {tensor.dtype for tensor in stored.values() if len(tensor.shape) > 1}
    exact = len(kinds) == 1 and kinds <= {"F16", "BF16"} and shape.query_scale(1) == 1
    return kinds.pop() if exact else "F32"


def _plan(folder: Path, shape: Shape, stored: dict[str, Stored], quantization: str) -> tuple[list[Tensor], int]:
    """The tensors of the GGUF file in its order, and the number of rows of the embedding."""
    family = shape.family
    embedding = f"{family.others['token_embd']}.weight"
    prefix = next((prefix for prefix in _PREFIXES if prefix + embedding in stored), "")
    found = stored.get(prefix + embedding)
    num_rows = found.shape[0] if found and found.shape else 0
    tensors = []
    used = {"lm_head.weight"}  # a tied head is the embedding; a copy saved under this name is unused
    for wanted in shape.tensors(num_rows):
        source = wanted.source if wanted.source == "lm_head.weight" else prefix + wanted.source
        if source not in stored:
            raise ValueError(f"{folder}: tensor {source!r} is missing")
        tensors.append(_tensor(folder, shape, wanted, source, stored[source], quantization))
        used.add(source)
    for source in sorted(stored.keys() - used):
        if not _BUFFERS.fullmatch(source.removeprefix(prefix)) and not source.startswith(family.skipped):
            raise ValueError(f"{folder}: tensor {source!r} is unknown in {family.architecture}")
    return tensors, num_rows


def _tensor(folder: Path, shape: Shape, wanted: Wanted, source: str, stored: Stored, quantization: str) -> Tensor:
    """Plan a tensor of the GGUF file from one of the checkpoint.

    Raises:
        ValueError: it has another shape, or a type that is not supported.
    """
    name = wanted.name.split(".")[-2]
    transposed = shape.family.transposed and len(wanted.shape) == 2 and wanted.layer is not None
    sizes = wanted.shape[::-1] if transposed else wanted.shape
    if stored.shape != sizes:
        raise ValueError(f"{folder}: tensor {source!r} has shape {list(stored.shape)}, not {list(sizes)}")
    if stored.dtype not in _DTYPES:
        raise ValueError(f"{folder}: tensor {source!r} is of type {stored.dtype}, which is not supported")
    together, change = 1, _as_it_is
    if shape.family.transposed and wanted.layer is not None:
        scale = np.float32(shape.query_scale(wanted.layer) if name == "attn_qkv" else 1)
        together, change = sizes[0], lambda values: _scaled_queries(values.T, scale)
    elif shape.family.adjacent and name in ("attn_q", "attn_k"):
        together, change = shape.head_width, lambda values: _adjacent(values, shape.head_width)
    elif shape.family.norm_offset and name.endswith("norm"):
        change = lambda values: values + np.float32(shape.family.norm_offset)  # noqa: E731
    plain = len(sizes) == 1 or name == "position_embd"
    kind = GGMLQuantizationType["F32" if plain else quantization]
    return Tensor(wanted.name, source, wanted.shape, stored, kind, together, change)


def _as_it_is(values: Floats) -> Floats:
    return values


def _scaled_queries(values: Floats, scale: np.float32) -> Floats:
    """Scale Q in a matrix or bias of Q, K and V."""
    if scale != 1:
        values[: len(values) // 3] *= scale
    return values


def _adjacent(values: Floats, head_width: int) -> Floats:
    """Reorder each head's rows so that pairs rotated together, half a head apart before, are adjacent."""
    pairs: Floats = values.reshape(-1, 2, head_width // 2, *values.shape[1:]).swapaxes(1, 2)
    return pairs.reshape(values.shape)


def _stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint."""
    index = folder / INDEX
    names = shard_names(index) if index.is_file() else [WEIGHTS]
    stored: dict[str, Stored] = {}
    for name in names:
        if not (folder / name).is_file():
            pickles = "" if index.is_file() else "; only safetensors files are read"
            raise ValueError(f"{folder} has no {name}{pickles}")
        for tensor, where in _tensors_of(folder / name).items():
            if tensor in stored:
                raise ValueError(f"{folder}: tensor {tensor!r} is in both {stored[tensor].path.name} and {name}")
            stored[tensor] = where
    return stored


def _tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of one file, after safetensors has checked its header and size."""
    try:
        with safe_open(os.fspath(path), framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from None
    # safetensors cannot give bfloat16 to numpy, so numbers are read at the offsets in the header.
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }
