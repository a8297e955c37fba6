"""Make a small draft for a GPT-2 of your own: it learns the target's distribution on texts the target writes.

    python -m models.distill --target openai-community/gpt2-large --draft-shape 4x512x8 --out draft.Q8_0.gguf

4 layers, 512 wide, are the 40M weights of the paper's draft. No corpus is needed: texts begin with the end-of-text
token, or with pieces of a text file. A third is greedy, a third at temperature 0.6, a third at temperature 1, so that
the draft knows the beaten tracks and the rest. Ctrl-C ends the training early and writes what there is.
"""

import argparse
import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from export import TYPES, write
from model import GPT, Config, load, save
from optimizers import Optimizers
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from pystaged import _core
from pystaged.loading import names

TEMPERATURES = (0.01, 0.6, 1.0)
TOP_K = 50
PROMPT_LENGTHS = (1, 4, 16, 48)
KEPT = 64  # batches of texts


@dataclass(frozen=True)
class Texts:
    """Texts of the target, int64[texts, length], and its last hidden states, [texts, length, width]."""

    ids: Tensor
    states: Tensor


class Writer:
    """The target, which writes texts.

    Args:
        start: the end-of-text token, with which texts begin.
        prompts: tokens whose pieces begin texts instead, int64[n].
    """

    def __init__(self, target: GPT, start: int, prompts: Tensor | None, generator: torch.Generator) -> None:
        self.target, self.start, self.prompts, self.generator = target, start, prompts, generator
        self.head = target.head().detach()

    def beginnings(self, count: int) -> Tensor:
        """int64[count, tokens], of one length."""
        if self.prompts is None:
            return torch.full((count, 1), self.start)
        length = PROMPT_LENGTHS[int(torch.randint(len(PROMPT_LENGTHS), (), generator=self.generator))]
        begin = torch.randint(max(1, len(self.prompts) - length), (count, 1), generator=self.generator)
        return self.prompts[begin + torch.arange(min(length, len(self.prompts)))]

    @torch.no_grad()
    def write(self, count: int, length: int) -> Texts:
        """Texts of that many tokens."""
        ids, start, states = self.beginnings(count).to(self.head.device), 0, []
        temperatures = torch.tensor(TEMPERATURES, device=ids.device).repeat(count)[:count, None]
        cache = self.target.new_cache(count, length)
        while ids.shape[1] <= length:
            states.append(self.target.hidden(ids[:, start:], cache, start))
            start = ids.shape[1]
            best, tokens = (states[-1][:, -1] @ self.head.t()).float().topk(min(TOP_K, len(self.head)))
            chances = (best / temperatures).softmax(1).cpu()
            choice = torch.multinomial(chances, 1, generator=self.generator).to(ids.device)
            ids = torch.cat([ids, tokens.gather(1, choice)], 1)
        return Texts(ids[:, :length], torch.cat(states, 1))


def divergence(hidden: Tensor, head: Tensor, taught: Tensor, target_head: Tensor, chunk: int = 512) -> Tensor:
    """Mean KL(target || draft) in nats over rows of hidden states; logits are made anew for the gradient, not kept."""

    def summed(rows: Tensor, states: Tensor) -> Tensor:
        p = F.log_softmax((states @ target_head.t()).float(), 1)
        return F.kl_div(F.log_softmax((rows @ head.t()).float(), 1), p, reduction="sum", log_target=True)

    parts = zip(hidden.split(chunk), taught.split(chunk), strict=True)
    total = sum(recomputed(summed, rows, states, use_reentrant=False) for rows, states in parts)
    return total / len(hidden)


def loss_of(draft: GPT, texts: Texts, target_head: Tensor) -> Tensor:
    """Divergence of the draft from the target on texts."""
    with torch.autocast(texts.ids.device.type, dtype=torch.bfloat16):
        hidden = draft.hidden(texts.ids).flatten(0, 1)
        return divergence(hidden, draft.head(), texts.states.flatten(0, 1), target_head)


@torch.no_grad()
def agreement(draft: GPT, texts: Texts, target_head: Tensor) -> float:
    """Share of positions at which the draft's first choice is the target's."""
    own = (draft.hidden(texts.ids) @ draft.head().t()).argmax(-1)
    return (own == (texts.states @ target_head.t()).argmax(-1)).float().mean().item()


def new_draft(shape: str, target: GPT) -> GPT:
    """A draft of the shape LAYERSxWIDTHxHEADS for the target's tokens, its embedding the best part of the target's.

    Raises:
        ValueError: a shape that is none.
    """
    try:
        layers, width, heads = map(int, shape.lower().split("x"))
    except ValueError:
        raise ValueError(f"the shape {shape!r} should be LAYERSxWIDTHxHEADS, such as 4x512x8") from None
    if min(layers, width, heads) < 1 or width % heads or width % 32:
        raise ValueError(f"the shape {shape!r}: the width must be a multiple of the heads and of 32")
    draft = GPT(Config(width, layers, heads, target.config.vocab_size, target.config.context))
    with torch.no_grad():
        rows = target.token_embd.weight.float().cpu()
        if width < rows.shape[1]:
            # The directions in which tokens differ most.
            centred = rows - rows.mean(0)
            directions = torch.linalg.eigh(centred.t() @ centred).eigenvectors[:, -width:]
            rows = centred @ directions
            draft.token_embd.weight.copy_(rows * (0.02 / rows.std()))
    return draft


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="GGUF file, name in the cache, or hub id")
    parser.add_argument("--draft-shape", default="4x512x8", help="LAYERSxWIDTHxHEADS of the draft")
    parser.add_argument("--out", type=Path, required=True, help="GGUF file to write; training goes on from OUT.pt")
    parser.add_argument("--type", choices=TYPES, default="Q8_0")
    parser.add_argument("--prompts", type=Path, help="text whose pieces begin the target's texts")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time at the latest")
    parser.add_argument("--texts", type=int, default=24, help="texts in a batch")
    parser.add_argument("--length", type=int, default=256, help="tokens in a text")
    parser.add_argument("--reuse", type=int, default=4, help="steps on texts for each batch that the target writes")
    parser.add_argument("--lr-scale", type=float, default=0.5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="0 takes one per physical core")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def train(args: argparse.Namespace, model: GPT, writer: Writer) -> None:
    """Train a draft; Ctrl-C ends it early."""
    rng = np.random.default_rng(args.seed)
    kept = deque[Texts](maxlen=KEPT)
    held_out = writer.write(args.texts, args.length)
    optimizers = Optimizers(model, lr=0.02, scale=args.lr_scale, decay_from=0.6)
    began, average = time.time(), math.nan
    with torch.no_grad():
        print(f"before: {loss_of(model, held_out, writer.head):.3f} nats", flush=True)
    try:
        for step in range(args.steps):
            done = max(step / args.steps, (time.time() - began) / (60 * args.minutes))
            if done >= 1:
                break
            if step % args.reuse == 0:
                kept.append(writer.write(args.texts, args.length))
            loss = loss_of(model, kept[rng.integers(len(kept))], writer.head)
            loss.backward()
            optimizers.step(step, done)
            average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
            if step % 20 == 19:
                print(f"step {step + 1} {time.time() - began:.0f} s loss {average:.3f}", flush=True)
            if step % 500 == 499:
                save(model, args.out.with_suffix(".pt"))
    except KeyboardInterrupt:
        print("interrupted: writing what there is", flush=True)
    with torch.no_grad():
        nats = loss_of(model, held_out, writer.head)
    print(f"after: {nats:.3f} nats, same first choice {agreement(model, held_out, writer.head):.1%}", flush=True)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads or _core.physical_cores())
    torch.manual_seed(args.seed)
    path = names.resolve(args.target)
    tokenizer = _core.Tokenizer(str(path))
    target = load(path)
    saved = args.out.with_suffix(".pt")
    draft = load(saved) if saved.exists() else new_draft(args.draft_shape, target)
    args.length = min(args.length, target.config.context)
    weights = sum(parameter.numel() for parameter in draft.parameters())
    print(f"{draft.config}, {weights / 1e6:.1f}M weights", flush=True)

    prompts = None
    if args.prompts:
        prompts = torch.from_numpy(tokenizer.encode(args.prompts.read_text("utf-8")).astype(np.int64))
    ends = [token for token in range(tokenizer.num_tokens) if tokenizer.is_end(token)]
    model = target.to(args.device, torch.bfloat16).eval()
    draft.to(args.device)
    train(args, draft, Writer(model, ends[-1], prompts, torch.Generator().manual_seed(args.seed)))
    save(draft, saved)
    write(draft, args.out, path, f"draft for {path.stem}", args.type)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
