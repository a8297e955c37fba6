"""Write a model of model.py as a GGUF file."""

from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, quants
from model import GPT, Config
from random_weights import copy_tokenizer

from pystaged.files import whole_file
from pystaged.loading.file_types import FILE_TYPES

TYPES = ("F32", "F16", "Q8_0", "Q4_0")


def add_metadata(writer: GGUFWriter, config: Config, name: str, kind: str) -> None:
    """Name, shape and file type."""
    writer.add_name(name)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(4 * config.width)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_layer_norm_eps(1e-5)
    writer.add_file_type(FILE_TYPES[kind.lower()])


def add_weights(writer: GGUFWriter, weights: dict[str, npt.NDArray[np.float32]], kind: str) -> None:
    """Matrices in the file's type, vectors in F32; positions, which are added to the residual stream, in F16."""
    quantization = GGMLQuantizationType[kind]
    for name, weight in weights.items():
        if weight.ndim == 1 or kind == "F32":
            writer.add_tensor(name, np.ascontiguousarray(weight))
        elif name == "position_embd.weight":
            writer.add_tensor(name, weight.astype(np.float16))
        else:
            writer.add_tensor(name, quants.quantize(np.ascontiguousarray(weight), quantization), raw_dtype=quantization)


def write(model: GPT, out: Path, vocab: Path, name: str, kind: str) -> None:
    """Write a GGUF file with the tokenizer of another one."""
    with whole_file(out) as part, closing(GGUFWriter(part, "gpt2")) as writer:
        add_metadata(writer, model.config, name, kind)
        copy_tokenizer(writer, model.config.vocab_size, vocab)
        weights = {key: weight.detach().float().cpu().numpy() for key, weight in model.state_dict().items()}
        add_weights(writer, weights, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
