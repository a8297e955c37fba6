"""GPT-2 in PyTorch over the part of its vocabulary that is worth a softmax.

Learned positions, pre-norm, tanh GELU, tied head. Tokens are numbered within the *known* tokens; every other token
of GPT-2 is the one *silent* token, whose number is the count of known tokens.

One channel of the final norm has weight 0 and bias 1, so it is exactly 1 at every position. Known tokens have 0 there
and the silent token has nothing but -SILENCE: its logit is -SILENCE whatever the text, and whatever the rounding of
weights and activations does to it (up to half a quantization step).
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from gguf import GGUFReader, quants
from torch import Tensor, nn

VOCABULARY = 50257
SILENCE = 31.75  # 127 / 4: exact in Q8_0 (scale 1/4) and in Q4_0 (scale 127/32)

Cache = list[tuple[Tensor, Tensor]]  # per layer: keys and values, [batch, heads, length, head width]


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    width: int
    layers: int
    heads: int
    num_known: int
    silent_channel: int = 0
    context: int = 1024
    tied: bool = True


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(width)
        self.attn_qkv = nn.Linear(width, 3 * width)
        self.attn_output = nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn_up = nn.Linear(width, 4 * width)
        self.ffn_down = nn.Linear(4 * width, width)

    def attend(self, x: Tensor, cache: tuple[Tensor, Tensor] | None, start: int) -> Tensor:
        """Causal attention; with a cache, x are the rows from position start on."""
        batch, rows, width = x.shape
        qkv = self.attn_qkv(self.attn_norm(x)).view(batch, rows, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            for old, new in zip(cache, (key, value), strict=True):
                old[:, :, start : start + rows] = new
            key, value = (kept[:, :, : start + rows] for kept in cache)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=rows > 1)
        return mixed.transpose(1, 2).reshape(batch, rows, width)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None, start: int = 0) -> Tensor:
        x = x + self.attn_output(self.attend(x, cache, start))
        up = F.gelu(self.ffn_up(self.ffn_norm(x)), approximate="tanh")
        result: Tensor = x + self.ffn_down(up)
        return result


class GPT(nn.Module):
    """The model; its module names are those of a GGUF file, but for the list of blocks (blk)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.num_known + 1, config.width)
        self.position_embd = nn.Embedding(config.context, config.width)
        self.blk = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.output_norm = nn.LayerNorm(config.width)
        if not config.tied:
            self.output = nn.Embedding(config.num_known + 1, config.width)
        self.initialize()

    def initialize(self) -> None:
        """GPT-2's initial weights."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(parameter, 0, 0.02 / (math.sqrt(2 * self.config.layers) if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.reserve_channel()

    @torch.no_grad()
    def reserve_channel(self) -> None:
        """Set the silent channel and the silent token's row."""
        channel = self.config.silent_channel
        self.output_norm.weight[channel] = 0
        self.output_norm.bias[channel] = 1
        self.token_embd.weight[:, channel] = 0
        self.token_embd.weight[-1] = 0
        self.token_embd.weight[-1, channel] = -SILENCE

    def mask_gradients(self) -> None:
        """Drop the gradients of what reserve_channel set, so that it stays."""
        channel = self.config.silent_channel
        for parameter in (self.output_norm.weight, self.output_norm.bias, self.token_embd.weight):
            if parameter.grad is not None:
                parameter.grad[..., channel] = 0
        if self.token_embd.weight.grad is not None:
            self.token_embd.weight.grad[-1] = 0

    def hidden(self, ids: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Final hidden states. ids: int64[batch, rows]; with a cache they stand at positions start, start + 1, ..."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.token_embd(ids) + self.position_embd(positions)
        for i, block in enumerate(self.blk):
            x = block(x, None if cache is None else cache[i], start)
        hidden: Tensor = self.output_norm(x)
        return hidden

    def head(self) -> Tensor:
        """Output rows of the known tokens, float32[num_known, width]."""
        return (self.token_embd if self.config.tied else self.output).weight[:-1]

    def new_cache(self, batch: int, length: int) -> Cache:
        """Room for the keys and values of a batch of texts of that length."""
        config = self.config
        shape = (batch, config.heads, length, config.width // config.heads)
        like = self.position_embd.weight
        return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.layers)]


@dataclass(frozen=True)
class Checkpoint:
    """A model and the token ids it knows (int64[num_known], ascending) of its vocabulary."""

    model: GPT
    known: npt.NDArray[np.int64]
    vocab_size: int = VOCABULARY

    def numbers(self) -> npt.NDArray[np.int64]:
        """For each token id, its number in the model."""
        table = np.full(self.vocab_size, len(self.known), np.int64)
        table[self.known] = np.arange(len(self.known))
        return table

    def save(self, path: Path) -> None:
        stored = {"config": asdict(self.model.config), "state": self.model.state_dict()}
        torch.save(stored | {"known": torch.from_numpy(self.known), "vocab_size": self.vocab_size}, path)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, or a GGUF file of any GPT-2."""
    if path.suffix == ".gguf":
        return load_gguf(path)
    stored = torch.load(path, weights_only=True)  # else whoever made the file could run anything here
    model = GPT(Config(**stored["config"]))
    model.load_state_dict(stored["state"])
    return Checkpoint(model, stored["known"].numpy(), stored["vocab_size"])


def load_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file; tokens whose rows of the embedding are all the same, and in one channel only, are silent."""
    reader = GGUFReader(path)
    weights = {t.name: np.array(quants.dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors}
    rows = weights["token_embd.weight"]
    _, first, group, sizes = np.unique(rows, axis=0, return_index=True, return_inverse=True, return_counts=True)
    shared = rows[first[sizes.argmax()]]
    silent = (group.reshape(-1) == sizes.argmax()) & (sizes.max() > 1) & (np.count_nonzero(shared) == 1)
    known = np.flatnonzero(~silent)
    for name in ("token_embd.weight", "output.weight"):
        if name in weights:
            last = shared if silent.any() else np.zeros_like(shared)
            weights[name] = np.concatenate([weights[name][known], last[None]])

    def number(key: str) -> int:
        field = reader.get_field(f"gpt2.{key}")
        if field is None:
            raise ValueError(f"{path} has no gpt2.{key}")
        return int(field.contents())

    if number("feed_forward_length") != 4 * number("embedding_length"):
        raise ValueError(f"{path}: its feed-forward layers are not 4 times as wide as the model")
    norm = weights["output_norm.weight"]
    channel = int(np.abs(norm * weights["token_embd.weight"][:-1].std(0)).argmin())  # the one that matters least
    config = Config(
        width=number("embedding_length"),
        layers=number("block_count"),
        heads=number("attention.head_count"),
        num_known=len(known),
        silent_channel=channel,
        context=number("context_length"),
        tied="output.weight" not in weights,
    )
    model = GPT(config)
    model.load_state_dict({name: torch.from_numpy(weight.copy()) for name, weight in weights.items()})
    return Checkpoint(model, known, len(rows))
