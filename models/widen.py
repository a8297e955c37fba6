"""Give a model more channels, heads or layers and leave what it computes (nearly) as it was.

LayerNorm takes the mean away and divides by the deviation. With all that is added to the residual stream centred
first, new channels that hold almost nothing leave the mean at 0 and scale the deviation by sqrt(old / new width),
which the norms' weights make up for.
"""

import math
from dataclasses import replace

import torch
from model import GPT, Checkpoint
from torch import Tensor

WRITERS = ("token_embd.weight", "position_embd.weight")
WRITER_OUTPUTS = ("attn_output.weight", "attn_output.bias", "ffn_down.weight", "ffn_down.bias")


def centred(name: str, weight: Tensor) -> Tensor:
    """What is added to the residual stream, with mean 0 over the channels."""
    if name in WRITERS:
        return weight - weight.mean(1, keepdim=True)
    if name.endswith(WRITER_OUTPUTS):
        return weight - weight.mean(0, keepdim=True)
    return weight


def fill(name: str, new: Tensor, old: Tensor, ratio: float) -> None:
    """Put an old weight in the corner of its new one; of the rest, only the embeddings' (small, random) shows."""
    if "norm" in name:
        new.fill_(ratio if name.endswith("weight") else 0.0)
        old = old * ratio if name.endswith("weight") else old
    elif name.endswith(WRITER_OUTPUTS):
        new.zero_()
    elif new.dim() == 2 and name not in WRITERS:
        new[: len(old), old.shape[1] :] = 0
    new[tuple(slice(size) for size in old.shape)] = old


@torch.no_grad()
def widened(checkpoint: Checkpoint, width: int, heads: int) -> Checkpoint:
    """A wider twin whose last channel is the silent one. The width of a head stays."""
    old = checkpoint.model
    if width // heads != old.config.width // old.config.heads or width <= old.config.width:
        raise ValueError(f"cannot widen {old.config} to {width} channels and {heads} heads")
    model = GPT(replace(old.config, width=width, heads=heads, silent_channel=width - 1))
    ratio = math.sqrt(old.config.width / width)
    weights = old.state_dict()
    for name, new in model.state_dict().items():
        weight = centred(name, weights[name])
        if "attn_qkv" in name:  # three matrices in one
            for part, old_part in zip(new.chunk(3), weight.chunk(3), strict=True):
                fill(name, part, old_part, ratio)
        else:
            fill(name, new, weight, ratio)
    model.reserve_channel()
    return Checkpoint(model, checkpoint.known)


@torch.no_grad()
def deepened(checkpoint: Checkpoint, layers: int) -> Checkpoint:
    """A deeper twin whose new last layers add nothing yet."""
    old = checkpoint.model
    if layers <= old.config.layers:
        raise ValueError(f"cannot make {old.config} {layers} layers deep")
    model = GPT(replace(old.config, layers=layers))
    for block in model.blk[old.config.layers :]:
        block.attn_output.weight.zero_()
        block.ffn_down.weight.zero_()
    model.load_state_dict(old.state_dict(), strict=False)
    model.reserve_channel()
    return Checkpoint(model, checkpoint.known)
