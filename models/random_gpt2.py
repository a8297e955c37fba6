"""Write a GPT-2 GGUF with random weights, of any shape and fast enough for the 774M one.

    python -m models.random_gpt2 OUT.gguf [--width 1280] [--layers 36] [--type Q8_0] [--vocabulary VOCAB.gguf]

Quantized matrices are drawn as blocks, integers and scales, instead of being quantized from floats.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from contextlib import closing
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
    TokenType,
)

from pystaged.files import whole_file

FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q5_0": LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": LlamaFileType.MOSTLY_Q5_1,
    "Q4_K": LlamaFileType.MOSTLY_Q4_K_S,
    "Q5_K": LlamaFileType.MOSTLY_Q5_K_S,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
}
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
END_OF_TEXT = "<|endoftext|>"
SPACE = "\u0120"  # how GPT-2 spells the byte 0x20
# Roughly as often as in English, so that merges apply to real text.
LETTERS = "eeeeeeeeettttttaaaaaoooooiiiiinnnnnsssshhhhrrrrdddlllccuummwwffggyyppbvkjxqz"

Packed = npt.NDArray[Any]


def write_random_gpt2(
    out: Path,
    *,
    width: int,
    layers: int,
    heads: int,
    vocab_size: int,
    context: int,
    quantization: str,
    seed: int = 0,
    tie: bool = True,
    vocabulary: Path | None = None,
) -> None:
    """Write a GPT-2 GGUF with random weights: matrices and biases around 0, norm weights around 1.

    The same seed gives the same file. F32, F16 and BF16 files of one seed hold the same numbers, to their precision.

    Args:
        out: written under a temporary name beside it, and moved there when whole.
        width: embedding length, a multiple of `heads` and of the type's block size; the hidden layer is 4 times that.
        vocab_size: tokens; must match `vocabulary` if given, at least 257 otherwise.
        context: positions.
        quantization: a key of FILE_TYPES, for the matrices; positions, norms and biases stay F32.
        tie: the head uses the token embedding; otherwise it is an `output.weight` of its own.
        vocabulary: GGUF file whose tokenizer is copied; otherwise a small byte-level one is made up, the same for
            every seed.

    Raises:
        ValueError: an impossible shape, an unknown type, or a vocabulary of another size.
        OSError: a file cannot be read or written.
    """
    _check(width, layers, heads, context, quantization)
    with whole_file(out) as part, closing(GGUFWriter(part, "gpt2")) as writer:
        writer.add_name(f"random GPT-2 ({width} wide, {layers} layers, seed {seed})")
        writer.add_context_length(context)
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(4 * width)
        writer.add_block_count(layers)
        writer.add_head_count(heads)
        writer.add_layer_norm_eps(1e-5)
        writer.add_file_type(FILE_TYPES[quantization])
        _add_tokenizer(writer, vocab_size, vocabulary)
        _write_tensors(writer, _tensor_shapes(width, layers, vocab_size, context, tie), quantization, seed)


def copy_tokenizer(writer: GGUFWriter, vocab_size: int, vocabulary: Path) -> None:
    """Put the tokenizer of another GGUF file into one that is being written.

    Raises:
        ValueError: it has another number of tokens.
    """
    fields = GGUFReader(vocabulary).fields
    num_tokens = len(fields["tokenizer.ggml.tokens"].data) if "tokenizer.ggml.tokens" in fields else 0
    if num_tokens != vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}, but {vocabulary} has {num_tokens} tokens")
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)


def synthetic_vocabulary(vocab_size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a made-up byte-level GPT-2 vocabulary: bytes, merged tokens, end of text.

    A smaller vocabulary's merges are the first ones of a larger one's.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size {vocab_size}: 256 bytes and {END_OF_TEXT} need at least 257")
    tokens, merges = byte_alphabet(), list[str]()
    known, stems = set(tokens), [SPACE, *LETTERS]
    choose = random.Random(0).choice
    while len(tokens) < vocab_size - 1:
        left, right = choose(stems), choose(LETTERS)
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            stems.append(left + right)
            merges.append(f"{left} {right}")
    return [*tokens, END_OF_TEXT], merges


def byte_alphabet() -> list[str]:
    """The 256 characters GPT-2 spells bytes with, in its vocabulary's order: bytes that stand for themselves first."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


def _check(width: int, layers: int, heads: int, context: int, quantization: str) -> None:
    if quantization not in FILE_TYPES:
        raise ValueError(f"unknown type {quantization!r}: choose from {', '.join(FILE_TYPES)}")
    if min(width, layers, heads, context) < 1:
        raise ValueError("width, layers, heads and context must be positive")
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of {heads} heads")
    block = GGML_QUANT_SIZES[GGMLQuantizationType[quantization]][0]
    if width % block:
        raise ValueError(f"{quantization} needs a width that is a multiple of {block}, not {width}")


def _add_tokenizer(writer: GGUFWriter, vocab_size: int, vocabulary: Path | None) -> None:
    if vocabulary is not None:
        copy_tokenizer(writer, vocab_size, vocabulary)
        return
    tokens, merges = synthetic_vocabulary(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(TokenType.NORMAL)] * (vocab_size - 1) + [int(TokenType.CONTROL)])
    # llama.cpp wants the key, but the writer leaves an empty array out: put in a merge that never applies.
    writer.add_token_merges(merges or [f"{SPACE} {END_OF_TEXT}"])
    writer.add_bos_token_id(vocab_size - 1)
    writer.add_eos_token_id(vocab_size - 1)


def _tensor_shapes(
    width: int, layers: int, vocab_size: int, context: int, tie: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes, outputs before inputs, in the order of the file."""
    yield "token_embd.weight", (vocab_size, width)
    yield "position_embd.weight", (context, width)
    yield "output_norm.weight", (width,)
    yield "output_norm.bias", (width,)
    if not tie:
        yield "output.weight", (vocab_size, width)
    linears = {
        "attn_qkv": (3 * width, width),
        "attn_output": (width, width),
        "ffn_up": (4 * width, width),
        "ffn_down": (width, 4 * width),
    }
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{norm}.weight", (width,)
            yield f"blk.{layer}.{norm}.bias", (width,)
        for linear, shape in linears.items():
            yield f"blk.{layer}.{linear}.weight", shape
            yield f"blk.{layer}.{linear}.bias", shape[:1]


def _write_tensors(
    writer: GGUFWriter, shapes: Iterator[tuple[str, tuple[int, ...]]], quantization: str, seed: int
) -> None:
    tensors = []
    for name, shape in shapes:
        plain = len(shape) == 1 or name == "position_embd.weight"
        kind = GGMLQuantizationType["F32" if plain else quantization]
        block, size = GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(shape, dtype=np.int64)) // block * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
        tensors.append((name, shape, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(seed)
    for name, shape, kind in tensors:
        writer.write_tensor_data(_draw(generator, name, shape, kind))


def _draw(generator: np.random.Generator, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> Packed:
    if kind.name in BLOCKS:
        return _draw_blocks(generator, shape, kind)
    values = generator.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        values *= np.float32(NORM_DEVIATION)
        values += 1
        return values
    values *= np.float32(DEVIATION)
    if kind is GGMLQuantizationType.BF16:
        # Cutting the low half off is as random as rounding it.
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if kind is GGMLQuantizationType.F16 else values


def _draw_blocks(generator: np.random.Generator, shape: tuple[int, ...], kind: GGMLQuantizationType) -> Packed:
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


def main() -> None:
    """The command line; its defaults are the shape of GPT-2 L."""
    parser = argparse.ArgumentParser(description="Write a GPT-2 GGUF with random weights.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--type", dest="quantization", choices=FILE_TYPES, default="Q8_0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untied", dest="tie", action="store_false", help="a head of its own")
    parser.add_argument("--vocabulary", type=Path, help="GGUF file whose tokenizer to copy")
    options = parser.parse_args()
    try:
        write_random_gpt2(**vars(options))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
