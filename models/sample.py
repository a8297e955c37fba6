"""Let a model write: texts for a student to be distilled on.

Each text goes on from the first tokens of a file or of a top-level statement. A third is greedy, a third at
temperature 0.6, a third at temperature 1, all from the 50 best tokens.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from corpus import vocabulary
from model import GPT, load
from torch import Tensor
from windows import Corpus

TEMPERATURES = (0.01, 0.6, 1.0)
PROMPT_LENGTHS = (2, 4, 8, 16, 32, 64)


def pick(logits: Tensor, temperatures: Tensor, top_k: int = 50) -> Tensor:
    """One token per row. logits: float32[rows, tokens]; temperatures: float32[rows]."""
    values, tokens = logits.topk(top_k, 1)
    choice = torch.multinomial(torch.softmax(values / temperatures[:, None], 1), 1)
    return tokens.gather(1, choice)


@torch.no_grad()
def write_texts(model: GPT, prompts: Tensor, temperatures: Tensor, length: int) -> Tensor:
    """Continue prompts (int64[texts, tokens]) up to that length. Returns int64[texts, length]."""
    cache = model.new_cache(len(prompts), length)
    head = model.head()
    texts, start = prompts, 0
    while texts.shape[1] < length:
        hidden = model.hidden(texts[:, start:], cache, start)[:, -1]
        start = texts.shape[1]
        texts = torch.cat([texts, pick((hidden @ head.t()).float(), temperatures)], 1)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a .pt or .gguf file")
    parser.add_argument("data", type=Path, help="folder with train.bin, for the prompts")
    parser.add_argument("out", type=Path, help="file to write: uint16[texts, length] (.npy)")
    parser.add_argument("--vocab", type=Path, required=True, help="any GGUF file with the GPT-2 vocabulary")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--length", type=int, default=257)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    checkpoint = load(args.model)
    model = checkpoint.model.bfloat16().eval()
    tokens, _, _ = vocabulary(args.vocab)
    corpus = Corpus(args.data / "train.bin", tokens, checkpoint.numbers())
    temperatures = torch.tensor(TEMPERATURES).repeat(args.batch)[: args.batch]
    # the silent token, where a prompt holds one, is written as the first known one
    ids = np.append(checkpoint.known, checkpoint.known[0]).astype(np.uint16)

    written, began = [], time.time()
    for i in range(args.batches):
        prompts = corpus.batch(rng, args.batch, int(rng.choice(PROMPT_LENGTHS)) - 1, anchored=1)
        texts = write_texts(model, prompts, temperatures, args.length)
        written.append(ids[texts.numpy()])
        np.save(args.out, np.concatenate(written))
        print(f"{(i + 1) * texts.numel()} tokens, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
