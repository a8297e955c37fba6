"""GPT-2, Llama, Qwen, Phi-3 and mixtures in plain numpy, in double precision: slow, and an exact oracle.

The other families have libllama's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, quants

Doubles = npt.NDArray[np.float64]

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "qwen3moe", "phi3", "glm4moe")


@dataclass
class Contents:
    """A model's file: keys without the architecture's name, and tensors in doubles or int64, whatever their types."""

    architecture: str
    keys: dict[str, Any]
    tensors: dict[str, npt.NDArray[Any]]

    @classmethod
    def made(cls, draft: Any) -> Contents:
        """Of a draft that no file holds, unquantized."""
        doubles = {name: each if name == "d2t" else each.astype(np.float64) for name, each in draft.tensors().items()}
        return cls(draft.architecture, draft.keys() | draft.metadata, doubles)

    @classmethod
    def of(cls, path: str | Path) -> Contents:
        reader, tensors = GGUFReader(path), dict[str, npt.NDArray[Any]]()
        keys = {  # but long lists
            name: field.contents()
            for name, field in reader.fields.items()
            if field.types[0] is not GGUFValueType.ARRAY or "tokenizer" not in name
        }
        for tensor in reader.tensors:
            if tensor.tensor_type in (GGMLQuantizationType.I32, GGMLQuantizationType.I64):
                tensors[tensor.name] = np.array(tensor.data, np.int64)
            else:
                tensors[tensor.name] = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        family = keys["general.architecture"]
        return cls(family, {name.removeprefix(f"{family}."): value for name, value in keys.items()}, tensors)


class Reference:
    """What families compute alike."""

    def __init__(self, contents: Contents) -> None:
        self.family, self.keys, self.weights = contents.architecture, contents.keys, contents.tensors
        self.heads: int = self.keys["attention.head_count"]
        self.kv_heads: int = self.keys.get("attention.head_count_kv", self.heads)
        self.dim: int = self.keys.get("attention.key_length", self.keys["embedding_length"] // self.heads)
        self.adjacent = self.family in ("llama", "eagle3")  # the layout of rotary pairs; else halves of a head

    def linear(self, name: str, x: Doubles) -> Doubles:
        result: Doubles = x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)
        return result

    def norm(self, name: str, x: Doubles) -> Doubles:
        """Over the last axis, where the file has that norm."""
        if f"{name}.weight" not in self.weights:
            return x
        if self.family == "gpt2":
            x = x - x.mean(axis=-1, keepdims=True)
        epsilon = self.keys.get("attention.layer_norm_epsilon") or self.keys["attention.layer_norm_rms_epsilon"]
        unit = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon)
        result: Doubles = unit * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0)
        return result

    def turned(self, name: str, x: Doubles, positions: npt.ArrayLike, context: int = 0) -> Doubles:
        """Queries or keys [n, heads, head width], normed, at their positions; `context` chooses among long factors."""
        x = self.norm(f"{name}_norm", x)
        if self.family == "gpt2":
            return x
        dims = self.keys.get("rope.dimension_count", self.dim)
        length = "long" if context > self.keys.get("rope.scaling.original_context_length", context) else "short"
        factors = self.weights.get("rope_freqs.weight", self.weights.get(f"rope_factors_{length}.weight", 1.0))
        if self.keys.get("rope.scaling.type") == "linear":
            factors = factors * self.keys["rope.scaling.factor"]
        frequencies = self.keys.get("rope.freq_base", 10000.0) ** (-np.arange(0, dims, 2) / dims)
        angles = np.asarray(positions, np.float64)[:, None] * frequencies / factors
        amplitude = self.keys.get("rope.scaling.attn_factor", 1.0)
        cosines, sines = (amplitude * f(angles)[:, None, :] for f in (np.cos, np.sin))
        result = x.copy()
        first = slice(0, dims, 2) if self.adjacent else slice(0, dims // 2)
        second = slice(1, dims, 2) if self.adjacent else slice(dims // 2, dims)
        result[..., first] = x[..., first] * cosines - x[..., second] * sines
        result[..., second] = x[..., first] * sines + x[..., second] * cosines
        return result

    def attended(self, name: str, q: Doubles, k: Doubles, v: Doubles, seen: npt.NDArray[np.bool_]) -> Doubles:
        """What attention adds [n, width] to rows with these queries; `seen` [n, m] says which of m keys each sees."""
        k, v = (np.repeat(part, self.heads // self.kv_heads, axis=1).transpose(1, 0, 2) for part in (k, v))
        scores = np.where(seen, q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) / np.sqrt(self.dim), -np.inf)
        return self.linear(name, (softmax(scores) @ v).transpose(1, 0, 2).reshape(len(q), -1))

    def feed_forward(self, block: str, x: Doubles) -> Doubles:
        up = self.linear(block + "ffn_up", x)
        if self.family == "gpt2":
            return self.linear(block + "ffn_down", gelu(up))
        gate, up = np.split(up, 2, axis=1) if self.family == "phi3" else (self.linear(block + "ffn_gate", x), up)
        return self.linear(block + "ffn_down", gate / (1 + np.exp(-gate)) * up)


class FamilyReference(Reference):
    """A GGUF model.

    Args:
        half: whether keys and values are kept as float16, as the engines keep them.
    """

    def __init__(self, path: str | Path, *, half: bool = True) -> None:
        super().__init__(Contents.of(path))
        self._half = half

    def logits(self, tokens: Sequence[int], context: int = 512) -> Doubles:
        """Logits after each token: float64[len(tokens), vocabulary]; `context` chooses among long factors."""
        assert self.family in FAMILIES
        x = self.weights["token_embd.weight"][list(tokens)]
        if self.family == "gpt2":
            x = x + self.weights["position_embd.weight"][: len(x)]
        for layer in range(self.keys["block_count"]):
            block = f"blk.{layer}."
            x = x + self._attention(block, self.norm(block + "attn_norm", x), context)
            read = self.norm(block + ("post_attention_norm" if self.family == "glm4moe" else "ffn_norm"), x)
            has_experts = f"{block}ffn_gate_inp.weight" in self.weights
            x = x + (self._experts(block, read) if has_experts else self.feed_forward(block, read))
        head = "output" if "output.weight" in self.weights else "token_embd"
        return self.judged(x) @ self.weights[f"{head}.weight"].T

    def judged(self, x: Doubles) -> Doubles:
        """What the head reads of hidden states behind the last layer, [n, width] both."""
        return self.norm("output_norm", x)

    def _attention(self, block: str, x: Doubles, context: int) -> Doubles:
        n, heads, kv_heads, dim = len(x), self.heads, self.kv_heads, self.dim
        if f"{block}attn_qkv.weight" in self.weights:
            joint = self.linear(block + "attn_qkv", x)
            q, k, v = np.split(joint, [heads * dim, (heads + kv_heads) * dim], axis=1)
        else:
            q, k, v = (self.linear(block + f"attn_{part}", x) for part in "qkv")
        q = self.turned(block + "attn_q", q.reshape(n, heads, dim), range(n), context)
        k = self.turned(block + "attn_k", k.reshape(n, kv_heads, dim), range(n), context)
        v = v.reshape(n, kv_heads, dim)
        if self._half:
            k, v = (part.astype(np.float16).astype(np.float64) for part in (k, v))
        return self.attended(block + "attn_output", q, k, v, np.tri(n, dtype=bool))

    def _experts(self, block: str, x: Doubles) -> Doubles:
        logits = self.linear(block + "ffn_gate_inp", x)
        scores = 1 / (1 + np.exp(-logits)) if self.family == "glm4moe" else softmax(logits)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.keys["expert_used_count"]]
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
