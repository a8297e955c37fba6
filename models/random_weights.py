"""Write GGUF files with random weights, of GPT-2's or Llama's architecture and of any shape.

They cost what trained models of their shape cost, and say nothing. Quantized matrices are drawn as blocks, integers and
scales, instead of being quantized from floats: eight billion weights take less than a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType

from pystaged.loading.metadata import FILE_TYPES
from pystaged.loading.writing import Planned, copy_field, write_tensors
from pystaged.platform.files import whole_file

MIXTURE = "Q4_K_M"  # of Q4_K and Q6_K
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", MIXTURE)
# Bits of a weight, where a block has its F16 scale, and where the minimum that goes with it.
BLOCKS: dict[str, tuple[int, int, int | None]] = {
    "Q8_0": (8, 0, None),
    "Q4_0": (4, 0, None),
    "Q5_0": (5, 0, None),
    "Q4_1": (4, 0, 2),
    "Q5_1": (5, 0, 2),
    "Q4_K": (4, 0, 2),
    "Q5_K": (5, 0, 2),
    "Q6_K": (6, 208, None),
}
DEVIATION = 0.02
NORM_DEVIATION = 0.1

Packed = npt.NDArray[Any]
Parts = dict[str, tuple[int, ...]]
Tensor = tuple[str, tuple[int, ...], GGMLQuantizationType]


def write_random(
    out: Path,
    architecture: str,
    *,
    width: int,
    layers: int,
    heads: int,
    vocab_size: int,
    context: int,
    quantization: str,
    add_vocabulary: Callable[[GGUFWriter, int], object],
    kv_heads: int = 0,
    head_dim: int = 0,
    ffn_width: int = 0,
    rope_base: float = 1e4,
    seed: int = 0,
    tie: bool = True,
) -> None:
    """Write a GGUF with random weights: matrices and biases around 0, norm weights around 1.

    The same seed gives the same file. GPT-2's F32, F16 and BF16 files of one seed hold the same numbers, to their
    precision.

    Args:
        out: written under a temporary name beside it, and moved there when whole.
        architecture: "gpt2" or "llama".
        width: embedding length; like the widths of all heads together and of the hidden layer a multiple of the type's
            block size.
        context: positions.
        quantization: one of TYPES, for the matrices; positions, norms and biases stay F32. In Llama's architecture the
            head of types below 6 bits is Q6_K, or Q8_0 where Q6_K's blocks do not fit, and the mixture has Q6_K where
            llama.cpp's has it.
        add_vocabulary: writes a tokenizer of so many tokens, as copy_tokenizer does.
        kv_heads, head_dim, ffn_width, rope_base: of Llama's architecture; GPT-2's hidden layer is 4 times the width.
        tie: the head uses the token embedding; otherwise it is an `output.weight` of its own.

    Raises:
        OSError: a file cannot be read or written.
    """
    is_gpt2 = architecture == "gpt2"
    if is_gpt2:
        kv_heads, head_dim, ffn_width = heads, width // heads, 4 * width
    parts = _parts(is_gpt2, width, heads * head_dim, kv_heads * head_dim, ffn_width)
    plan = _plan(is_gpt2, parts, layers, vocab_size, context, tie, quantization)
    generator = np.random.default_rng(seed)
    tensors = [Planned(*each, partial(_drawn, generator, *each)) for each in plan]
    with whole_file(out) as part, closing(GGUFWriter(part, architecture)) as writer:
        writer.add_name(f"random {'GPT-2' if is_gpt2 else 'Llama'} ({width} wide, {layers} layers, seed {seed})")
        writer.add_context_length(context)
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(ffn_width)
        writer.add_block_count(layers)
        writer.add_head_count(heads)
        if is_gpt2:
            writer.add_layer_norm_eps(1e-5)
        else:
            writer.add_head_count_kv(kv_heads)
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
            writer.add_rope_dimension_count(head_dim)
            writer.add_rope_freq_base(rope_base)
            writer.add_layer_norm_rms_eps(1e-5)
            writer.add_vocab_size(vocab_size)
        # llama.cpp has no name for files of K-quants but those of its mixtures.
        writer.add_file_type(FILE_TYPES[quantization.lower() + "_s" * (quantization in ("Q4_K", "Q5_K"))])
        add_vocabulary(writer, vocab_size)
        write_tensors(writer, tensors)


def copy_tokenizer(vocabulary: Path, writer: GGUFWriter, vocab_size: int) -> None:
    """Put the tokenizer of another GGUF file into one that is being written, filled up with unused tokens.

    Raises:
        ValueError: it has more tokens.
    """
    fields = GGUFReader(vocabulary).fields
    num_tokens = len(fields["tokenizer.ggml.tokens"].data) if "tokenizer.ggml.tokens" in fields else 0
    if num_tokens > vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}, but {vocabulary} has {num_tokens} tokens")
    padding: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [f"<|unused_{token}|>" for token in range(num_tokens, vocab_size)],
        "tokenizer.ggml.token_type": [int(TokenType.UNUSED)] * (vocab_size - num_tokens),
        "tokenizer.ggml.scores": [0.0] * (vocab_size - num_tokens),
    }
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            copy_field(writer, field, padding.get(name, []))


def _parts(is_gpt2: bool, width: int, q: int, kv: int, ffn_width: int) -> Parts:
    """Sizes of a layer's tensors, outputs before inputs, in the order of the file."""
    parts: Parts = {
        "attn_norm": (width,),
        "attn_q": (q, width),
        "attn_k": (kv, width),
        "attn_v": (kv, width),
        "attn_output": (width, q),
        "ffn_norm": (width,),
        "ffn_gate": (ffn_width, width),
        "ffn_up": (ffn_width, width),
        "ffn_down": (width, ffn_width),
    }
    of_gpt2 = ("attn_norm", "ffn_norm", "attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return {name: parts.get(name, (3 * width, width)) for name in of_gpt2} if is_gpt2 else parts


def _plan(
    is_gpt2: bool, parts: Parts, layers: int, vocab_size: int, context: int, tie: bool, quantization: str
) -> Iterator[Tensor]:
    """Names, sizes and types in the order of the file; of Llama's architecture the types that llama.cpp's quantizer
    chooses."""
    (width,), plain = parts["attn_norm"], GGMLQuantizationType.F32
    kind = head = GGMLQuantizationType["Q4_K" if quantization == MIXTURE else quantization]
    if not is_gpt2 and kind.name[:2] in ("Q4", "Q5"):
        head = GGMLQuantizationType.Q6_K if width % 256 == 0 else GGMLQuantizationType.Q8_0

    def both(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType = plain) -> Iterator[Tensor]:
        yield f"{name}.weight", shape, kind if len(shape) > 1 else plain
        if is_gpt2:
            yield f"{name}.bias", shape[:1], plain

    yield "token_embd.weight", (vocab_size, width), head if tie else kind
    if is_gpt2:
        yield "position_embd.weight", (context, width), plain
    yield from both("output_norm", (width,))
    if not tie:
        yield "output.weight", (vocab_size, width), head
    for layer in range(layers):
        # Of the mixture, the outer eighths of the layers and every third of the others have more bits.
        eighth = layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        other = GGMLQuantizationType.Q6_K if quantization == MIXTURE and more else kind
        for name, shape in parts.items():
            yield from both(f"blk.{layer}.{name}", shape, other if name in ("attn_v", "ffn_down") else kind)


def _drawn(
    generator: np.random.Generator, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> Iterator[Packed]:
    if kind.name in BLOCKS:
        yield _blocks(generator, shape, kind)
        return
    values = generator.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        values *= np.float32(NORM_DEVIATION)
        values += 1
    else:
        values *= np.float32(DEVIATION)
    if kind is GGMLQuantizationType.BF16:
        # Cutting the low half off is as random as rounding it.
        yield (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        yield values.astype(np.float16) if kind is GGMLQuantizationType.F16 else values


def _blocks(generator: np.random.Generator, shape: tuple[int, ...], kind: GGMLQuantizationType) -> Packed:
    """Blocks of random bytes, but for the F16 numbers: they give the weights their mean and deviation."""
    block, size = GGML_QUANT_SIZES[kind]
    bits, at, minimum = BLOCKS[kind.name]
    blocks = generator.integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
    # Every block has its own scale, so that a mixed-up scale shows in the logits.
    scales = 0.5 + generator.random(len(blocks), dtype=np.float32)
    # A quantizer of the smaller types gives the scale the sign of the largest weight.
    scales *= generator.choice(np.array([-1, 1], np.float32), len(blocks))
    deviation = np.sqrt((4.0**bits - 1) / 12)
    if kind.name.endswith("K"):
        deviation *= 36 if minimum else 74  # of scales of 6 and of 8 bits
    scales *= np.float32(DEVIATION / deviation)
    blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    if minimum is not None:
        half = np.float32((2**bits - 1) / 2)
        if kind.name.endswith("K"):
            # The minimum is subtracted; each small scale is its small minimum too, in the packing of 12 bytes.
            blocks[:, 8:12] = blocks[:, 4:8]
            blocks[:, 12:16] = blocks[:, 12:16] % 16 * 17
        else:
            half = -half
        blocks[:, minimum : minimum + 2] = (half * scales).astype(np.float16)[:, None].view(np.uint8)
    return blocks
