"""Write a checkpoint of train.py as a GGUF file."""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from corpus import END_OF_TEXT, vocabulary
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from model import VOCABULARY, Checkpoint, load

FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}


def full_weights(checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.float32]]:
    """The weights by their GGUF names; the embedding has a row for every token of GPT-2."""
    weights = {name: weight.detach().float().numpy() for name, weight in checkpoint.model.state_dict().items()}
    rows = weights["token_embd.weight"]
    weights["token_embd.weight"] = rows[checkpoint.numbers()]
    return weights


def add_metadata(writer: GGUFWriter, checkpoint: Checkpoint, name: str, kind: str) -> None:
    """Name, shape and file type."""
    config = checkpoint.model.config
    writer.add_name(name)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(4 * config.width)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_layer_norm_eps(1e-5)
    writer.add_file_type(FILE_TYPES[kind])


def add_tokenizer(writer: GGUFWriter, vocab: Path) -> None:
    """GPT-2's tokenizer, copied from another GGUF file."""
    tokens, kinds, merges = vocabulary(vocab)
    if len(tokens) != VOCABULARY:
        raise ValueError(f"{vocab} holds {len(tokens)} tokens, GPT-2 has {VOCABULARY}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_eos_token_id(END_OF_TEXT)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a .pt file of train.py")
    parser.add_argument("out", type=Path, help="the GGUF file to write")
    parser.add_argument("--vocab", type=Path, required=True, help="any GGUF file with the GPT-2 vocabulary")
    parser.add_argument("--name", required=True, help="general.name")
    parser.add_argument("--type", choices=FILE_TYPES, default="Q8_0")
    args = parser.parse_args()

    checkpoint = load(args.checkpoint)
    writer = GGUFWriter(args.out, "gpt2")
    add_metadata(writer, checkpoint, args.name, args.type)
    add_tokenizer(writer, args.vocab)
    add_weights(writer, full_weights(checkpoint), args.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
