"""GPT-2 checkpoints of Hugging Face (safetensors) as GGUF files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from safetensors import SafetensorError, safe_open

from pystaged.files import check_room, whole_file
from pystaged.loading.progress import Progress
from pystaged.loading.vocabulary import Vocabulary, read_json, read_vocabulary

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
}
_MOST = 1 << 24  # far beyond any model
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
# What older versions of transformers saved and never loaded: the causal mask.
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """What config.json says about a GPT-2."""

    width: int
    layers: int
    heads: int
    context: int
    ffn_width: int
    epsilon: float
    tied: bool
    scale_scores: bool
    scale_by_layer: bool

    @classmethod
    def of(cls, config: dict[str, Any], path: Path) -> Shape:
        """Read and check it.

        Raises:
            ValueError: another architecture, a variant that GGUF cannot express, or an impossible shape.
        """
        architecture = config.get("model_type")
        if architecture != "gpt2":
            raise ValueError(f"{path}: the architecture {architecture!r} is not supported, only 'gpt2'")
        if config.get("add_cross_attention"):
            raise ValueError(f"{path}: GPT-2 with cross-attention is not supported")
        activation = config.get("activation_function", "gelu_new")
        if activation not in _TANH_GELU:
            raise ValueError(f"{path}: the activation {activation!r} is not supported, only {', '.join(_TANH_GELU)}")

        def number(name: str, default: int | None = None) -> int:
            value = config.get(name, default)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
                raise ValueError(f"{path}: {name} is {value!r}, but must be a whole number between 1 and {_MOST}")
            return value

        width, heads = number("n_embd"), number("n_head")
        epsilon = config.get("layer_norm_epsilon", 1e-5)
        if not isinstance(epsilon, float) or not 0 < epsilon < 1:
            raise ValueError(f"{path}: layer_norm_epsilon is {epsilon!r}, but must be between 0 and 1")
        if width % heads:
            raise ValueError(f"{path}: a width (n_embd) of {width} does not split into {heads} heads (n_head)")
        return cls(
            width=width,
            layers=number("n_layer"),
            heads=heads,
            context=number("n_positions", config.get("n_ctx")),
            ffn_width=4 * width if config.get("n_inner") is None else number("n_inner"),
            epsilon=epsilon,
            tied=config.get("tie_word_embeddings", True) is not False,
            scale_scores=config.get("scale_attn_weights", True) is not False,
            scale_by_layer=config.get("scale_attn_by_inverse_layer_idx", False) is True,
        )

    def query_scale(self, layer: int) -> float:
        """What queries are multiplied by so that dividing scores by sqrt(head width) is all that is left to do."""
        unscaled = 1.0 if self.scale_scores else float(np.sqrt(self.width // self.heads))
        return unscaled / (layer + 1 if self.scale_by_layer else 1)


@dataclass(frozen=True)
class Stored:
    """Where a tensor of a checkpoint lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> Floats:
        """Its numbers."""
        raw = np.fromfile(self.path, _DTYPES[self.dtype], count=int(np.prod(self.shape)), offset=self.offset)
        if self.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32).reshape(self.shape)


@dataclass(frozen=True)
class Tensor:
    """One tensor of the GGUF file and what it is made from."""

    name: str
    source: str
    shape: tuple[int, ...]
    stored: Stored
    transposed: bool
    query_scale: float
    quantization: GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        block, size = GGML_QUANT_SIZES[self.quantization]
        return int(np.prod(self.shape)) // block * size

    def data(self) -> npt.NDArray[Any]:
        """Its numbers as the file holds them.

        Raises:
            ValueError: numbers that are not finite, or too large for the type.
        """
        values = self.stored.read()
        if not np.isfinite(values).all():
            raise ValueError(f"{self.stored.path}: tensor {self.source!r} holds numbers that are not finite")
        if self.transposed:
            values = np.ascontiguousarray(values.T)
        if self.query_scale != 1:
            values[: len(values) // 3] *= np.float32(self.query_scale)
        if self.quantization is GGMLQuantizationType.F16 and np.abs(values).max() > np.finfo(np.float16).max:
            raise ValueError(f"{self.stored.path}: tensor {self.source!r} is too large for F16; choose BF16 or F32")
        packed: npt.NDArray[Any] = quants.quantize(values, self.quantization)
        return packed


def convert(
    folder: Path,
    out: Path,
    *,
    quantization: str = "F32",
    name: str = "",
    license_name: str = "",
    source_url: str = "",
    progress: Progress = lambda *_: None,
) -> None:
    """Write a GPT-2 checkpoint as a GGUF file that llama.cpp loads too.

    Args:
        folder: with config.json, model.safetensors or its index and shards, and the tokenizer's files.
        out: written under a temporary name beside it, and moved there when whole.
        quantization: F32, F16 or BF16, for the matrices; positions, norms and biases stay F32.
        name: of the model, the folder's by default.
        license_name: put into the file where given, and likewise source_url.
        progress: called with bytes.

    Raises:
        ValueError: a checkpoint that is damaged, incomplete, or not a GPT-2.
        OSError: a file cannot be read or written.
    """
    about = {"name": name, "license_name": license_name, "source_url": source_url}
    with whole_file(out) as part:
        write_gguf(folder, part, quantization=quantization, progress=progress, **about)


def write_gguf(
    folder: Path,
    out: Path,
    *,
    quantization: str,
    name: str,
    license_name: str,
    source_url: str,
    progress: Progress,
) -> None:
    """The same into a file that may be left half written."""
    if quantization not in FILE_TYPES:
        raise ValueError(f"unknown type {quantization!r}: choose from {', '.join(FILE_TYPES)}")
    config_path = folder / CONFIG
    if not config_path.is_file():
        raise ValueError(f"{folder} holds no checkpoint: it has no {CONFIG}")
    config = read_json(config_path)
    shape = Shape.of(config, config_path)
    tensors, num_rows = _plan(folder, shape, GGMLQuantizationType[quantization])
    vocabulary = read_vocabulary(folder, num_rows, config)
    check_room(out.parent, sum(tensor.nbytes for tensor in tensors))
    about = {"add_name": name or folder.resolve().name, "add_license": license_name, "add_source_url": source_url}
    with closing(GGUFWriter(out, "gpt2")) as writer:
        for method, value in about.items():
            if value:
                getattr(writer, method)(value)
        _write_metadata(writer, shape, vocabulary, FILE_TYPES[quantization])
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.quantization
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            progress("converting", done, total)
            writer.write_tensor_data(tensor.data())
            done += tensor.nbytes
        progress("converting", done, total)


def shard_names(index: Path) -> list[str]:
    """The files an index names.

    Raises:
        ValueError: an index that is damaged or names files outside its folder.
        OSError: the index cannot be read.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is damaged: it has no weight_map")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not is_plain_name(name) or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names the file {name!r}, which is no safetensors file in its folder")
    return names


def is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder on every system."""
    return bool(name) and name not in (".", "..") and not re.search(r"[/\\:\0]", name)


def _write_metadata(writer: GGUFWriter, shape: Shape, vocabulary: Vocabulary, file_type: LlamaFileType) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_eps(shape.epsilon)
    writer.add_file_type(file_type)
    vocabulary.write(writer)


def _plan(folder: Path, shape: Shape, quantization: GGMLQuantizationType) -> tuple[list[Tensor], int]:
    """The tensors of the GGUF file in its order, and the number of rows of the embedding."""
    stored = _stored_tensors(folder)
    prefix = "transformer." if "transformer.wte.weight" in stored else ""
    embedding = stored.get(f"{prefix}wte.weight")
    num_rows = embedding.shape[0] if embedding and embedding.shape else 0
    tensors = []
    used = set()
    for name, part, sizes, layer in _expected(shape, num_rows):
        source = part if part == "lm_head.weight" else prefix + part
        if source not in stored:
            raise ValueError(f"{folder}: tensor {source!r} is missing")
        transposed = len(sizes) == 2 and layer is not None
        wanted = sizes[::-1] if transposed else sizes
        if stored[source].shape != wanted:
            raise ValueError(f"{folder}: tensor {source!r} has shape {list(stored[source].shape)}, not {list(wanted)}")
        if stored[source].dtype not in _DTYPES:
            raise ValueError(f"{folder}: tensor {source!r} is of type {stored[source].dtype}, which is not supported")
        plain = len(sizes) == 1 or part == "wpe.weight"
        scale = shape.query_scale(layer) if layer is not None and ".attn_qkv." in name else 1.0
        kind = GGMLQuantizationType.F32 if plain else quantization
        tensors.append(Tensor(name, source, sizes, stored[source], transposed, scale, kind))
        used.add(source)
    # A tied head is the embedding, whatever else was saved under its name.
    unknown = [
        source
        for source in sorted(stored.keys() - used - {"lm_head.weight"})
        if not _BUFFERS.fullmatch(source.removeprefix(prefix))
    ]
    if unknown:
        raise ValueError(f"{folder}: tensor {unknown[0]!r} has no place in a GPT-2")
    return tensors, num_rows


def _expected(shape: Shape, num_rows: int) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
    """Names in the GGUF file and in the checkpoint, sizes with outputs before inputs, and the layer.

    One by one, so that an absurd number of layers ends at the first missing tensor.
    """
    width, ffn = shape.width, shape.ffn_width
    yield "token_embd.weight", "wte.weight", (num_rows, width), None
    yield "position_embd.weight", "wpe.weight", (shape.context, width), None
    yield "output_norm.weight", "ln_f.weight", (width,), None
    yield "output_norm.bias", "ln_f.bias", (width,), None
    if not shape.tied:
        yield "output.weight", "lm_head.weight", (num_rows, width), None
    outputs = {"attn_qkv": 3 * width, "ffn_up": ffn}
    for layer in range(shape.layers):
        for source, name in _LAYER.items():
            rows = outputs.get(name, width)
            sizes = (rows,) if "norm" in name else (rows, ffn if name == "ffn_down" else width)
            yield f"blk.{layer}.{name}.weight", f"h.{layer}.{source}.weight", sizes, layer
            yield f"blk.{layer}.{name}.bias", f"h.{layer}.{source}.bias", (rows,), layer


def _stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint."""
    index = folder / INDEX
    names = shard_names(index) if index.is_file() else [WEIGHTS]
    stored: dict[str, Stored] = {}
    for name in names:
        if not (folder / name).is_file():
            pickles = "" if index.is_file() else "; files of other kinds than safetensors are not read"
            raise ValueError(f"{folder} has no {name}{pickles}")
        for tensor, where in _tensors_of(folder / name).items():
            if tensor in stored:
                raise ValueError(f"{folder}: tensor {tensor!r} stands in {stored[tensor].path.name} and in {name}")
            stored[tensor] = where
    return stored


def _tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of one file, whose header and size safetensors has found to be sound."""
    try:
        with safe_open(os.fspath(path), framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from None
    # safetensors gives no bfloat16 to numpy, so numbers are read from where the header says they are.
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }
