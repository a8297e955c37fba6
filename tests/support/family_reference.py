"""GPT-2, Llama, Qwen, Phi-3 and mixtures in plain numpy, in double precision: slow, and an exact oracle.

The other families have libllama's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, quants

Doubles = npt.NDArray[np.float64]

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "qwen3moe", "phi3", "glm4moe")


class FamilyReference:
    """A GGUF model with all its weights as float64, whatever their type in the file.

    Args:
        half: whether keys and values are kept as float16, as the engines keep them.
    """

    def __init__(self, path: str | Path, *, half: bool = True) -> None:
        reader, self._half = GGUFReader(path), half
        self._values = {name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
        self.family: str = self._values["general.architecture"]
        self.chosen: list[npt.NDArray[np.int64]] = []  # experts of each row, of each layer that has any
        self.weights: dict[str, Doubles] = {
            tensor.name: np.array(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float64)
            for tensor in reader.tensors
        }
        self.heads: int = self._key("attention.head_count")
        self.kv_heads: int = self._key("attention.head_count_kv", self.heads)
        self.dim: int = self._key("attention.key_length", self._key("embedding_length") // self.heads)

    def logits(self, tokens: Sequence[int], context: int = 512) -> Doubles:
        """Logits after each token: float64[len(tokens), vocabulary]; `context` chooses among long factors."""
        assert self.family in FAMILIES
        x = self.weights["token_embd.weight"][list(tokens)]
        if self.family == "gpt2":
            x = x + self.weights["position_embd.weight"][: len(x)]
        for layer in range(self._key("block_count")):
            block = f"blk.{layer}."
            x = x + self._attention(block, self._norm(block + "attn_norm", x), context)
            read = self._norm(block + ("post_attention_norm" if self.family == "glm4moe" else "ffn_norm"), x)
            has_experts = f"{block}ffn_gate_inp.weight" in self.weights
            x = x + (self._experts(block, read) if has_experts else self._feed_forward(block, read))
        head = "output" if "output.weight" in self.weights else "token_embd"
        return self.judged(x) @ self.weights[f"{head}.weight"].T

    def judged(self, x: Doubles) -> Doubles:
        """What the head reads of hidden states behind the last layer, [n, width] both."""
        return self._norm("output_norm", x)

    def _attention(self, block: str, x: Doubles, context: int) -> Doubles:
        n, heads, kv_heads, dim = len(x), self.heads, self.kv_heads, self.dim
        if f"{block}attn_qkv.weight" in self.weights:
            joint = self._linear(block + "attn_qkv", x)
            q, k, v = np.split(joint, [heads * dim, (heads + kv_heads) * dim], axis=1)
        else:
            q, k, v = (self._linear(block + f"attn_{part}", x) for part in "qkv")
        q, k, v = q.reshape(n, heads, dim), k.reshape(n, kv_heads, dim), v.reshape(n, kv_heads, dim)
        q, k = self._norm(block + "attn_q_norm", q), self._norm(block + "attn_k_norm", k)
        q, k = self._rotate(q, context), self._rotate(k, context)
        if self._half:
            k, v = (part.astype(np.float16).astype(np.float64) for part in (k, v))
        k, v = (np.repeat(part, heads // kv_heads, axis=1).transpose(1, 0, 2) for part in (k, v))
        scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) / np.sqrt(dim)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        mixed = (softmax(scores) @ v).transpose(1, 0, 2)
        return self._linear(block + "attn_output", mixed.reshape(n, -1))

    def _rotate(self, x: Doubles, context: int) -> Doubles:
        if self.family == "gpt2":
            return x
        n, dims = len(x), self._key("rope.dimension_count", self.dim)
        length = "long" if context > self._key("rope.scaling.original_context_length", context) else "short"
        factors = self.weights.get("rope_freqs.weight", self.weights.get(f"rope_factors_{length}.weight", 1.0))
        frequencies = self._key("rope.freq_base", 10000.0) ** (-np.arange(0, dims, 2) / dims)
        angles = np.arange(n)[:, None] * frequencies / factors
        amplitude = self._key("rope.scaling.attn_factor", 1.0)
        cosines, sines = (amplitude * f(angles)[:, None, :] for f in (np.cos, np.sin))
        result, adjacent = x.copy(), self.family == "llama"
        first = slice(0, dims, 2) if adjacent else slice(0, dims // 2)
        second = slice(1, dims, 2) if adjacent else slice(dims // 2, dims)
        result[..., first] = x[..., first] * cosines - x[..., second] * sines
        result[..., second] = x[..., first] * sines + x[..., second] * cosines
        return result

    def _feed_forward(self, block: str, x: Doubles) -> Doubles:
        up = self._linear(block + "ffn_up", x)
        if self.family == "gpt2":
            return self._linear(block + "ffn_down", gelu(up))
        gate, up = np.split(up, 2, axis=1) if self.family == "phi3" else (self._linear(block + "ffn_gate", x), up)
        return self._linear(block + "ffn_down", gate / (1 + np.exp(-gate)) * up)

    def _experts(self, block: str, x: Doubles) -> Doubles:
        logits = self._linear(block + "ffn_gate_inp", x)
        scores = 1 / (1 + np.exp(-logits)) if self.family == "glm4moe" else softmax(logits)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self._key("expert_used_count")]
        self.chosen.append(best)
        chosen = np.take_along_axis(scores, best, axis=1)
        if self.family in ("llama", "qwen3moe"):
            chosen = chosen / chosen.sum(axis=1, keepdims=True)
        found = np.zeros_like(x)
        gates, ups, downs = (self.weights[f"{block}ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        for row, (experts, weights) in enumerate(zip(best, chosen, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                gate = gates[expert] @ x[row]
                found[row] += weight * (downs[expert] @ (gate / (1 + np.exp(-gate)) * (ups[expert] @ x[row])))
        return found

    def _linear(self, name: str, x: Doubles) -> Doubles:
        result: Doubles = x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)
        return result

    def _norm(self, name: str, x: Doubles) -> Doubles:
        if f"{name}.weight" not in self.weights:
            return x
        if self.family == "gpt2":
            x = x - x.mean(axis=-1, keepdims=True)
        epsilon = self._key("attention.layer_norm_epsilon", None) or self._key("attention.layer_norm_rms_epsilon")
        unit = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon)
        result: Doubles = unit * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0)
        return result

    def _key(self, key: str, *otherwise: Any) -> Any:
        return self._values.get(f"{self.family}.{key}", *otherwise)


def softmax(x: Doubles) -> Doubles:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Doubles = powers / powers.sum(axis=-1, keepdims=True)
    return result


def log_softmax(x: npt.NDArray[np.floating]) -> Doubles:
    shifted = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
    result: Doubles = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def gelu(x: Doubles) -> Doubles:
    result: Doubles = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return result
