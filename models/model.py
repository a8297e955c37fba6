"""GPT-2 in PyTorch: learned positions, pre-norm, tanh GELU."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGUFReader, quants
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]  # per layer: keys and values, [batch, heads, length, head width]


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    width: int
    layers: int
    heads: int
    vocab_size: int
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
        self.token_embd = nn.Embedding(config.vocab_size, config.width)
        self.position_embd = nn.Embedding(config.context, config.width)
        self.blk = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.output_norm = nn.LayerNorm(config.width)
        if not config.tied:
            self.output = nn.Embedding(config.vocab_size, config.width)
        self.initialize()

    def initialize(self) -> None:
        """GPT-2's initial weights."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(parameter, 0, 0.02 / (math.sqrt(2 * self.config.layers) if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def hidden(self, ids: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Final hidden states. ids: int64[batch, rows]; with a cache they stand at positions start, start + 1, ..."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.token_embd(ids) + self.position_embd(positions)
        for i, block in enumerate(self.blk):
            x = block(x, None if cache is None else cache[i], start)
        hidden: Tensor = self.output_norm(x)
        return hidden

    def head(self) -> Tensor:
        """The output matrix, float32[vocab_size, width]."""
        return (self.token_embd if self.config.tied else self.output).weight

    def new_cache(self, batch: int, length: int) -> Cache:
        """Room for the keys and values of a batch of texts of that length."""
        config = self.config
        shape = (batch, config.heads, length, config.width // config.heads)
        like = self.position_embd.weight
        return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.layers)]


def save(model: GPT, path: Path) -> None:
    """Write a checkpoint, for `load`."""
    torch.save({"config": asdict(model.config), "state": model.state_dict()}, path)


def load(path: Path) -> GPT:
    """Read a checkpoint, or a GGUF file of any GPT-2."""
    if path.suffix == ".gguf":
        return load_gguf(path)
    stored = torch.load(path, weights_only=True)  # else whoever made the file could run anything here
    model = GPT(Config(**stored["config"]))
    model.load_state_dict(stored["state"])
    return model


def load_gguf(path: Path) -> GPT:
    """Read a GGUF file."""
    reader = GGUFReader(path)
    weights = {t.name: np.array(quants.dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors}

    def number(key: str) -> int:
        field = reader.get_field(f"gpt2.{key}")
        if field is None:
            raise ValueError(f"{path} has no gpt2.{key}")
        return int(field.contents())

    if number("feed_forward_length") != 4 * number("embedding_length"):
        raise ValueError(f"{path}: its feed-forward layers are not 4 times as wide as the model")
    config = Config(
        width=number("embedding_length"),
        layers=number("block_count"),
        heads=number("attention.head_count"),
        vocab_size=len(weights["token_embd.weight"]),
        context=number("context_length"),
        tied="output.weight" not in weights,
    )
    model = GPT(config)
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})
    return model
