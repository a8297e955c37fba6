"""Let a model write: texts for a student to be distilled on, with the model's own distribution at every position.

Each text goes on from the first tokens of a file or of a top-level statement; most of those prompts end where a
docstring does. A third of the texts is greedy, a third at temperature 0.6, a third at temperature 1, all from the 50
best tokens.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from corpus import vocabulary
from model import GPT, load
from torch import Tensor
from windows import Corpus, docstring_prompts

TEMPERATURES = (0.01, 0.6, 1.0)
TOP_K = 50
PROMPT_LENGTHS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Written:
    """Texts, int64[texts, length], and the best tokens after all but the last: int64 and float32
    [texts, length - 1, TOP_K], best first; the logprobs are of the distribution over these alone."""

    texts: Tensor
    tokens: Tensor
    logprobs: Tensor


def best(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """The best tokens of each row, int64[rows, TOP_K], and their logprobs among themselves, float32[rows, TOP_K]."""
    logits, tokens = (hidden @ head.t()).topk(TOP_K, 1)
    return tokens, logits.float().log_softmax(1)


@torch.no_grad()
def write_texts(model: GPT, prompts: Tensor, temperatures: Tensor, length: int) -> Written:
    """Continue prompts (int64[texts, tokens]) up to that length, each at its temperature (float32[texts])."""
    cache = model.new_cache(len(prompts), length)
    texts, start = prompts, 0
    found: list[tuple[Tensor, Tensor]] = []
    while texts.shape[1] < length:
        hidden = model.hidden(texts[:, start:], cache, start)
        tokens, logprobs = best(hidden.flatten(0, 1), model.head())
        found.append((tokens.view(*hidden.shape[:2], TOP_K), logprobs.view(*hidden.shape[:2], TOP_K)))
        start = texts.shape[1]
        choice = torch.multinomial((found[-1][1][:, -1] / temperatures[:, None]).softmax(1), 1)
        texts = torch.cat([texts, found[-1][0][:, -1].gather(1, choice)], 1)
    tokens, logprobs = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return Written(texts, tokens, logprobs)


def choose_prompts(
    rng: np.random.Generator, corpus: Corpus, docstrings: dict[int, npt.NDArray[np.int64]], count: int
) -> Tensor:
    """Beginnings of one length, int64[count, tokens]: of a fixed length, or up to the end of a docstring."""
    if rng.random() < 0.3:
        return corpus.batch(rng, count, int(rng.choice(PROMPT_LENGTHS)) - 1, anchored=1)
    lengths = [length for length, begin in docstrings.items() if len(begin) >= count]
    length = int(rng.choice(lengths))
    begin = rng.choice(docstrings[length], count, replace=False)
    return torch.from_numpy(corpus.numbers[corpus.data[begin[:, None] + np.arange(length)]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a .pt or .gguf file")
    parser.add_argument("data", type=Path, help="folder with train.bin, for the prompts")
    parser.add_argument("out", type=Path, help="folder for one .npz file per batch")
    parser.add_argument("--vocab", type=Path, required=True, help="any GGUF file with the GPT-2 vocabulary")
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--length", type=int, default=128, help="tokens after the prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    checkpoint = load(args.model)
    model = checkpoint.model.bfloat16().eval()
    names, _, _ = vocabulary(args.vocab)
    corpus = Corpus(args.data / "train.bin", names, checkpoint.numbers())
    docstrings = docstring_prompts(corpus, names)
    temperatures = torch.tensor(TEMPERATURES).repeat(args.batch)[: args.batch]
    # the silent token, where a prompt holds one, is written as the first known one
    ids = np.append(checkpoint.known, checkpoint.known[0]).astype(np.uint16)

    args.out.mkdir(parents=True, exist_ok=True)
    count, began = 0, time.time()
    for i in range(args.batches):
        prompts = choose_prompts(rng, corpus, docstrings, args.batch)
        written = write_texts(model, prompts, temperatures, prompts.shape[1] + args.length)
        np.savez(
            args.out / f"{args.seed:03}-{i:04}.npz",
            texts=ids[written.texts.numpy()],
            tokens=ids[written.tokens.numpy()],
            logprobs=written.logprobs.numpy().astype(np.float16),
        )
        count += written.texts.numel()
        print(f"{count} tokens, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
