"""Widen and deepen a GPT-2 GGUF without changing the function it computes.

Wider: the residual stream, the heads and the hidden units are each repeated k = width / old width times, so every
activation is a tiling of the source's. A matrix over k equal copies of its input is W / k on each; with k a power of
two only the scales of a quantized matrix change, not its integers. Deeper: layers whose two output projections are
zero are put between the original ones; their other weights are copies, so they cost what any layer costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
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
    LlamaFileType,
    ReaderTensor,
    quants,
)

from pystaged.files import whole_file

ARCHITECTURE = "gpt2"
FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
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
    _check(reader, width, layers, quantization)
    tensors = _plan(reader, width, layers, GGMLQuantizationType[quantization])
    with whole_file(out) as part, closing(GGUFWriter(part, ARCHITECTURE)) as writer:
        _copy_metadata(reader, writer, _changed_metadata(reader, source, width, layers, quantization))
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


def _check(reader: GGUFReader, width: int, layers: int, quantization: str) -> None:
    architecture = _value(reader, "general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(f"cannot grow the architecture {architecture!r}: only {ARCHITECTURE!r}")
    old_width, old_layers = _value(reader, "gpt2.embedding_length"), _value(reader, "gpt2.block_count")
    if width < 1 or width % old_width:
        raise ValueError(f"width {width} is not a multiple of the source's width {old_width}")
    if layers < old_layers:
        raise ValueError(f"{layers} layers are fewer than the source's {old_layers}")
    if quantization not in FILE_TYPES:
        raise ValueError(f"unknown type {quantization!r}: choose from {', '.join(FILE_TYPES)}")


def _plan(reader: GGUFReader, width: int, layers: int, quantization: GGMLQuantizationType) -> list[GrownTensor]:
    available = {tensor.name: tensor for tensor in reader.tensors}
    copies = width // _value(reader, "gpt2.embedding_length")
    names = list(_tensor_names("output.weight" in available, _value(reader, "gpt2.block_count"), layers))
    sources = {source for _, source, _ in names}
    if sources != set(available):
        raise ValueError(f"missing or unknown tensors: {', '.join(sorted(sources ^ set(available)))}")
    block = GGML_QUANT_SIZES[quantization][0]
    plan = []
    for name, source, silent in names:
        tensor = available[source]
        plain = len(tensor.shape) == 1 or source == "position_embd.weight"
        grown = GrownTensor(name, tensor, copies, GGMLQuantizationType.F32 if plain else quantization, silent)
        if not plain and grown.shape[-1] % block:
            raise ValueError(f"{quantization.name} needs rows of a multiple of {block}: {name} has {grown.shape[-1]}")
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
) -> dict[str, str | int]:
    copies = width // _value(reader, "gpt2.embedding_length")
    name = _value(reader, "general.name") if "general.name" in reader.fields else source.name
    changed = {
        "general.name": f"grown from {name} ({width} wide, {layers} layers)",
        "general.file_type": int(FILE_TYPES[quantization]),
        "gpt2.embedding_length": width,
        "gpt2.feed_forward_length": copies * _value(reader, "gpt2.feed_forward_length"),
        "gpt2.block_count": layers,
        "gpt2.attention.head_count": copies * _value(reader, "gpt2.attention.head_count"),
    }
    if "gpt2.attention.head_count_kv" in reader.fields:
        changed["gpt2.attention.head_count_kv"] = copies * _value(reader, "gpt2.attention.head_count_kv")
    return changed


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter, changed: dict[str, str | int]) -> None:
    # The writer sets the first two itself, and the size label would be wrong.
    left_out = {"general.architecture", "general.alignment", "general.size_label", *changed}
    for name, value in changed.items():
        writer.add_key_value(name, value, GGUFValueType.STRING if isinstance(value, str) else GGUFValueType.UINT32)
    for name, field in reader.fields.items():
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


def main() -> None:
    """The command line; its defaults are the shape of GPT-2 Large."""
    parser = argparse.ArgumentParser(
        description="Widen and deepen a GPT-2 GGUF file without changing what it computes."
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--width", type=int, default=1280, help="a multiple of the source's; the default is GPT-2 Large's"
    )
    parser.add_argument("--layers", type=int, default=36, help="at least the source's; the default is GPT-2 Large's")
    parser.add_argument("--type", dest="quantization", choices=FILE_TYPES, default="Q8_0")
    options = parser.parse_args()
    try:
        grow(**vars(options))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
