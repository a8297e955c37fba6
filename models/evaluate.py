"""Measure a pair: validation losses, divergence, greedy agreement, and how far below the silent tokens stay."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from corpus import END_OF_TEXT, tokenizer, vocabulary
from gguf import GGMLQuantizationType, quants
from model import GPT, VOCABULARY, Checkpoint, load
from sample import write_texts
from torch import Tensor
from train import losses
from windows import Corpus


@torch.no_grad()
def divergence(target: GPT, draft: GPT, corpus: Corpus, anchored: float, batches: int = 6) -> float:
    """Mean KL(target || draft) in nats over windows of 512 tokens."""
    rng = np.random.default_rng(0)
    total = 0.0
    for _ in range(batches):
        ids = corpus.batch(rng, 4, 512, anchored)[:, :-1]
        p, q = (F.log_softmax(m.hidden(ids).flatten(0, 1) @ m.head().t(), 1) for m in (target, draft))
        total += F.kl_div(q, p, reduction="batchmean", log_target=True).item()
    return total / batches


@torch.no_grad()
def greedy_agreement(target: GPT, draft: GPT, prompts: list[list[int]], length: int) -> float:
    """Share of the tokens of the target's greedy continuations that are the draft's first choice too."""
    agreed = 0
    for prompt in prompts:
        start = torch.tensor([prompt])
        text = write_texts(target, start, torch.tensor([1e-4]), len(prompt) + length).texts
        hidden = draft.hidden(text[:, :-1])[0, len(prompt) - 1 :]
        agreed += int(((hidden @ draft.head().t()).argmax(1) == text[0, len(prompt) :]).sum())
    return agreed / (length * len(prompts))


def rounded(rows: npt.NDArray[np.float32], kind: str) -> Tensor:
    """The rows as that quantization of GGUF stores them."""
    quantization = GGMLQuantizationType[kind]
    return torch.from_numpy(quants.dequantize(quants.quantize(np.ascontiguousarray(rows), quantization), quantization))


@torch.no_grad()
def silence(model: GPT, corpus: Corpus, kind: str) -> str:
    """How far below the rest the silent tokens stay when weights and activations are rounded."""
    ids = corpus.batch(np.random.default_rng(0), 8, 512)[:, :-1]
    hidden = rounded(model.hidden(ids).flatten(0, 1).numpy(), "Q8_0")
    logits = hidden @ rounded(model.token_embd.weight.numpy(), kind).t()
    silent, known = logits[:, -1], logits[:, :-1]
    mass = torch.sigmoid(silent + math.log(VOCABULARY - known.shape[1]) - known.logsumexp(1))
    gap = (known.amax(1) - silent).min()
    return (
        f"silent logits {silent.min():.2f} to {silent.max():.2f}, best known logit at least {known.amax(1).min():.2f}, "
        f"gap at least {gap:.2f}, silent mass at most {mass.max():.1e}"
    )


def sample_texts(checkpoint: Checkpoint, vocab: Path, prompts: list[str], length: int) -> list[str]:
    """Greedy continuations."""
    bpe = tokenizer(vocab)
    tokens, _, _ = vocabulary(vocab)
    byte_level = bytes_of_characters()
    texts = []
    for prompt in prompts:
        ids = checkpoint.numbers()[bpe.encode(prompt).ids]
        prompts = torch.from_numpy(ids)[None]
        text = write_texts(checkpoint.model, prompts, torch.tensor([1e-4]), len(ids) + length).texts
        written = text[0, len(ids) :].clamp(max=len(checkpoint.known) - 1).numpy()
        characters = "".join(tokens[i] for i in checkpoint.known[written] if i != END_OF_TEXT)
        texts.append(prompt + bytes(byte_level[c] for c in characters).decode(errors="replace"))
    return texts


def bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, back to bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with val.bin")
    parser.add_argument("target", type=Path, help=".pt or .gguf")
    parser.add_argument("draft", type=Path, nargs="?", help=".pt or .gguf")
    parser.add_argument("--vocab", type=Path, required=True, help="any GGUF file with the GPT-2 vocabulary")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a prompt each, for the agreement")
    parser.add_argument("--texts", nargs="*", default=["def fibonacci(n):", "class Stack:", "import os"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    tokens, _, _ = vocabulary(args.vocab)
    pair = [load(path) for path in (args.target, args.draft) if path]
    for checkpoint in pair:
        corpus = Corpus(args.data / "val.bin", tokens, checkpoint.numbers())
        print("validation:", losses(checkpoint.model, corpus, 12), flush=True)
        for kind in ("Q8_0", "Q4_0"):
            print(f"{kind}: {silence(checkpoint.model, corpus, kind)}", flush=True)
    if args.draft:
        target, draft = (checkpoint.model for checkpoint in pair)
        anywhere, begun = (divergence(target, draft, corpus, anchored) for anchored in (0, 1))
        print(f"KL(target || draft): {anywhere:.3f} anywhere, {begun:.3f} from a start", flush=True)
        if args.prompts:
            lines = args.prompts.read_text(encoding="utf-8").splitlines()[:12]
            encoded = tokenizer(args.vocab).encode_batch([json.loads(line)["prompt"] for line in lines])
            prompts = [pair[0].numbers()[encoding.ids].tolist() for encoding in encoded]
            print(f"greedy agreement {greedy_agreement(target, draft, prompts, 96):.3f}", flush=True)
    for text in sample_texts(pair[0], args.vocab, args.texts, 100):
        print("=" * 80, text, sep="\n")


if __name__ == "__main__":
    main()
