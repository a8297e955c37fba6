"""Widen and deepen a GGUF of GPT-2's or Llama's architecture without changing the function it computes.

The result costs what a model of its shape costs, and says what the small one says.

GPT-2, wider: the residual stream, the heads and the hidden units are each repeated k = width / old width times, so
every activation is a tiling of the source's. A matrix over k equal copies of its input is W / k on each; with k a
power of two only the scales of a quantized matrix change, not its integers. Deeper: layers whose two output projections
are zero are put between the original ones; their other weights are copies, so they cost what any layer costs.

Llama, wider: zeros are put behind the residual stream, the hidden units and the heads; each group of query heads stays
with its keys and values. The mean square that a norm divides by is then over more entries, so the norm's weights and
epsilon are corrected. Deeper: as for GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    ReaderTensor,
    quants,
)

from pystaged.files import whole_file
from pystaged.loading.file_types import FILE_TYPES

TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
LAYER_TENSORS = (
    "attn_norm.weight",
    "attn_norm.bias",
    "attn_qkv.weight",
    "attn_qkv.bias",
    "attn_output.weight",
    "attn_output.bias",
    "ffn_norm.weight",
    "ffn_norm.bias",
    "ffn_up.weight",
    "ffn_up.bias",
    "ffn_down.weight",
    "ffn_down.bias",
)
RESIDUAL_WRITERS = ("attn_output.", "ffn_down.")
KINDS = {str: GGUFValueType.STRING, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
# Of a layer of Llama: what the outputs and the inputs of each tensor are.
LLAMA_TENSORS: dict[str, tuple[str, ...]] = {
    "attn_norm.weight": ("width",),
    "attn_q.weight": ("q", "width"),
    "attn_k.weight": ("kv", "width"),
    "attn_v.weight": ("kv", "width"),
    "attn_output.weight": ("width", "q"),
    "ffn_norm.weight": ("width",),
    "ffn_gate.weight": ("ffn", "width"),
    "ffn_up.weight": ("ffn", "width"),
    "ffn_down.weight": ("width", "ffn"),
}
EMBEDDINGS = ("token_embd.weight", "position_embd.weight", "output.weight")

Floats = npt.NDArray[np.float32]
Packed = npt.NDArray[Any]


@dataclass(frozen=True)
class GrownTensor:
    """One tensor of the grown model and how to make it from the source's."""

    name: str
    source: ReaderTensor
    copies: int
    quantization: GGMLQuantizationType
    silent: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the grown tensor, outputs before inputs."""
        sizes = [int(size) for size in reversed(self.source.shape.tolist())]
        kept = 1 if self._part in EMBEDDINGS else 0
        return tuple(size if axis < kept else size * self.copies for axis, size in enumerate(sizes))

    @property
    def nbytes(self) -> int:
        """Bytes of the grown tensor in the file."""
        block, size = GGML_QUANT_SIZES[self.quantization]
        return int(np.prod(self.shape, dtype=np.int64)) // block * size

    def data(self) -> Packed:
        """The grown tensor, packed for the file."""
        values = self._scaled()
        if values.ndim == 1:
            return self._repeat_outputs(values)
        if values.shape[-1] % GGML_QUANT_SIZES[self.quantization][0]:
            values = np.tile(values, (1, self.copies))
            return self._repeat_outputs(_pack(values, self.quantization))
        # Whole blocks repeat with the matrix, so packing the small matrix is enough.
        return self._repeat_outputs(np.tile(_pack(values, self.quantization), (1, self.copies)))

    @property
    def _part(self) -> str:
        return self.source.name.split(".", 2)[-1] if self.source.name.startswith("blk.") else self.source.name

    def _scaled(self) -> Floats:
        values: Floats = quants.dequantize(self.source.data, self.source.tensor_type)
        if self.silent:
            return np.zeros_like(values)
        matrix = values.ndim == 2 and self._part not in EMBEDDINGS
        # The head sums over the copies too. It may share its rows with the embedding, so the final norm is divided.
        if matrix or self._part.startswith("output_norm."):
            values = values / np.float32(self.copies)
        return values

    def _repeat_outputs(self, values: Packed) -> Packed:
        if self._part in EMBEDDINGS:
            return values
        # Queries, keys and values are stacked, and each of the three has its heads repeated.
        stacks = np.split(values, 3) if self._part.startswith("attn_qkv.") else [values]
        repeats = (self.copies,) + (1,) * (values.ndim - 1)
        return np.concatenate([np.tile(stack, repeats) for stack in stacks])


def grow(source: Path, out: Path, *, width: int, layers: int, quantization: str) -> None:
    """Write a wider and deeper GPT-2 that computes what `source` computes.

    Args:
        source: GPT-2 GGUF in any type that gguf can dequantize.
        out: written under a temporary name beside it, and moved there when whole.
        width: embedding length of the result, a multiple of the source's.
        layers: layers of the result, at least the source's.
        quantization: F32, F16, Q8_0 or Q4_0, for the matrices; positions, norms and biases stay F32.

    Raises:
        ValueError: not a GPT-2 GGUF, or a shape or type it cannot be grown to.
        OSError: a file cannot be read or written.
    """
    reader = GGUFReader(source)
    _check(reader, "gpt2", layers, quantization)
    old_width = _value(reader, "gpt2.embedding_length")
    if width < 1 or width % old_width:
        raise ValueError(f"width {width} is not a multiple of the source's width {old_width}")
    tensors = _plan(reader, width, layers, GGMLQuantizationType[quantization])
    _write(reader, out, "gpt2", _changed_metadata(reader, source, width, layers, quantization), tensors)


def grow_llama(
    source: Path, out: Path, *, width: int, layers: int, heads: int, kv_heads: int, ffn_width: int, quantization: str
) -> None:
    """Write a wider and deeper model of Llama's architecture that computes what `source` computes.

    Args:
        source: GGUF in any type that gguf can dequantize, without biases and rope factors.
        out: written under a temporary name beside it, and moved there when whole.
        width: embedding length of the result.
        layers: layers of the result.
        heads: of queries, each as wide as the source's.
        kv_heads: heads of keys and values, a divisor of `heads`; so many query heads share one as in the source, at
            least.
        ffn_width: hidden units of a layer. No size may be smaller than the source's.
        quantization: F32, F16, Q8_0, Q4_0 or Q4_1, for the matrices; norms stay F32.

    Raises:
        ValueError: not such a GGUF, or a shape or type it cannot be grown to.
        OSError: a file cannot be read or written.
    """
    reader = GGUFReader(source)
    _check(reader, "llama", layers, quantization)
    axes = _llama_axes(reader, width, heads, kv_heads, ffn_width)
    head_dim = axes["q"].size // heads
    name = _value(reader, "general.name") if "general.name" in reader.fields else source.name
    epsilon = _value(reader, "llama.attention.layer_norm_rms_epsilon")
    changed: dict[str, str | int | float] = {
        "general.name": f"grown from {name} ({width} wide, {layers} layers)",
        "general.file_type": FILE_TYPES[quantization.lower()],
        "llama.embedding_length": width,
        "llama.feed_forward_length": ffn_width,
        "llama.block_count": layers,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(epsilon * axes["width"].shrinkage),
    }
    _write(reader, out, "llama", changed, _llama_plan(reader, layers, axes, GGMLQuantizationType[quantization]))


def mix_llama(source: Path, out: Path, *, experts: int, used: int, width: int, seed: int = 0) -> None:
    """Write a mixture of experts that computes what a model of Llama's architecture computes.

    It is of Granite's architecture, which has an expert that all tokens share: that one gets the first hidden units of
    its layer's feed-forward network, each other expert a copy of the rest, and the weights of a token's experts sum to
    1. Routers are random matrices of what the networks read, so like trained ones they give neighbours some experts in
    common, and some experts more tokens than others: of 4 of 32 experts, neighbours in SmolLM2's texts share 35%, the
    same token's two last uses 50 to 60%, and independent choice would make it 12.5%.

    Args:
        source: GGUF in any type.
        experts, used: experts of a layer, and of a token.
        width: hidden units of an expert, of which a token's last ones are computed `used` times.

    Raises:
        ValueError: not such a GGUF, or a width that does not divide a type's blocks.
        OSError: a file cannot be read or written.
    """
    reader = GGUFReader(source)
    _check(reader, "llama", _value(reader, "llama.block_count"), TYPES[0])
    router, inputs = np.random.default_rng(seed), _value(reader, "llama.embedding_length")
    units = _value(reader, "llama.feed_forward_length")
    changed: dict[str, str | int | float] = {
        "granitemoe.expert_count": experts,
        "granitemoe.expert_used_count": used,
        "granitemoe.feed_forward_length": width,
        "granitemoe.expert_shared_feed_forward_length": units - width,
        "granitemoe.logit_scale": 1.0,
    }
    with whole_file(out) as part, closing(GGUFWriter(part, "granitemoe")) as writer:
        _copy_metadata(reader, writer, changed, "llama.", "granitemoe.")
        for tensor in reader.tensors:
            name, data, kind = tensor.name, tensor.data, tensor.tensor_type
            if not name.endswith(("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")):
                writer.add_tensor(name, data, raw_dtype=kind)
                continue
            down = "ffn_down" in name
            block = GGML_QUANT_SIZES[kind][0] if down else 1
            if not 0 < width < units or width % block or units % block:
                raise ValueError(f"width {width} is no multiple of {block} below the {units} units of {name}")
            # An entry of `data` may be a byte of a block.
            cut = data.shape[int(down)] * (units - width) // units
            shared, own = (np.ascontiguousarray(half) for half in np.split(data, [cut], axis=int(down)))
            writer.add_tensor(name.replace(".weight", "_shexp.weight"), shared, raw_dtype=kind)
            own = np.broadcast_to(own, (experts, *own.shape))
            writer.add_tensor(name.replace(".weight", "_exps.weight"), own, raw_dtype=kind)
            if down:
                values = router.standard_normal((experts, inputs)) / np.sqrt(inputs)
                writer.add_tensor(name.replace("ffn_down", "ffn_gate_inp"), values.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


@dataclass(frozen=True)
class Axis:
    """A dimension of the result: its size, and where the source's entries stand in it."""

    size: int
    places: npt.NDArray[np.int64]

    @property
    def shrinkage(self) -> float:
        """What becomes of the mean over it, when all but the source's entries are zero."""
        return len(self.places) / self.size


@dataclass(frozen=True)
class PaddedTensor:
    """One tensor of a grown Llama: the source's, with zeros put in."""

    name: str
    source: ReaderTensor
    axes: tuple[Axis, ...]
    quantization: GGMLQuantizationType
    silent: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the grown tensor, outputs before inputs."""
        return tuple(axis.size for axis in self.axes)

    @property
    def nbytes(self) -> int:
        """Bytes of the grown tensor in the file."""
        block, size = GGML_QUANT_SIZES[self.quantization]
        return int(np.prod(self.shape, dtype=np.int64)) // block * size

    def data(self) -> Packed:
        """The grown tensor, packed for the file."""
        values: Floats = quants.dequantize(self.source.data, self.source.tensor_type)
        if self.silent:
            values = np.zeros_like(values)
        inputs = self.axes[-1]
        wider = np.zeros((*values.shape[:-1], inputs.size), np.float32)
        if len(self.axes) == 1:
            wider[inputs.places] = values * np.float32(np.sqrt(inputs.shrinkage))
            return wider
        wider[:, inputs.places] = values
        rows = _pack(wider, self.quantization)
        # Zero bytes are zero weights in every type.
        packed = np.zeros((self.axes[0].size, *rows.shape[1:]), rows.dtype)
        packed[self.axes[0].places] = rows
        return packed


def _write(
    reader: GGUFReader,
    out: Path,
    architecture: str,
    changed: dict[str, str | int | float],
    tensors: Sequence[GrownTensor | PaddedTensor],
) -> None:
    with whole_file(out) as part, closing(GGUFWriter(part, architecture)) as writer:
        _copy_metadata(reader, writer, changed)
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.quantization
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.data())


def layer_plan(source_layers: int, layers: int) -> list[tuple[int, bool]]:
    """For each layer of the result, the source's layer it is made from and whether it is an added, silent one."""
    made_from = [position * source_layers // layers for position in range(layers)]
    return [(layer, position > 0 and made_from[position - 1] == layer) for position, layer in enumerate(made_from)]


def _check(reader: GGUFReader, architecture: str, layers: int, quantization: str) -> None:
    found = _value(reader, "general.architecture")
    if found != architecture:
        raise ValueError(f"cannot grow the architecture {found!r}: only {architecture!r}")
    old_layers = _value(reader, f"{architecture}.block_count")
    if layers < old_layers:
        raise ValueError(f"{layers} layers are fewer than the source's {old_layers}")
    if quantization not in TYPES:
        raise ValueError(f"unknown type {quantization!r}: choose from {', '.join(TYPES)}")


def _llama_axes(reader: GGUFReader, width: int, heads: int, kv_heads: int, ffn_width: int) -> dict[str, Axis]:
    """The dimensions that grow, by name."""
    old_width, old_heads = _value(reader, "llama.embedding_length"), _value(reader, "llama.attention.head_count")
    old_kv_heads = old_heads
    if "llama.attention.head_count_kv" in reader.fields:
        old_kv_heads = _value(reader, "llama.attention.head_count_kv")
    head_dim = old_width // old_heads
    if "llama.attention.key_length" in reader.fields:
        head_dim = _value(reader, "llama.attention.key_length")
    old_ffn_width = _value(reader, "llama.feed_forward_length")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} heads are not a multiple of {kv_heads} kv_heads")
    old_group, group = old_heads // old_kv_heads, heads // kv_heads
    for what, new, old in (
        ("width", width, old_width),
        ("kv_heads", kv_heads, old_kv_heads),
        ("heads of a group", group, old_group),
        ("ffn_width", ffn_width, old_ffn_width),
    ):
        if new < old:
            raise ValueError(f"{what}: {new} is fewer than the source's {old}")
    # Query heads stay with the keys and values of their group.
    old_head = np.arange(old_heads)
    head = old_head // old_group * group + old_head % old_group
    q = (head[:, None] * head_dim + np.arange(head_dim)).ravel()
    return {
        "width": Axis(width, np.arange(old_width)),
        "q": Axis(heads * head_dim, q),
        "kv": Axis(kv_heads * head_dim, np.arange(old_kv_heads * head_dim)),
        "ffn": Axis(ffn_width, np.arange(old_ffn_width)),
    }


def _llama_plan(
    reader: GGUFReader, layers: int, axes: dict[str, Axis], quantization: GGMLQuantizationType
) -> list[PaddedTensor]:
    available = {tensor.name: tensor for tensor in reader.tensors}
    embeddings = ["token_embd.weight", *(["output.weight"] if "output.weight" in available else [])]
    names: list[tuple[str, str, tuple[str, ...], bool]] = [
        *((name, name, ("vocabulary", "width"), False) for name in embeddings),
        ("output_norm.weight", "output_norm.weight", ("width",), False),
    ]
    for layer, (old, added) in enumerate(layer_plan(_value(reader, "llama.block_count"), layers)):
        for part, along in LLAMA_TENSORS.items():
            silent = added and part.startswith(RESIDUAL_WRITERS)
            names.append((f"blk.{layer}.{part}", f"blk.{old}.{part}", along, silent))
    _check_names(available, (source for _, source, _, _ in names))
    num_tokens = int(available["token_embd.weight"].shape[1])
    axes = axes | {"vocabulary": Axis(num_tokens, np.arange(num_tokens))}
    plan = []
    for name, source, along, silent in names:
        kind = GGMLQuantizationType.F32 if len(along) == 1 else quantization
        grown = PaddedTensor(name, available[source], tuple(axes[each] for each in along), kind, silent)
        _check_blocks(grown)
        plan.append(grown)
    return plan


def _check_names(available: Iterable[str], wanted: Iterable[str]) -> None:
    different = set(available) ^ set(wanted)
    if different:
        raise ValueError(f"missing or unknown tensors: {', '.join(sorted(different))}")


def _check_blocks(grown: GrownTensor | PaddedTensor) -> None:
    block = GGML_QUANT_SIZES[grown.quantization][0]
    if grown.shape[-1] % block:
        raise ValueError(
            f"{grown.quantization.name} needs rows of a multiple of {block}: {grown.name} has {grown.shape[-1]}"
        )


def _plan(reader: GGUFReader, width: int, layers: int, quantization: GGMLQuantizationType) -> list[GrownTensor]:
    available = {tensor.name: tensor for tensor in reader.tensors}
    copies = width // _value(reader, "gpt2.embedding_length")
    names = list(_tensor_names("output.weight" in available, _value(reader, "gpt2.block_count"), layers))
    _check_names(available, (source for _, source, _ in names))
    plan = []
    for name, source, silent in names:
        tensor = available[source]
        plain = len(tensor.shape) == 1 or source == "position_embd.weight"
        grown = GrownTensor(name, tensor, copies, GGMLQuantizationType.F32 if plain else quantization, silent)
        _check_blocks(grown)
        plan.append(grown)
    return plan


def _tensor_names(separate_head: bool, old_layers: int, layers: int) -> Iterator[tuple[str, str, bool]]:
    """Name, name in the source, and whether to silence it, in the order of the file."""
    for name in ("token_embd.weight", "position_embd.weight", "output_norm.weight", "output_norm.bias"):
        yield name, name, False
    if separate_head:
        yield "output.weight", "output.weight", False
    for layer, (old, added) in enumerate(layer_plan(old_layers, layers)):
        for part in LAYER_TENSORS:
            yield f"blk.{layer}.{part}", f"blk.{old}.{part}", added and part.startswith(RESIDUAL_WRITERS)


def _changed_metadata(
    reader: GGUFReader, source: Path, width: int, layers: int, quantization: str
) -> dict[str, str | int | float]:
    copies = width // _value(reader, "gpt2.embedding_length")
    name = _value(reader, "general.name") if "general.name" in reader.fields else source.name
    changed: dict[str, str | int | float] = {
        "general.name": f"grown from {name} ({width} wide, {layers} layers)",
        "general.file_type": FILE_TYPES[quantization.lower()],
        "gpt2.embedding_length": width,
        "gpt2.feed_forward_length": copies * _value(reader, "gpt2.feed_forward_length"),
        "gpt2.block_count": layers,
        "gpt2.attention.head_count": copies * _value(reader, "gpt2.attention.head_count"),
    }
    if "gpt2.attention.head_count_kv" in reader.fields:
        changed["gpt2.attention.head_count_kv"] = copies * _value(reader, "gpt2.attention.head_count_kv")
    return changed


def _copy_metadata(
    reader: GGUFReader, writer: GGUFWriter, changed: dict[str, str | int | float], old: str = "", new: str = ""
) -> None:
    """old, new: what the names of the architecture's keys begin with."""
    # The writer sets the first two itself, and the size label would be wrong.
    left_out = {"general.architecture", "general.alignment", "general.size_label", *changed}
    for name, value in changed.items():
        writer.add_key_value(name, value, KINDS[type(value)])
    for source_name, field in reader.fields.items():
        name = new + source_name.removeprefix(old) if source_name.startswith(old) else source_name
        value = field.contents()
        if name in left_out or name.startswith("GGUF.") or value == []:
            continue
        element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=element)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the source has no metadata {key!r}")
    return field.contents()


def _pack(values: Floats, quantization: GGMLQuantizationType) -> Packed:
    packed: Packed = quants.quantize(values, quantization)
    return packed
