"""Widen and deepen a GGUF of Llama's architecture without changing the function it computes.

The result costs what a model of its shape costs, and says what the small one says.

Wider: zeros are put behind the residual stream, the hidden units and the heads; each group of query heads stays with
its keys and values. The mean square that a norm divides by is then over more entries, so the norm's weights and epsilon
are corrected. Deeper: layers whose two output projections are zero are put between the original ones; their other
weights are copies, so they cost what any layer costs.

A draft for such a model is the small one with noise on its weights: the more noise, the less often both agree.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, ReaderTensor, quants

from pystaged.loading.metadata import FILE_TYPES
from pystaged.loading.writing import Planned, add_value, copy_field, write_tensors
from pystaged.platform.files import whole_file

TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
RESIDUAL_WRITERS = ("attn_output.", "ffn_down.")
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
Floats = npt.NDArray[np.float32]


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
        OSError: a file cannot be read or written.
    """
    reader = GGUFReader(source)
    axes = _llama_axes(reader, width, heads, kv_heads, ffn_width)
    head_dim = axes["q"].size // heads
    epsilon = _value(reader, "llama.attention.layer_norm_rms_epsilon")
    changed: dict[str, str | int | float] = {
        "general.name": f"grown from {_value(reader, 'general.name', source.name)} ({width} wide, {layers} layers)",
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
    _write(reader, out, changed, _llama_plan(reader, layers, axes, quantization))


def add_noise(source: Path, out: Path, *, noise: float, quantization: str) -> None:
    """Write a model of Llama's architecture with noise on its layers' matrices, the same bytes on every machine.

    Args:
        source: as in grow_llama.
        out: written under a temporary name beside it, and moved there when whole.
        noise: its deviation, in those of the matrices.
        quantization: as in grow_llama.

    Raises:
        OSError: a file cannot be read or written.
    """
    reader = GGUFReader(source)
    layers = _value(reader, "llama.block_count")
    sizes = ("embedding_length", "attention.head_count", "attention.head_count_kv", "feed_forward_length")
    axes = _llama_axes(reader, *(_value(reader, f"llama.{size}") for size in sizes))
    changed: dict[str, str | int | float] = {
        "general.name": f"{_value(reader, 'general.name', source.name)} with noise of {noise:g}",
        "general.file_type": FILE_TYPES[quantization.lower()],
    }
    _write(reader, out, changed, _llama_plan(reader, layers, axes, quantization, noise))


@dataclass(frozen=True)
class Axis:
    """A dimension of the result: its size, and where the source's entries stand in it."""

    size: int
    places: npt.NDArray[np.int64]

    @property
    def shrinkage(self) -> float:
        """What becomes of the mean over it, when all but the source's entries are zero."""
        return len(self.places) / self.size


def _write(reader: GGUFReader, out: Path, changed: dict[str, str | int | float], tensors: Sequence[Planned]) -> None:
    with whole_file(out) as part, closing(GGUFWriter(part, "llama")) as writer:
        for name, value in changed.items():
            add_value(writer, name, value)
        # The writer sets the first two itself, and the size label would be wrong.
        left_out = {"general.architecture", "general.alignment", "general.size_label", *changed}
        for name, field in reader.fields.items():
            if name not in left_out and not name.startswith("GGUF.") and field.contents() != []:
                copy_field(writer, field)
        write_tensors(writer, tensors)


def layer_plan(source_layers: int, layers: int) -> list[tuple[int, bool]]:
    """For each layer of the result, the source's layer it is made from and whether it is an added, silent one."""
    made_from = [position * source_layers // layers for position in range(layers)]
    return [(layer, position > 0 and made_from[position - 1] == layer) for position, layer in enumerate(made_from)]


def _llama_axes(reader: GGUFReader, width: int, heads: int, kv_heads: int, ffn_width: int) -> dict[str, Axis]:
    """The dimensions that grow, by name."""
    old_width, old_heads = _value(reader, "llama.embedding_length"), _value(reader, "llama.attention.head_count")
    old_kv_heads = _value(reader, "llama.attention.head_count_kv", old_heads)
    head_dim = _value(reader, "llama.attention.key_length", old_width // old_heads)
    old_ffn_width = _value(reader, "llama.feed_forward_length")
    old_group, group = old_heads // old_kv_heads, heads // kv_heads
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
    reader: GGUFReader, layers: int, axes: dict[str, Axis], quantization: str, noise: float = 0.0
) -> list[Planned]:
    available = {tensor.name: tensor for tensor in reader.tensors}
    num_tokens = int(available["token_embd.weight"].shape[1])
    axes = axes | {"vocabulary": Axis(num_tokens, np.arange(num_tokens))}
    plan: list[Planned] = []

    def add(name: str, source: str, along: Sequence[str], silent: bool = False, noise: float = 0.0) -> None:
        kind = GGMLQuantizationType["F32" if len(along) == 1 else quantization]
        grown = [axes[each] for each in along]
        make = partial(_grown, name, available[source], grown, kind, silent, noise)
        plan.append(Planned(name, tuple(axis.size for axis in grown), kind, make))

    for name in ("token_embd.weight", *(["output.weight"] if "output.weight" in available else [])):
        add(name, name, ("vocabulary", "width"))
    add("output_norm.weight", "output_norm.weight", ("width",))
    for layer, (old, added) in enumerate(layer_plan(_value(reader, "llama.block_count"), layers)):
        for part, along in LLAMA_TENSORS.items():
            silent = added and part.startswith(RESIDUAL_WRITERS)
            add(f"blk.{layer}.{part}", f"blk.{old}.{part}", along, silent, noise)
    return plan


def _grown(
    name: str, source: ReaderTensor, axes: Sequence[Axis], kind: GGMLQuantizationType, silent: bool, noise: float
) -> Iterator[npt.NDArray[Any]]:
    """A tensor with zeros put in, or, where it is a matrix, with noise."""
    values: Floats = quants.dequantize(source.data, source.tensor_type)
    if silent:
        values = np.zeros_like(values)
    inputs = axes[-1]
    wider = np.zeros((*values.shape[:-1], inputs.size), np.float32)
    if len(axes) == 1:
        wider[inputs.places] = values * np.float32(np.sqrt(inputs.shrinkage))
        yield wider
        return
    wider[:, inputs.places] = values + _noise(name, values, noise) if noise else values
    rows = quants.quantize(wider, kind)
    # Zero bytes are zero weights in every type.
    packed = np.zeros((axes[0].size, *rows.shape[1:]), rows.dtype)
    packed[axes[0].places] = rows
    yield packed


def _value(reader: GGUFReader, key: str, default: object = None) -> Any:
    if key not in reader.fields and default is None:
        raise ValueError(f"the source has no metadata {key!r}")
    return reader.fields[key].contents() if key in reader.fields else default


def _noise(name: str, values: Floats, deviation: float) -> Floats:
    """Noise for a matrix, of `deviation` in units of its root mean square. NumPy promises the same bits for each seed,
    but not the same normal numbers, so these are sums of four numbers; and sums of whole numbers have no order."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(values.size).view(np.uint16)
    sums = 2 * bits.reshape(*values.shape, 4).sum(axis=-1, dtype=np.int64) - 4 * 0xFFFF
    fixed = np.rint(values * np.float64(1 << 16)).astype(np.int64)
    mean_square = int((fixed * fixed).sum()) / values.size / 2**32
    variance = 4 / 3 * (2**32 - 1)
    noise: Floats = (sums * (deviation * math.sqrt(mean_square / variance))).astype(np.float32)
    return noise
