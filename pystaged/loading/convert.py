"""Convert Hugging Face checkpoints to GGUF files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from safetensors import SafetensorError, safe_open

from pystaged.loading import feature_drafts
from pystaged.loading.families import EAGLE3
from pystaged.loading.metadata import COMMIT, FILE_TYPES, PARD_TOKEN, About
from pystaged.loading.progress import Progress
from pystaged.loading.shapes import Floats, Metadata, Shape, Wanted, language_part
from pystaged.loading.vocabulary import read_json, read_vocabulary
from pystaged.loading.writing import Planned, add_value, write_tensors
from pystaged.options.recommended import sampling_keys
from pystaged.platform.files import check_room

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"  # of older checkpoints
GENERATION = "generation_config.json"
TYPES = ("F32", "F16", "BF16")
DRAFT_TYPES = (*TYPES, "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # libllama's quantizer refuses many drafts
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_INTEGERS = {"I64": np.int64, "I32": np.int32}
_OF_TORCH = {"bfloat": "BF", "float": "F", "uint": "U", "int": "I"}  # its names of types begin so
_ROTATED = ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm")
_PREFIXES = ("", "transformer.", "model.", "language_model.model.", "model.language_model.")
# Tensors that older versions of transformers saved but never loaded: causal masks and rotary frequencies.
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_CHUNK = 1 << 24  # numbers converted at once


@dataclass(frozen=True)
class Stored:
    """A checkpoint's tensor, and its place in its file (offset in bytes) unless it is in memory (`array`)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    array: npt.NDArray[Any] | None = None

    def read(self, start: int, stop: int) -> Floats:
        """Rows `start` to `stop` as float32."""
        raw = self.raw(np.dtype(_DTYPES[self.dtype]), start, stop)
        if self.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def raw(self, dtype: np.dtype[Any], start: int, stop: int) -> npt.NDArray[Any]:
        """Rows as they are stored."""
        if self.array is not None:
            return self.array[start:stop]
        row = int(np.prod(self.shape[1:]))
        offset = self.offset + start * row * dtype.itemsize
        return np.fromfile(self.path, dtype, (stop - start) * row, offset=offset).reshape(stop - start, *self.shape[1:])


def write_gguf(folder: Path, out: Path, quantization: str, about: About, progress: Progress) -> None:
    """Write a checkpoint as a GGUF file that llama.cpp loads too.

    Args:
        folder: holds config.json, model.safetensors (or its index and shards, or pytorch_model.bin), and the
            tokenizer.json with its settings. Sampling settings in generation_config.json are copied, too.
        out: may be left incomplete after an error.
        quantization: one of TYPES, or DRAFT_TYPES where check() says so, for the matrices; "" for the smallest
            lossless one. Positions, norms and biases stay F32.
        progress: called with bytes.

    Raises:
        ValueError: the checkpoint is damaged, incomplete, or of a family that is not supported.
        OSError: a file cannot be read or written.
    """
    config, config_path = read_config(folder)
    config = language_part(config)
    if numbers := feature_drafts.Numbers.of(config, config_path):
        _write_draft(folder, out, numbers, quantization, about, progress)
        return
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    shape, stored = Shape.of(config, config_path), _stored_tensors(folder)
    quantization = quantization or _lossless_type(stored)
    tensors, num_rows = _plan(folder, shape, stored, quantization)
    tensors = [*_computed(shape.computed), *tensors]
    vocabulary = read_vocabulary(folder, num_rows, config, generation)
    mask = config.get("pard_token")
    if mask is not None and (type(mask) is not int or not 0 <= mask < num_rows):
        raise ValueError(f"{config_path}: pard_token is {str(mask)[:20]}, which is no token of its {num_rows}")
    with _writer(folder, out, shape.family.architecture, tensors, about) as writer:
        _write_metadata(writer, shape, num_rows, quantization)
        for key, number in sampling_keys(generation).items():
            if isinstance(number, int):
                writer.add_int32(key, number)
            else:
                writer.add_float32(key, number)
        for method, value in vocabulary:
            getattr(writer, method)(value)
        if mask is not None:
            writer.add_uint32(PARD_TOKEN, mask)
        write_tensors(writer, tensors, progress)


def _write_draft(
    folder: Path, out: Path, numbers: feature_drafts.Numbers, quantization: str, about: About, progress: Progress
) -> None:
    """Write a draft that reads the target's hidden states, as write_gguf does."""
    shape, stored = numbers.shape, _stored_tensors(folder)
    quantization = quantization or _lossless_type(stored)
    plan = feature_drafts.plan(folder, numbers, {name: each.shape for name, each in stored.items()})
    adjacent = numbers.kind == EAGLE3  # in GGUF files
    parts = 0 if adjacent == numbers.neighbours else 2 if adjacent else shape.head_width // 2
    computed: dict[str, npt.NDArray[Any]] = dict(shape.computed)
    if plan.feature_norms:
        for name in plan.feature_norms:
            _check_type(folder, name, stored[name])
        norms = [_finite(stored[name], name, stored[name].read(0, plan.target_width)) for name in plan.feature_norms]
        computed["fc_norm.weight"] = np.stack(norms)
    if plan.ids:
        computed["d2t"] = _token_ids(folder, plan.ids, stored[plan.ids], numbers.num_tokens)
    tensors = [
        *_computed(computed),
        *(_tensor(folder, shape, each, each.source, stored[each.source], quantization, parts) for each in plan.tensors),
    ]
    with _writer(folder, out, numbers.kind, tensors, about) as writer:
        _write_metadata(writer, shape, numbers.num_tokens, quantization, numbers.kind)
        writer.add_uint32(f"{numbers.kind}.target_hidden_size", plan.target_width)
        if numbers.taps:
            writer.add_array(f"{numbers.kind}.target_layers", numbers.taps)
        for key, value in plan.metadata.items():
            add_value(writer, f"{numbers.kind}.{key}", value)
        if numbers.mask_token is not None:
            writer.add_mask_token_id(numbers.mask_token)
        write_tensors(writer, tensors, progress)


def check(config: dict[str, Any], path: Path, quantization: str) -> bool:
    """Check what a config.json says alone, before the weights are there; returns whether it is a draft that reads
    hidden states, of which write_gguf makes a file of any of DRAFT_TYPES. Errors as in write_gguf.

    Args:
        quantization: what the file is to be, in small letters.
    """
    if not feature_drafts.Numbers.of(language_part(config), path):
        Shape.of(config, path)
        return False
    if quantization.upper() not in DRAFT_TYPES:
        known = ", ".join(DRAFT_TYPES).lower()
        raise ValueError(f"{path}: a draft that reads hidden states cannot be {quantization}, only {known}")
    return True


def read_config(folder: Path) -> tuple[dict[str, Any], Path]:
    """The config.json of a checkpoint, and where it is; errors as in write_gguf."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no checkpoint: it has no {CONFIG}")
    return read_json(path), path


@contextmanager
def _writer(folder: Path, out: Path, architecture: str, tensors: list[Planned], about: About) -> Iterator[GGUFWriter]:
    """A writer of a file for which there is room, with what is said about it."""
    check_room(out.parent, sum(tensor.nbytes for tensor in tensors))
    with closing(GGUFWriter(out, architecture)) as writer:
        writer.add_name(about.name or folder.resolve().name)
        said = {"general.license": about.license, "general.source.url": about.source_url, COMMIT: about.commit}
        for key, value in said.items():
            if value:
                writer.add_string(key, value)
        yield writer


def _computed(tensors: Mapping[str, npt.NDArray[Any]]) -> Iterator[Planned]:
    for name, values in tensors.items():
        kind = GGMLQuantizationType.I64 if values.dtype == np.int64 else GGMLQuantizationType.F32
        yield Planned(name, values.shape, kind, lambda values=values: [values])  # type: ignore[misc]


def shard_names(index: Path) -> list[str]:
    """The names of the files in an index. Raises ValueError for one that is damaged or names files outside its folder,
    and OSError for one that cannot be read."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is damaged: it has no weight_map")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors") or re.search(r"[/\\:\0]", name):
            raise ValueError(f"{index} names the file {name!r}, which is not a safetensors file in its folder")
    return names


def _write_metadata(writer: GGUFWriter, shape: Shape, num_rows: int, quantization: str, architecture: str = "") -> None:
    metadata: Metadata = {
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
    for key, value in metadata.items():
        add_value(writer, f"{architecture or shape.family.architecture}.{key}", value)
    writer.add_file_type(FILE_TYPES[quantization.lower()])


def _lossless_type(stored: dict[str, Stored]) -> str:
    """The smallest type that holds all matrices exactly."""
    kinds = {tensor.dtype for tensor in stored.values() if len(tensor.shape) > 1}
    return kinds.pop() if kinds in ({"F16"}, {"BF16"}) else "F32"


def _plan(folder: Path, shape: Shape, stored: dict[str, Stored], quantization: str) -> tuple[list[Planned], int]:
    """The tensors of the GGUF file in its order, and the number of rows of the embedding."""
    family = shape.family
    embedding = f"{family.others['token_embd']}.weight"
    prefix = next((prefix for prefix in _PREFIXES if prefix + embedding in stored), "")
    found = stored.get(prefix + embedding)
    num_rows = found.shape[0] if found and found.shape else 0
    tensors: list[Planned] = []
    used = {"lm_head.weight"}  # a tied head is the embedding; a copy saved under this name is unused
    for wanted in shape.tensors(num_rows):
        source = wanted.source if wanted.source.startswith("lm_head.") else prefix + wanted.source
        if source not in stored:
            raise ValueError(f"{folder}: tensor {source!r} is missing")
        tensors.append(_tensor(folder, shape, wanted, source, stored[source], quantization, 2 * family.adjacent))
        used.add(source)
    for source in sorted(stored.keys() - used):
        if not _BUFFERS.fullmatch(source.removeprefix(prefix)) and not source.startswith(family.skipped):
            raise ValueError(f"{folder}: tensor {source!r} is unknown in {family.architecture}")
    return tensors, num_rows


def _tensor(
    folder: Path, shape: Shape, wanted: Wanted, source: str, stored: Stored, quantization: str, parts: int
) -> Planned:
    """Plan a tensor of the GGUF file from one of the checkpoint. Raises ValueError for another shape, or a type that is
    not supported. parts: of heads that RoPE rotates, see _in_turn; 0 to leave their rows as they are."""
    name, family = wanted.part, shape.family
    is_matrix = len(wanted.shape) == 2
    sizes = wanted.shape[::-1] if family.transposed and is_matrix and wanted.layer is not None else wanted.shape
    if stored.shape != sizes:
        raise ValueError(f"{folder}: tensor {source!r} has shape {list(stored.shape)}, not {list(sizes)}")
    _check_type(folder, source, stored)
    together: int = 1
    change: Callable[[Floats], Floats] = lambda values: values  # noqa: E731
    if family.transposed and wanted.layer is not None:
        together, change = sizes[0], lambda values: values.T
    elif parts and name in _ROTATED:
        together, change = shape.head_width, lambda values: _in_turn(values, shape.head_width, parts)
    elif family.norm_offset and name.endswith("norm"):
        change = lambda values: values + np.float32(family.norm_offset)  # noqa: E731
    kind = GGMLQuantizationType[quantization if is_matrix and name != "position_embd" else "F32"]
    if wanted.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        kind = GGMLQuantizationType.F16
    return Planned(wanted.name, wanted.shape, kind, partial(_rows, stored, source, kind, together, change))


def _rows(
    stored: Stored, source: str, kind: GGMLQuantizationType, together: int, change: Callable[[Floats], Floats]
) -> Iterator[npt.NDArray[Any]]:
    """A tensor's rows as the file stores them, in chunks. Raises ValueError for a number that is not finite, or too
    large for the type.

    Args:
        together: number of rows that `change`, which converts the checkpoint's numbers to the file's, needs together.
    """
    rows = stored.shape[0]
    step = together * max(1, _CHUNK // (together * int(np.prod(stored.shape[1:]))))
    for start in range(0, rows, step):
        values = np.ascontiguousarray(_finite(stored, source, change(stored.read(start, min(rows, start + step)))))
        if kind is GGMLQuantizationType.F16 and np.abs(values).max() > np.finfo(np.float16).max:
            raise ValueError(f"{stored.path}: tensor {source!r} is too large for F16; choose BF16 or F32")
        yield quants.quantize(values, kind)


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
    # As floats, which do not wrap round; only ids that are too large are rounded.
    ids = stored.raw(np.dtype(_INTEGERS[stored.dtype]), 0, count).astype(np.float64) + np.arange(count)
    if ids.min() < 0 or ids.max() >= num_tokens:
        raise ValueError(f"{folder}: tensor {name!r} names tokens outside the target's {num_tokens}")
    if len(np.unique(ids)) < count:
        raise ValueError(f"{folder}: tensor {name!r} names a token twice")
    return ids.astype(np.int64)


def _in_turn(values: Floats, head_width: int, parts: int) -> Floats:
    """Reorder each head's rows, taking one of each of so many equal parts in turn: of two halves, so that pairs that
    RoPE rotates together, half a head apart before, are adjacent; of all such pairs, the other way round."""
    turns: Floats = values.reshape(-1, parts, head_width // parts, *values.shape[1:]).swapaxes(1, 2)
    return turns.reshape(values.shape)


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
        more = _pickled(folder / name) if name == PICKLED else _tensors_of(folder / name)
        if twice := stored.keys() & more.keys():
            raise ValueError(f"{folder}: tensor {min(twice)!r} is in both {stored[min(twice)].path.name} and {name}")
        stored |= more
    return stored


def _tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of one file, after its header and size were checked."""
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


def _pickled(path: Path) -> dict[str, Stored]:
    """The tensors of a pytorch_model.bin."""
    torch = torch_for(path)
    try:
        stored = {}
        for name, tensor in torch.load(path, map_location="cpu", weights_only=True).items():
            kind = str(tensor.dtype).removeprefix("torch.")
            plain = tensor.detach().view(torch.int16) if kind == "bfloat16" else tensor.detach()
            array = plain.numpy().view(np.uint16) if kind == "bfloat16" else plain.numpy()
            for theirs, ours in _OF_TORCH.items():
                kind = kind.replace(theirs, ours)
            stored[str(name)] = Stored(path, kind, array.shape, array=array)
    except Exception as error:  # a damaged file raises anything
        raise ValueError(f"{path} cannot be read ({str(error)[:200]}); save its tensors as safetensors") from None
    return stored


def torch_for(path: Path) -> Any:
    """The module torch, which reads a pytorch_model.bin. Raises ValueError where it is not installed; the message says
    how to convert the file where it is."""
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        raise ValueError(
            f"{path} needs torch, which is not installed; where it is, run this in the file's folder:\n"
            "import torch, safetensors.torch as safe\n"
            "safe.save_file({name: tensor.clone().contiguous() for name, tensor in "
            f'torch.load("{PICKLED}", weights_only=True).items()}}, "{WEIGHTS}")'
        ) from None
    return torch
