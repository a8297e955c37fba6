"""GPT-2 in plain numpy: slow, obviously correct, and the oracle of other tests."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, quants

Floats = npt.NDArray[np.float32]


class Gpt2Reference:
    """A GPT-2 GGUF with all its weights as float32, whatever their type in the file.

    Activations are float32 throughout, so an engine that rounds them (to int8 for quantized weights, or to float16
    inside GELU as ggml does) differs a little.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        reader = GGUFReader(path)
        self._fields = reader.fields
        if self._value("general.architecture") != "gpt2":
            raise ValueError(f"not a GPT-2 model: {path}")
        self.width: int = self._value("gpt2.embedding_length")
        self.num_layers: int = self._value("gpt2.block_count")
        self.num_heads: int = self._value("gpt2.attention.head_count")
        self.context: int = self._value("gpt2.context_length")
        self.epsilon: float = self._value("gpt2.attention.layer_norm_epsilon")
        # A copy, so that nothing refers to the file afterwards.
        self.weights: dict[str, Floats] = {
            tensor.name: np.array(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            for tensor in reader.tensors
        }
        # A file without its own head uses the token embedding.
        self._head = self.weights.get("output.weight", self.weights["token_embd.weight"])

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Logits after each token: float32[len(tokens), vocabulary]."""
        if not 0 < len(tokens) <= self.context:
            raise ValueError(f"{len(tokens)} tokens, but the context holds 1 to {self.context}")
        ids = np.asarray(tokens)
        x: Floats = self.weights["token_embd.weight"][ids] + self.weights["position_embd.weight"][: len(ids)]
        for layer in range(self.num_layers):
            block = f"blk.{layer}"
            x = x + self._attention(block, self._norm(f"{block}.attn_norm", x))
            x = x + self._feed_forward(block, self._norm(f"{block}.ffn_norm", x))
        result: Floats = self._norm("output_norm", x) @ self._head.T
        return result

    def _attention(self, block: str, x: Floats) -> Floats:
        num_tokens, head_size = len(x), self.width // self.num_heads
        stacked = self._linear(f"{block}.attn_qkv", x)
        # [3, heads, tokens, head size]
        query, key, value = stacked.reshape(num_tokens, 3, self.num_heads, head_size).transpose(1, 2, 0, 3)
        scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(head_size))
        future = np.triu(np.ones((num_tokens, num_tokens), dtype=bool), k=1)
        weighted = softmax(np.where(future, np.float32(-np.inf), scores)) @ value
        return self._linear(f"{block}.attn_output", weighted.transpose(1, 0, 2).reshape(num_tokens, self.width))

    def _feed_forward(self, block: str, x: Floats) -> Floats:
        return self._linear(f"{block}.ffn_down", gelu(self._linear(f"{block}.ffn_up", x)))

    def _linear(self, name: str, x: Floats) -> Floats:
        result: Floats = x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]
        return result

    def _norm(self, name: str, x: Floats) -> Floats:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        unit = centred / np.sqrt(variance + np.float32(self.epsilon))
        result: Floats = unit * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
        return result

    def _value(self, key: str) -> Any:
        if key not in self._fields:
            raise ValueError(f"the file has no metadata {key!r}")
        return self._fields[key].contents()


def softmax(scores: Floats) -> Floats:
    """Softmax over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return result


def gelu(x: Floats) -> Floats:
    """GELU in GPT-2's tanh form."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    result: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result
