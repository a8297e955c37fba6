"""Writes a block draft as GGUF of llama.cpp's architecture DFlash."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from pystaged._core import Model, Tokenizer
from pystaged.distill.draft import EPSILON, BlockDraft
from pystaged.loading.distilled import DEPTH, TARGET, VOCABULARY, identity
from pystaged.loading.families import DFLASH
from pystaged.loading.writing import copy_field
from pystaged.platform.files import whole_file

TYPES = ("Q4_0", "Q8_0", "F16", "F32")


def export(draft: BlockDraft, scale: Any, path: Path, target: Path, model: Model, quantization: str = "Q8_0") -> None:
    """Write a draft.

    Args:
        scale: the features' scale, as Answers.scale, float32[taps * width]; it is folded into `fc`.
        target: the target's file, whose vocabulary is copied; model: the target.
        quantization: type of the matrices, one of TYPES.

    Raises:
        OSError: the file cannot be written.
    """
    shape, family = draft.shape, DFLASH
    tensors = {name: value.detach().float().cpu() for name, value in draft.named_parameters()}
    tensors["fc"] = tensors["fc"] / scale
    with whole_file(path) as part, closing(GGUFWriter(part, family)) as writer:
        writer.add_name(f"draft of {model.name or target.stem}")
        writer.add_context_length(model.max_context)
        writer.add_embedding_length(shape.width)
        writer.add_block_count(shape.layers)
        writer.add_feed_forward_length(shape.ffn_width)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_layer_norm_rms_eps(EPSILON)
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_rope_freq_base(shape.rope_base)
        writer.add_uint32(f"{family}.block_size", shape.block)
        writer.add_array(f"{family}.target_layers", list(shape.taps))
        writer.add_uint32(f"{family}.target_hidden_size", shape.width)
        writer.add_bool(f"{family}.sample_from_anchor", True)
        writer.add_bool(f"{family}.attention.causal", False)
        writer.add_uint32("tokenizer.ggml.mask_token_id", shape.mask)
        writer.add_string(VOCABULARY, Tokenizer(str(target)).fingerprint)
        writer.add_uint32(DEPTH, model.num_layers)
        writer.add_string(TARGET, identity(target))
        _copy_vocabulary(writer, target)
        for name, value in tensors.items():
            _add(writer, f"{name.replace('enc_norm', 'enc.output_norm')}.weight", value.numpy(), quantization)
        if shape.rows < shape.vocab_size:
            writer.add_tensor("d2t", draft.tokens.cpu().numpy().astype(np.int64))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _add(writer: GGUFWriter, name: str, value: Any, quantization: str) -> None:
    if value.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(value))
        return
    # fc is read once for each token and holds the features' scales, so it keeps more bits.
    kind = "Q8_0" if name == "fc.weight" and quantization == "Q4_0" else quantization
    if kind.startswith("Q") and value.shape[1] % 32:
        kind = "F16"
    found = GGMLQuantizationType[kind]
    writer.add_tensor(name, quants.quantize(np.ascontiguousarray(value), found), raw_dtype=found)


def _copy_vocabulary(writer: GGUFWriter, target: Path) -> None:
    """The target's vocabulary, which llama.cpp wants in each file; ours needs none."""
    for name, field in GGUFReader(target).fields.items():
        if name.startswith("tokenizer.ggml.") and name != "tokenizer.ggml.mask_token_id":
            copy_field(writer, field)
