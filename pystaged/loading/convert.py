"""Convert Hugging Face checkpoints to GGUF files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from safetensors import SafetensorError, safe_open

from pystaged.files import check_room
from pystaged.loading import assistants, feature_drafts
from pystaged.loading.config_reader import language_part
from pystaged.loading.families import EAGLE3
from pystaged.loading.file_types import FILE_TYPES
from pystaged.loading.metadata import PARD_TOKEN, About
from pystaged.loading.pickled import tensors_of
from pystaged.loading.progress import Progress
from pystaged.loading.recurrent import Change, Floats, Metadata
from pystaged.loading.shapes import AHEAD, Shape, Wanted
from pystaged.loading.vocabulary import read_json, read_vocabulary
from pystaged.recommended import sampling_keys

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"  # of older checkpoints
SAMPLING = "generation_config.json"
TYPES = ("F32", "F16", "BF16")
DRAFT_TYPES = (*TYPES, "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # libllama's quantizer refuses many drafts
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_INTEGERS = {"I64": np.int64, "I32": np.int32}
_ROTATED = ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm")
_PREFIXES = ("", "transformer.", "model.", "language_model.model.", "model.language_model.")
# Tensors that older versions of transformers saved but never loaded: causal masks and rotary frequencies.
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_PACKED = ("_blocks", "_scales")  # of weights in MXFP4
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

    def bytes(self, start: int, count: int) -> npt.NDArray[np.uint8]:
        """Some of its bytes."""
        return np.fromfile(self.path, np.uint8, count=count, offset=self.offset + start)

    def rows(self, first: int, count: int) -> Stored:
        """Some of its rows."""
        row = int(np.prod(self.shape[1:])) * np.dtype(_DTYPES[self.dtype]).itemsize
        return replace(self, shape=(count, *self.shape[1:]), offset=self.offset + first * row)


@dataclass(frozen=True)
class Tensor:
    """One tensor of the GGUF file and its source.

    Args:
        parts: the checkpoint's tensors that follow each other in it: one, or one for each expert.
        together: number of rows that `change` needs together.
        change: converts the checkpoint's numbers to the file's.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    parts: tuple[Stored, ...]
    quantization: GGMLQuantizationType
    together: int
    change: Change

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
        for stored in self.parts:
            rows = stored.shape[0]
            groups = max(1, _CHUNK // (self.together * int(np.prod(stored.shape[1:]))))
            for start in range(0, rows, groups * self.together):
                values = stored.read(start, min(rows, start + groups * self.together))
                values = np.ascontiguousarray(_finite(stored, self.source, self.change(values)))
                if self.quantization is GGMLQuantizationType.F16 and np.abs(values).max() > np.finfo(np.float16).max:
                    raise ValueError(f"{stored.path}: tensor {self.source!r} is too large for F16; choose BF16 or F32")
                yield quants.quantize(values, self.quantization)


@dataclass(frozen=True)
class PackedTensor:
    """The weights of all experts in MXFP4, which are stored in other places in the file, but equal.

    Args:
        blocks, scales: of the checkpoint, uint8[experts, rows, blocks, 16] and uint8[experts, rows, blocks].
        first, step: which rows it takes.
    """

    name: str
    shape: tuple[int, ...]
    blocks: Stored
    scales: Stored
    first: int
    step: int
    quantization: GGMLQuantizationType = GGMLQuantizationType.MXFP4

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape)) // 32 * 17

    def data(self) -> Iterator[npt.NDArray[Any]]:
        """The tensor's bytes, an expert at a time."""
        _, rows, count, half = self.blocks.shape
        for i in range(self.shape[0]):
            pairs = self.blocks.bytes(i * rows * count * half, rows * count * half).reshape(rows, count, half)
            numbers = np.stack([pairs & 15, pairs >> 4], -1).reshape(rows, count, 2 * half)  # neighbours share a byte
            halves = numbers[..., :half] | numbers[..., half:] << 4  # a number and the one half a block later do
            scales = self.scales.bytes(i * rows * count, rows * count).reshape(rows, count, 1)
            yield np.concatenate([scales, halves], -1)[self.first :: self.step]


AnyTensor: TypeAlias = Tensor | PackedTensor


def write_gguf(folder: Path, out: Path, quantization: str, about: About, progress: Progress) -> None:
    """Write a checkpoint as a GGUF file that llama.cpp loads too.

    Args:
        folder: holds config.json, model.safetensors (or its index and shards, or pytorch_model.bin), and the
            tokenizer's files. Sampling settings in generation_config.json are copied, too.
        out: may be left incomplete after an error.
        quantization: one of TYPES, or DRAFT_TYPES where check() says so, for the matrices; "" for the smallest
            lossless one. Positions, norms, routers and biases stay F32.
        progress: called with bytes.

    Raises:
        ValueError: the checkpoint is damaged, incomplete, or of a family that is not supported.
        OSError: a file cannot be read or written.
    """
    config, config_path = read_config(folder)
    if found := assistants.read_assistant(config, config_path):
        _write_assistant(folder, out, *found, quantization, about, progress)
        return
    config = language_part(config)
    if numbers := feature_drafts.Numbers.of(config, config_path):
        _write_draft(folder, out, numbers, quantization, about, progress)
        return
    sampling = sampling_keys(read_json(folder / SAMPLING)) if (folder / SAMPLING).is_file() else {}
    shape, stored = Shape.of(config, config_path), _stored_tensors(folder)
    if not any(name.startswith(AHEAD) for name in stored):
        shape = shape.without_ahead()  # transformers saves checkpoints without them
    quantization = quantization or _lossless_type(shape, stored)
    tensors, num_rows = _plan(folder, shape, stored, quantization)
    vocabulary = read_vocabulary(folder, num_rows, config)
    mask = config.get("pard_token")
    if mask is not None and (type(mask) is not int or not 0 <= mask < num_rows):
        raise ValueError(f"{config_path}: pard_token is {str(mask)[:20]}, which is no token of its {num_rows}")
    is_packed = any(isinstance(tensor, PackedTensor) for tensor in tensors)
    file_type = int(LlamaFileType.MOSTLY_MXFP4_MOE) if is_packed else FILE_TYPES[quantization.lower()]
    with _writer(folder, out, shape.architecture, tensors, about) as writer:
        _write_metadata(writer, shape, num_rows, file_type)
        for key, number in sampling.items():
            if isinstance(number, int):
                writer.add_int32(key, number)
            else:
                writer.add_float32(key, number)
        vocabulary.write(writer)
        if mask is not None:
            writer.add_uint32(PARD_TOKEN, mask)
        _write_tensors(writer, shape.computed, tensors, progress)


def _write_draft(
    folder: Path, out: Path, numbers: feature_drafts.Numbers, quantization: str, about: About, progress: Progress
) -> None:
    """Write a draft that reads the target's hidden states, as write_gguf does."""
    shape, stored = numbers.shape, _stored_tensors(folder)
    quantization = quantization or _lossless_type(shape, stored)
    plan = feature_drafts.plan(folder, numbers, {name: each.shape for name, each in stored.items()})
    adjacent = numbers.kind == EAGLE3
    tensors: list[AnyTensor] = [
        _tensor(folder, shape, wanted, [wanted.source], stored, quantization, adjacent) for wanted in plan.tensors
    ]
    computed: dict[str, npt.NDArray[Any]] = dict(shape.computed)
    if plan.feature_norms:
        for name in plan.feature_norms:
            _check_type(folder, name, stored[name])
        norms = [_finite(stored[name], name, stored[name].read(0, plan.target_width)) for name in plan.feature_norms]
        computed["fc_norm.weight"] = np.stack(norms)
    if plan.ids:
        computed["d2t"] = _token_ids(folder, plan.ids, stored[plan.ids], numbers.num_tokens)
    with _writer(folder, out, numbers.kind, tensors, about) as writer:
        _write_metadata(writer, shape, numbers.num_tokens, FILE_TYPES[quantization.lower()], numbers.kind)
        writer.add_uint32(f"{numbers.kind}.target_hidden_size", plan.target_width)
        if numbers.taps:
            writer.add_array(f"{numbers.kind}.target_layers", numbers.taps)
        for key, value in plan.metadata.items():
            if isinstance(value, bool):
                writer.add_bool(f"{numbers.kind}.{key}", value)
            else:
                writer.add_uint32(f"{numbers.kind}.{key}", value)
        if numbers.mask_token is not None:
            writer.add_mask_token_id(numbers.mask_token)
        _write_tensors(writer, computed, tensors, progress)


def _write_assistant(
    folder: Path, out: Path, shape: Shape, wanted: list[Wanted], quantization: str, about: About, progress: Progress
) -> None:
    """Write an assistant of Gemma 4, as write_gguf does."""
    stored = _stored_tensors(folder)
    quantization = quantization or _lossless_type(shape, stored)
    for each in wanted:
        if each.source not in stored:
            raise ValueError(f"{folder}: tensor {each.source!r} is missing")
    for name in sorted(stored.keys() - {each.source for each in wanted}):
        if not assistants.UNUSED.fullmatch(name):
            raise ValueError(f"{folder}: tensor {name!r} is unknown in {shape.architecture}")
    tensors: list[AnyTensor] = [_tensor(folder, shape, each, [each.source], stored, quantization) for each in wanted]
    with _writer(folder, out, shape.architecture, tensors, about) as writer:
        _write_metadata(writer, shape, wanted[0].shape[0], FILE_TYPES[quantization.lower()])
        _write_tensors(writer, shape.computed, tensors, progress)


def check(config: dict[str, Any], path: Path, quantization: str) -> bool:
    """Check what a config.json says alone, before the weights are there; errors as in write_gguf.

    Args:
        quantization: what the file is to be, in small letters.

    Returns:
        Whether write_gguf makes a file of any of DRAFT_TYPES: of a draft that reads hidden states, and of a checkpoint
        with experts in MXFP4, which stay so.
    """
    config = language_part(config)
    if not assistants.read_assistant(config, path) and not feature_drafts.Numbers.of(config, path):
        Shape.of(config, path)
        if not config.get("quantization_config"):
            return False
    if quantization.upper() not in DRAFT_TYPES:
        raise ValueError(
            f"{path}: a checkpoint of this kind cannot be {quantization}, only {', '.join(DRAFT_TYPES).lower()}"
        )
    return True


def read_config(folder: Path) -> tuple[dict[str, Any], Path]:
    """The config.json of a checkpoint, and where it is; errors as in write_gguf."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no checkpoint: it has no {CONFIG}")
    return read_json(path), path


@contextmanager
def _writer(folder: Path, out: Path, architecture: str, tensors: list[AnyTensor], about: About) -> Iterator[GGUFWriter]:
    """A writer of a file for which there is room, with what is said about it."""
    check_room(out.parent, sum(tensor.nbytes for tensor in tensors))
    with closing(GGUFWriter(out, architecture)) as writer:
        writer.add_name(about.name or folder.resolve().name)
        if about.license:
            writer.add_license(about.license)
        if about.source_url:
            writer.add_source_url(about.source_url)
        yield writer


def _write_tensors(
    writer: GGUFWriter, computed: Mapping[str, npt.NDArray[Any]], tensors: list[AnyTensor], progress: Progress
) -> None:
    for name, values in computed.items():
        writer.add_tensor(name, values)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.quantization
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in computed.values():
        writer.write_tensor_data(values)
    (file,) = writer.fout or []
    done, total = 0, sum(tensor.nbytes for tensor in tensors)
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


def _write_metadata(
    writer: GGUFWriter, shape: Shape, num_rows: int, file_type: int, architecture: str | None = None
) -> None:
    metadata: Metadata = {
        "vocab_size": num_rows,
        "context_length": shape.context,
        "embedding_length": shape.width,
        "feed_forward_length": shape.ffn_width,
        "block_count": shape.layers + shape.ahead,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        f"attention.layer_norm_{'rms_' if shape.family.ropes else ''}epsilon": shape.epsilon,
        **shape.metadata,
    }
    adders: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        adders[type(value)](f"{architecture or shape.architecture}.{key}", value)
    writer.add_file_type(file_type)


def _lossless_type(shape: Shape, stored: dict[str, Stored]) -> str:
    """The smallest type that holds all matrices exactly."""
    kinds = {tensor.dtype for tensor in stored.values() if len(tensor.shape) > 1 and tensor.dtype != "U8"}
    exact = len(kinds) == 1 and kinds <= {"F16", "BF16"} and shape.query_scale(1) == 1
    return kinds.pop() if exact else "F32"


def _plan(folder: Path, shape: Shape, stored: dict[str, Stored], quantization: str) -> tuple[list[AnyTensor], int]:
    """The tensors of the GGUF file in its order, and the number of rows of the embedding."""
    family = shape.family
    embedding = f"{family.others['token_embd']}.weight"
    prefix = next((prefix for prefix in _PREFIXES if prefix + embedding in stored), "")
    found = stored.get(prefix + embedding)
    num_rows = found.shape[0] if found and found.shape else 0
    tensors: list[AnyTensor] = []
    used = {"lm_head.weight"}  # a tied head is the embedding; a copy saved under this name is unused
    for wanted in shape.tensors(num_rows):
        if packed := _packed(folder, wanted, prefix + wanted.source, stored):
            tensors.append(packed)
            used.update(prefix + wanted.source + suffix for suffix in _PACKED)
            continue
        beside = wanted.source.startswith(("lm_head.", AHEAD))
        sources = [source if beside else prefix + source for source in shape.sources(wanted)]
        for each in sources:
            if each not in stored:
                raise ValueError(f"{folder}: tensor {each!r} is missing")
        tensors.append(_tensor(folder, shape, wanted, sources, stored, quantization))
        used.update(sources)
    for source in sorted(stored.keys() - used):
        if not _BUFFERS.fullmatch(source.removeprefix(prefix)) and not source.startswith(family.skipped):
            raise ValueError(f"{folder}: tensor {source!r} is unknown in {family.architecture}")
    return tensors, num_rows


def _packed(folder: Path, wanted: Wanted, source: str, stored: Mapping[str, Stored]) -> PackedTensor | None:
    """Plan a tensor of experts in MXFP4; None if the checkpoint has it in another type."""
    names = [source + suffix for suffix in _PACKED]
    blocks, scales = (stored.get(name) for name in names)
    if not blocks or not scales or len(wanted.stored) != 3:
        return None
    experts, inputs, outputs = wanted.stored
    for name, found, size in zip(
        names, (blocks, scales), ((experts, outputs, inputs // 32, 16), (experts, outputs, inputs // 32)), strict=True
    ):
        if inputs % 32 or found.shape != size or found.dtype != "U8":
            raise ValueError(f"{folder}: tensor {name!r} is {found.dtype}{list(found.shape)}, not U8{list(size)}")
    step = outputs // wanted.shape[1]
    return PackedTensor(wanted.name, wanted.shape, blocks, scales, int("up" in wanted.part.split("_")), step)


def _tensor(
    folder: Path,
    shape: Shape,
    wanted: Wanted,
    sources: Sequence[str],
    all_stored: Mapping[str, Stored],
    quantization: str,
    adjacent: bool | None = None,
) -> Tensor:
    """Plan a tensor of the GGUF file from those of the checkpoint.

    Args:
        sources: their names: one, or one for each expert.
        adjacent: in place of the family's; norms of heads are reordered, too.

    Raises:
        ValueError: it has another shape, or a type that is not supported.
    """
    name = wanted.part
    transposed = shape.family.transposed and len(wanted.shape) == 2 and wanted.layer is not None
    sizes = wanted.stored or (wanted.shape[::-1] if transposed else wanted.shape)
    sizes = sizes[1:] if "*" in wanted.source else sizes
    for source in sources:
        if all_stored[source].shape != sizes:
            shape_found = list(all_stored[source].shape)
            raise ValueError(f"{folder}: tensor {source!r} has shape {shape_found}, not {list(sizes)}")
        _check_type(folder, source, all_stored[source])
    parts = [all_stored[source] for source in sources]
    if wanted.first is not None:
        parts = [part.rows(wanted.first, wanted.shape[0]) for part in parts]
    together: int = 1
    change: Change = lambda values: values  # noqa: E731
    if whole := shape.change(wanted):
        together, change = parts[0].shape[0], whole
    elif shape.family.transposed and wanted.layer is not None:
        scale = np.float32(shape.query_scale(wanted.layer) if name == "attn_qkv" else 1)
        together, change = sizes[0], lambda values: _scaled_queries(values.T, scale)
    elif (shape.family.adjacent if adjacent is None else adjacent) and name in _ROTATED:
        together, change = shape.head_width, lambda values: _adjacent(values, shape.head_width)
    elif shape.family.fused_experts and name.endswith("_exps"):
        first, step = int(name == "ffn_up_exps"), 1 if name == "ffn_down_exps" else 2
        change = lambda values: values.swapaxes(1, -1)[:, first::step]  # noqa: E731
    elif shape.family.norm_offset and name.endswith("norm") and name != "ssm_norm":
        change = lambda values: values + np.float32(shape.family.norm_offset)  # noqa: E731
    is_matrix = len(sizes) == 2 or name.endswith("_exps")
    plain = not is_matrix or name in ("position_embd", "ffn_gate_inp") or wanted.name.endswith(".bias")
    kind = GGMLQuantizationType["F32" if plain else quantization]
    if wanted.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        kind = GGMLQuantizationType.F16
    return Tensor(wanted.name, sources[0], wanted.shape, tuple(parts), kind, together, change)


def _check_type(folder: Path, name: str, stored: Stored) -> None:
    if stored.dtype not in _DTYPES:
        raise ValueError(f"{folder}: tensor {name!r} is of type {stored.dtype}, which is not supported")


def _finite(stored: Stored, name: str, values: Floats) -> Floats:
    if not np.isfinite(values).all():
        raise ValueError(f"{stored.path}: tensor {name!r} holds numbers that are not finite")
    return values


def _token_ids(folder: Path, name: str, stored: Stored, num_tokens: int) -> npt.NDArray[np.int64]:
    """The target's ids of a draft's tokens, from their differences to the draft's own ids."""
    if stored.dtype not in _INTEGERS:
        raise ValueError(f"{folder}: tensor {name!r} is of type {stored.dtype}, not of integers")
    count = stored.shape[0]
    differences = np.fromfile(stored.path, _INTEGERS[stored.dtype], count=count, offset=stored.offset)
    if (np.abs(differences.astype(np.float64)) >= num_tokens).any():
        raise ValueError(f"{folder}: tensor {name!r} names tokens outside the target's {num_tokens}")
    ids = differences.astype(np.int64) + np.arange(count)
    if ids.min() < 0 or ids.max() >= num_tokens:
        raise ValueError(f"{folder}: tensor {name!r} names tokens outside the target's {num_tokens}")
    if len(np.unique(ids)) < count:
        raise ValueError(f"{folder}: tensor {name!r} names a token twice")
    return ids


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
    found = [name for name in (WEIGHTS, PICKLED) if (folder / name).is_file()][:1]
    names = shard_names(index) if index.is_file() else found
    if not names:
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {PICKLED}; save its tensors as safetensors")
    stored: dict[str, Stored] = {}
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}")
        for tensor, where in _tensors_of(folder / name).items():
            if tensor in stored:
                raise ValueError(f"{folder}: tensor {tensor!r} is in both {stored[tensor].path.name} and {name}")
            stored[tensor] = where
    return stored


def _tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of one file, after its header and size were checked."""
    if path.name == PICKLED:
        return {name: Stored(path, *place) for name, place in tensors_of(path).items()}
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
