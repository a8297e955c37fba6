"""Train, fine-tune or distil a model of model.py on the token files of corpus.py.

Muon on the matrices of the blocks, AdamW on the rest. Half of the windows begin where a prompt would: at the start of
a file or of a top-level statement; many windows are short.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from corpus import END_OF_TEXT, vocabulary
from model import GPT, VOCABULARY, Checkpoint, Config, load
from sample import best
from torch import Tensor, nn
from widen import deepened, widened
from windows import Corpus, Samples, Tokens, Whitespace, stretch_indents

# (windows, tokens each, share of the steps): the 512s carry most tokens, the short ones teach to begin
WINDOWS = ((6, 512, 0.40), (3, 1024, 0.15), (24, 128, 0.25), (48, 64, 0.20))


@dataclass(frozen=True)
class Targets:
    """What should come next at each row: a few tokens (int64[rows, k], none twice in a row) and their probabilities
    (float32[rows, k]), which sum to 1, or to 0 where there is nothing to learn."""

    tokens: Tensor
    probabilities: Tensor

    @classmethod
    def labels(cls, labels: Tensor, silent: int) -> "Targets":
        """Single tokens, int64[rows]; the silent one stands for none."""
        return cls(labels.clamp(max=silent - 1)[:, None], (labels < silent).float()[:, None])


class HeadLoss(torch.autograd.Function):
    """Cross-entropy of the tied head, with its gradient made on the way so that no full logits are kept.

    A share `overlap` of the loss is the total variation distance instead: 1 - sum of min(p, q), which is how often a
    guess from q is not what p would have said.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Targets, overlap: float = 0.0, chunk: int = 512
    ) -> Tensor:
        known = targets.probabilities.sum(1, keepdim=True)
        known = known / known.sum().clamp(min=1)
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros(head.shape)
        total = torch.zeros(())
        for i in range(0, len(hidden), chunk):
            rows = slice(i, i + chunk)
            tokens, p = targets.tokens[rows], targets.probabilities[rows]
            logprobs = F.log_softmax((hidden[rows] @ head.t()).float(), 1)
            few = logprobs.gather(1, tokens)
            q = few.exp()
            missed = q * (q < p)
            entropy, distance = -(p * few).sum(1), 1 - torch.minimum(p, q).sum(1)
            total += torch.dot((1 - overlap) * entropy + overlap * distance, known[rows, 0])
            scale = (1 - overlap) + overlap * missed.sum(1, keepdim=True)
            grad = logprobs.exp_().mul_(scale * known[rows])
            grad.scatter_add_(1, tokens, ((overlap - 1) * p - overlap * missed) * known[rows])
            low = grad.bfloat16()
            grad_hidden[rows] = low @ head
            grad_head += (low.t() @ hidden[rows]).float()
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grads[0], grad_head * grads[0], None, None, None


class Teacher:
    """A frozen model in bfloat16 whose distribution over its best tokens is the target of a distillation."""

    def __init__(self, model: GPT) -> None:
        self.model = model.bfloat16().eval()

    @torch.no_grad()
    def __call__(self, ids: Tensor, chunk: int = 512) -> Targets:
        rows = self.model.hidden(ids).flatten(0, 1).split(chunk)
        found = [best(part, self.model.head()) for part in rows]
        tokens, logprobs = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Targets(tokens, logprobs.exp())


def batch_loss(model: GPT, ids: Tensor, targets: Targets, overlap: float = 0.0) -> Tensor:
    """Mean loss over the rows of ids, int64[windows, length], that have a target; in nats where overlap is 0."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(ids).flatten(0, 1).bfloat16()
    loss: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, model.head().bfloat16(), targets, overlap
    )
    return loss


@torch.no_grad()
def mean_loss(model: GPT, corpus: Corpus, shape: tuple[int, int], anchored: float, batches: int) -> float:
    """Mean loss over the same windows at every call."""
    rng = np.random.default_rng(0)
    total = 0.0
    for _ in range(batches):
        batch = corpus.batch(rng, *shape, anchored)
        targets = Targets.labels(batch[:, 1:].flatten(), model.config.num_known)
        total += batch_loss(model, batch[:, :-1], targets).item()
    return total / batches


def losses(model: GPT, corpus: Corpus, batches: int = 6) -> str:
    """Validation loss with long contexts and with short ones, as text."""
    anywhere = mean_loss(model, corpus, (4, 1024), 0, batches)
    begun = mean_loss(model, corpus, (32, 128), 1, batches)
    return f"{anywhere:.3f} nats per token in windows of 1024 from anywhere, {begun:.3f} in 128s from a start"


def orthogonalize(update: Tensor) -> Tensor:
    """The nearest matrix with singular values around 1, by Newton-Schulz iteration in bfloat16."""
    tall = update.shape[0] > update.shape[1]
    x = update.bfloat16().t() if tall else update.bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    orthogonal: Tensor = (x.t() if tall else x).float()
    return orthogonal * math.sqrt(max(1, update.shape[0] / update.shape[1]))


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates (Jordan, 2024); query, key and value matrices are taken apart."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(average, group["momentum"])
                parts = update.split(p.shape[1]) if p.shape[0] == 3 * p.shape[1] else [update]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.cat([orthogonalize(part) for part in parts]), alpha=-group["lr"])


class Optimizers:
    """Muon and AdamW under one schedule: a short warm-up, a constant rate, a linear decay."""

    def __init__(self, model: GPT, lr: float, scale: float, decay_from: float) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and name.startswith("blk")]
        self.rest = [p for name, p in named if not (p.dim() == 2 and name.startswith("blk"))]
        adamw = torch.optim.AdamW(self.rest, 3e-3 * scale, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.both: list[torch.optim.Optimizer] = [Muon(matrices, lr * scale), adamw]
        self.rates = [group["lr"] for optimizer in self.both for group in optimizer.param_groups]
        self.decay_from = decay_from

    def step(self, step: int, progress: float) -> None:
        """One update at that point (0 to 1) of the run."""
        factor = min(1.0, (step + 1) / 40, max(0.01, (1 - progress) / (1 - self.decay_from)))
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        groups = [group for optimizer in self.both for group in optimizer.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in self.both:
            optimizer.step()
            optimizer.zero_grad()


@dataclass
class Progress:
    """How far a run is: by steps, or by minutes where they are limited."""

    steps: int
    minutes: float
    began: float = 0.0
    step: int = 0
    tokens: int = 0

    def __iter__(self) -> Iterator[float]:
        self.began = time.time()
        while (done := max(self.step / self.steps, self.elapsed() / (60 * self.minutes))) < 1:
            yield done
            self.step += 1

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.time() - self.began

    def line(self, loss: float) -> str:
        speed = self.tokens / self.elapsed()
        return f"step {self.step} {self.tokens / 1e6:.2f}M tokens {self.elapsed():.0f} s {speed:.0f}/s loss {loss:.3f}"


def frequent_tokens(data: Tokens, count: int) -> npt.NDArray[np.int64]:
    """The end-of-text token and the most frequent others, in ascending order."""
    counts = np.bincount(data, minlength=VOCABULARY).astype(np.int64)
    counts[END_OF_TEXT] = len(data) + 1
    return np.sort(np.argsort(-counts, kind="stable")[:count])


def starting_point(args: argparse.Namespace, teacher: Checkpoint | None) -> Checkpoint:
    """The model to train: one to go on with, or a new one."""
    if args.init:
        checkpoint = load(args.init)
        if args.width != checkpoint.model.config.width:
            checkpoint = widened(checkpoint, args.width, args.heads)
        if args.layers != checkpoint.model.config.layers:
            checkpoint = deepened(checkpoint, args.layers)
        checkpoint.model.reserve_channel()
        return checkpoint
    data = np.fromfile(args.data / "train.bin", np.uint16)
    known = teacher.known if teacher else frequent_tokens(data, args.known)
    return Checkpoint(GPT(Config(args.width, args.layers, args.heads, len(known))), known)


class Batches:
    """Rows to train on: the teacher's texts, or windows of the corpus in one of the sizes."""

    def __init__(self, args: argparse.Namespace, corpus: Corpus, spaces: Whitespace, teacher: Teacher | None) -> None:
        self.rng = np.random.default_rng(args.seed)
        self.corpus, self.spaces, self.teacher = corpus, spaces, teacher
        self.samples = Samples(args.samples, corpus.numbers) if args.samples else None
        self.sample_share, self.stretch_share = args.sample_share, args.stretch_share

    def next(self) -> tuple[Tensor, Targets]:
        """ids, int64[windows, length], and the targets of its windows x length rows."""
        windows, length, _ = WINDOWS[self.rng.choice(len(WINDOWS), p=[weight for _, _, weight in WINDOWS])]
        if self.samples and self.rng.random() < self.sample_share:
            ids, tokens, logprobs = self.samples.batch(self.rng, windows * length)
            return ids, Targets(tokens.flatten(0, 1), logprobs.flatten(0, 1).exp())
        batch = self.corpus.batch(self.rng, windows, length)
        if self.teacher:
            return batch[:, :-1], self.teacher(batch[:, :-1])
        labels = stretch_indents(batch, self.spaces, self.rng) if self.rng.random() < self.stretch_share else batch
        return batch[:, :-1], Targets.labels(labels[:, 1:].flatten(), self.spaces.silent)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with train.bin and val.bin")
    parser.add_argument("out", type=Path, help="checkpoint to write (.pt)")
    parser.add_argument("--vocab", type=Path, required=True, help="any GGUF file with the GPT-2 vocabulary")
    parser.add_argument("--init", type=Path, help="go on from this .pt or .gguf, made as wide as asked for")
    parser.add_argument("--teacher", type=Path, help="distil from this .pt or .gguf")
    parser.add_argument("--samples", type=Path, help="folder of the teacher's texts, from sample.py")
    parser.add_argument("--sample-share", type=float, default=0.35, help="share of the steps on the teacher's texts")
    parser.add_argument("--overlap", type=float, default=0.0, help="share of the total variation in the loss")
    parser.add_argument("--stretch-share", type=float, default=0.0, help="share of the steps with stretched indents")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--known", type=int, default=12288, help="tokens in the softmax of a new model")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this time at the latest")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's rate")
    parser.add_argument("--lr-scale", type=float, default=1.0, help="factor on both rates, for fine-tuning")
    parser.add_argument("--decay-from", type=float, default=0.6, help="point of the run where the rates begin to fall")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    parent = load(args.teacher) if args.teacher else None
    checkpoint = starting_point(args, parent)
    model = checkpoint.model
    teacher = Teacher(parent.model) if parent else None
    tokens, _, _ = vocabulary(args.vocab)
    train, val = (Corpus(args.data / name, tokens, checkpoint.numbers()) for name in ("train.bin", "val.bin"))
    print(f"{model.config}, {len(train.data) / 1e6:.1f}M tokens, {len(train.starts)} starts", flush=True)

    batches = Batches(args, train, Whitespace.of(tokens, checkpoint.numbers()), teacher)
    optimizers = Optimizers(model, args.lr, args.lr_scale, args.decay_from)
    progress = Progress(args.steps, args.minutes)
    average = None
    for done in progress:
        ids, targets = batches.next()
        loss = batch_loss(model, ids, targets, args.overlap)
        loss.backward()  # type: ignore[no-untyped-call]
        model.mask_gradients()
        optimizers.step(progress.step, done)
        progress.tokens += ids.numel()
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        if progress.step % 20 == 19:
            print(progress.line(average), flush=True)
        if progress.step % 100 == 99:
            checkpoint.save(args.out)
    checkpoint.save(args.out)
    print("validation after:", losses(model, val), flush=True)


if __name__ == "__main__":
    main()
