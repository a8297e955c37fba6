"""A block draft in torch: DSpark (DeepSeek-AI 2026, arXiv 2607.05147), which is DFlash (arXiv 2602.06036) with a Markov
head, made small.

Keys and values of committed tokens come from the target's hidden states, fused by one matrix. A block consists of the
last token and mask tokens after it. Its places attend to the committed tokens and to each other, and each guesses the
token at the next position. The Markov head adds logits that depend on the token before the guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGUFReader, quants
from torch import nn

from pystaged._core import Model, Tokenizer

EPSILON = 1e-5
_CHUNK = 16384  # rows
_FOCUS = 2.0  # size of what focus() adds to queries and keys before their norm, relative to what is there
TAPS = (1 / 3, 2 / 3, 1.0)  # of the target's layers


@dataclass(frozen=True)
class Shape:
    """A draft's shape; it is as wide as its target, whose embedding it borrows.

    taps: the target's layers, from 1 on, whose outputs are the features. rows: tokens in the draft's vocabulary. rank:
    of the Markov head. block: tokens guessed in one pass. mask: id of the mask token.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    taps: tuple[int, ...]
    vocab_size: int
    rows: int
    mask: int
    layers: int = 2
    rank: int = 64
    block: int = 8
    rope_base: float = 10000.0

    @property
    def num_weights(self) -> int:
        """Weights that a pass reads, and the Markov head's rows of tokens, of which it reads a few."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.ffn_width
        head = self.rows * (self.width + self.rank) + self.vocab_size * self.rank
        return self.width * self.width * len(self.taps) + self.layers * layer + head


class Target:
    """What a draft needs of its target's file: rows of its embedding and of its head, and its last norm.

    Raises:
        ValueError: the file is split, or lacks one of them.
    """

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._path = path
        family = str(reader.fields["general.architecture"].contents())
        scale = reader.fields.get(f"{family}.logit_scale")
        base = reader.fields.get(f"{family}.rope.freq_base")
        self.logit_scale = float(scale.contents()) if scale else 1.0
        self.rope_base = float(base.contents()) if base else 10000.0
        of_lfm2 = "token_embd_norm.weight"  # LFM2's files call the last norm so
        self._norm = of_lfm2 if of_lfm2 in self._tensors else "output_norm.weight"
        for name in ("token_embd.weight", self._norm):
            self._tensor(name)

    def embedding(self, tokens: Any) -> Any:
        """Rows of the embedding, float32[..., width], for tokens int64[...]."""
        rows = self._rows("token_embd.weight", tokens.flatten())
        return rows.unflatten(0, tokens.shape) if tokens.dim() != 1 else rows

    def head(self, tokens: Any) -> Any:
        """Rows of the head, float32[n, width], for tokens int64[n]."""
        name = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        return self._rows(name, tokens) / self.logit_scale

    def directions(self, rank: int) -> Any:
        """The embedding's first principal components, each of variance 1, float32[vocabulary, rank]."""
        size = len(self._tensor("token_embd.weight").data)
        chunks = torch.arange(size).split(_CHUNK)
        total, mean = 0.0, 0.0
        for chunk in chunks:
            rows = self.embedding(chunk).double()
            total, mean = total + rows.T @ rows, mean + rows.sum(0)
        covariance = total / size - torch.outer(mean / size, mean / size)
        values, vectors = torch.linalg.eigh(covariance)
        basis = vectors[:, -rank:] / values[-rank:].clamp(min=1e-12).sqrt()
        return torch.cat([(self.embedding(chunk).double() - mean / size) @ basis for chunk in chunks]).float()

    @cached_property
    def norm(self) -> Any:
        """The norm before the head, float32[width]."""
        return torch.from_numpy(np.array(self._tensor(self._norm).data, np.float32))

    def _rows(self, name: str, tokens: Any) -> Any:
        tensor = self._tensor(name)
        found = quants.dequantize(tensor.data[tokens.numpy()], tensor.tensor_type)
        return torch.from_numpy(np.array(found, np.float32))

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ValueError(f"{self._path} has no {name}; if the model is in several files, merge them")
        return self._tensors[name]


def layers_of(model: Model, shares: Sequence[float]) -> list[int]:
    """The layers of a model, from 1 on, at these shares of its depth."""
    return sorted({max(1, round(share * model.num_layers)) for share in shares})


def shape_for(model: Model, tokenizer: Tokenizer, target: Target, rows: int, **chosen: Any) -> Shape:
    """The shape of a draft for a target.

    Args:
        rows: at most.
        chosen: fields of Shape that are not the target's.

    Raises:
        ValueError: the target's width is no multiple of 32.
    """
    if model.width % 32:
        raise ValueError(
            f"the target's width is {model.width}, but distilling needs a multiple of 32, to quantize the draft"
        )
    unused = [token for token in range(tokenizer.num_tokens) if tokenizer.is_control(token)]
    unused = [token for token in unused if token != tokenizer.bos and not tokenizer.is_end(token)]
    return Shape(
        model.width,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        min(model.ffn_width, -(-model.width * 8 // 3 // 32) * 32),
        tuple(layers_of(model, TAPS)),
        model.vocab_size,
        min(rows, model.vocab_size),
        unused[-1] if unused else model.vocab_size - 1,
        rank=min(Shape.rank, model.width),
        rope_base=target.rope_base,
        **chosen,
    )


@dataclass(frozen=True)
class Batch:
    """Blocks of several texts.

    features [b, n, taps * width] in units of the channels' medians; positions int64[b, n]; anchors int64[b, a], the
    index of the last token, which begins the block; embeddings [b, a, width] of these tokens; before
    int64[b, a, block], the token before each guess; likeliest int64[b, a, block, k] and logprobs, the target's
    distribution in each place; weights [b, a, block], of the loss, 0 where there is no place.
    """

    features: Any
    positions: Any
    anchors: Any
    embeddings: Any
    before: Any
    likeliest: Any
    logprobs: Any
    weights: Any

    def to(self, device: str) -> Batch:
        """On another device."""
        return Batch(**{name: value.to(device) for name, value in self.__dict__.items()})


class BlockDraft(nn.Module):  # type: ignore[misc]
    """The draft.

    Args:
        tokens: those that it can propose, int64[rows], rising.
        target: lends the mask's embedding, and its head to begin with.
        generator: draws the other weights.
    """

    def __init__(self, shape: Shape, tokens: Any, target: Target, generator: Any) -> None:
        super().__init__()
        self.shape = shape
        width, dim, fused = shape.width, shape.head_dim, shape.width * len(shape.taps)

        def matrix(rows: int, cols: int, scale: float = 1.0) -> Any:
            return nn.Parameter(torch.randn(rows, cols, generator=generator) * scale / math.sqrt(cols))

        def ones(size: int) -> Any:
            return nn.Parameter(torch.ones(size))

        self.fc, self.enc_norm = matrix(width, fused), ones(width)
        self.blk = nn.ModuleList(
            nn.ParameterDict(
                {
                    "attn_norm": ones(width),
                    "attn_q": matrix(shape.heads * dim, width),
                    "attn_k": matrix(shape.kv_heads * dim, width),
                    "attn_v": matrix(shape.kv_heads * dim, width),
                    "attn_q_norm": ones(dim),
                    "attn_k_norm": ones(dim),
                    "attn_output": matrix(width, shape.heads * dim, 0.3),
                    "ffn_norm": ones(width),
                    "ffn_gate": matrix(shape.ffn_width, width),
                    "ffn_up": matrix(shape.ffn_width, width),
                    "ffn_down": matrix(width, shape.ffn_width, 0.3),
                }
            )
            for _ in range(shape.layers)
        )
        self.output = nn.Parameter(target.head(tokens))
        # As long as its vectors mean nothing, logits should be small.
        spread = float((self.output.detach() * target.norm).square().sum(1).mean().sqrt())
        self.output_norm = nn.Parameter(target.norm / max(spread, 1e-6))
        self.markov_w1 = nn.Parameter(target.directions(shape.rank))
        self.markov_w2 = nn.Parameter(torch.zeros(shape.rows, shape.rank))
        self.register_buffer("tokens", tokens, persistent=False)
        index = torch.full((shape.vocab_size,), -1)
        index[tokens] = torch.arange(len(tokens))
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("mask", target.embedding(torch.tensor([shape.mask]))[0], persistent=False)

    def context(self, features: Any) -> Any:
        """Fused features, [b, n, width]."""
        return norm(F.linear(features, self.fc), self.enc_norm)

    def focus(self, batch: Batch) -> None:
        """Let two heads of three attend to the tokens just before the block at first. Nearly one vector is added to
        all their queries and keys; the score of two such vectors, once rotated, depends on their distance alone and is
        highest at 0. The other heads are free for what training makes of them.

        Args:
            batch: blocks of real texts.
        """
        shape = self.shape
        fast = max(1, shape.head_dim * 3 // 16)  # rotations in use; slow ones hardly differ between near tokens
        vector = torch.zeros(shape.head_dim)
        vector[:fast] = _FOCUS * math.sqrt(shape.head_dim / fast)
        queries = [head for head in range(shape.heads) if head % 3 < 2]
        keys = sorted({head * shape.kv_heads // shape.heads for head in queries})
        committed = self.context(batch.features)[batch.features.abs().sum(2) > 0]  # padding is 0
        of_committed = torch.outer(vector, _constant(committed))

        def add(layer: Any, h: Any) -> None:
            of_block = torch.outer(vector, _constant(h.flatten(0, 1)))
            for name, heads, part in (("attn_q", queries, of_block), ("attn_k", keys, of_committed)):
                for head in heads:
                    rows = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
                    layer[name][rows] += part.to(h.device)

        with torch.no_grad():
            self(batch, add)

    def forward(self, batch: Batch, prepare: Callable[[Any, Any], None] | None = None) -> Any:
        """The head's input in each place of each block, [b, a, block, width].

        Args:
            prepare: called with each layer and its input before it is computed, for focus().
        """
        shape = self.shape
        b, a = batch.anchors.shape
        context = self.context(batch.features)
        places = torch.arange(shape.block, device=context.device)
        own = (batch.positions.gather(1, batch.anchors).unsqueeze(2) + places).flatten(1)
        x = self.mask.expand(b, a, shape.block, -1).clone()
        x[:, :, 0] = batch.embeddings
        x = x.flatten(1, 2)
        # A block sees the tokens before its last one, whose features are known, and all of itself.
        seen = torch.arange(context.shape[1], device=context.device) < batch.anchors.unsqueeze(2)
        block = torch.eye(a, dtype=torch.bool, device=context.device).expand(b, a, a)
        seen = torch.cat([seen, block.repeat_interleave(shape.block, 2)], 2)
        seen = seen.repeat_interleave(shape.block, 1).unsqueeze(1)
        for layer in self.blk:
            h = norm(x, layer["attn_norm"])
            if prepare:
                prepare(layer, h)
            q = self._turned(F.linear(h, layer["attn_q"]), layer["attn_q_norm"], own)
            both = torch.cat([context, h], 1)
            k = self._turned(
                F.linear(both, layer["attn_k"]), layer["attn_k_norm"], torch.cat([batch.positions, own], 1)
            )
            v = F.linear(both, layer["attn_v"]).unflatten(2, (-1, shape.head_dim)).transpose(1, 2)
            shared = shape.heads // shape.kv_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            found = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=seen)
            x = x + F.linear(found.transpose(1, 2).flatten(2), layer["attn_output"])
            h = norm(x, layer["ffn_norm"])
            h = F.silu(F.linear(h, layer["ffn_gate"])) * F.linear(h, layer["ffn_up"])
            x = x + F.linear(h, layer["ffn_down"])
        return norm(x, self.output_norm).unflatten(1, (a, shape.block))

    def logits(self, y: Any, before: Any) -> Any:
        """Logits of `tokens`, [..., rows], of places [..., width] with the tokens before the guesses, int64[...]."""
        both = torch.cat([y, self.markov_w1[before]], -1)
        return F.linear(both, torch.cat([self.output, self.markov_w2], 1)).float()

    def _turned(self, x: Any, weight: Any, positions: Any) -> Any:
        """Heads with their norm and rotary positions, [b, heads, n, head_dim]; pairs are halves."""
        x = norm(x.unflatten(2, (-1, self.shape.head_dim)), weight)
        half = self.shape.head_dim // 2
        steps = torch.arange(half, device=x.device) / half
        angles = positions.unsqueeze(2) * self.shape.rope_base**-steps
        cos, sin = angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], 3).transpose(1, 2)


def _constant(rows: Any) -> Any:
    """A linear function that is about 1 for rows like these [n, width], by ridge regression; float32[width]."""
    rows = rows.detach().cpu().double()
    gram = rows.T @ rows / len(rows)
    gram += (0.01 * gram.diagonal().mean() + 1e-9) * torch.eye(len(gram), dtype=gram.dtype)
    found = torch.linalg.solve(gram, rows.mean(0))
    return (found / (rows @ found).mean().clamp(min=0.5)).float()


def norm(x: Any, weight: Any) -> Any:
    """RMS norm."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def commonest(counts: Any, size: int) -> Any:
    """The tokens with the highest counts, int64[size], rising; the lower ids of those that are as common."""
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def compared(draft: BlockDraft, logits: Any, likeliest: Any, logprobs: Any) -> tuple[Any, Any, Any]:
    """Compare the distributions of draft and target, in each place, over the target's likeliest tokens: cross-entropy,
    overlap (the sum of min(p, q)), and whether the likeliest tokens of both are equal.

    Args:
        logits: [..., rows]; likeliest, logprobs: [..., k].
    """
    index = draft.index[likeliest]
    known = index >= 0
    p = logprobs.exp() * known
    log_q = logits.gather(-1, index.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    surprise = -(p * log_q).sum(-1)
    common = torch.minimum(p, log_q.exp()).sum(-1)
    return surprise, common, draft.tokens[logits.argmax(-1)] == likeliest[..., 0]
