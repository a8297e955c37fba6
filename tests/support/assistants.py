"""Small random assistants of Gemma 4 as GGUF files, and their arithmetic in doubles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from support.family_reference import FamilyReference, gelu
from support.feature_drafts import Array, Contents, Doubles
from support.random_models import RandomModel, add_key, add_vocabulary, gguf_file

FAMILY = "gemma4-assistant"


@dataclass
class Assistant:
    """An assistant of a target.

    Attributes:
        target: whose heads of keys and values, window, width and vocabulary it has.
        windowed: of each layer, whether it has a window.
        centroids: whether the file has tensors of a head that scores few tokens, which is not used.
        metadata: other values of keys; None to leave one out.
    """

    target: RandomModel
    width: int = 32
    heads: int = 4
    windowed: tuple[bool, ...] = (True, True, False)
    ffn_width: int = 64
    centroids: bool = False
    quantization: str = "F32"
    seed: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)

    def head_dim(self, layer: int) -> int:
        return int(self.target.metadata["attention.key_length_swa"]) if self.windowed[layer] else self.target.dim

    def keys(self) -> dict[str, Any]:
        """Keys of the file, without the architecture's name."""
        layers, target = len(self.windowed), self.target
        of_target = ("sliding_window", "key_length_swa", "value_length_swa")
        kv_heads = {
            target.windowed(i): target.number("attention.head_count_kv", i, target.kv_heads)
            for i in range(target.layers)
        }
        return {
            "block_count": layers,
            "nextn_predict_layers": layers,
            "context_length": 256,
            "embedding_length": self.width,
            "embedding_length_out": target.width,
            "embedding_length_per_layer_input": 0,
            "feed_forward_length": self.ffn_width,
            "attention.head_count": self.heads,
            "attention.head_count_kv": [kv_heads[each] for each in self.windowed],
            "attention.key_length": target.dim,
            "attention.value_length": target.dim,
            "attention.shared_kv_layers": layers,
            "attention.sliding_window_pattern": list(self.windowed),
            "attention.layer_norm_rms_epsilon": 1e-6,
            **{f"attention.{name}": target.metadata[f"attention.{name}"] for name in of_target},
            "rope.dimension_count": target.dim,
            "rope.dimension_count_swa": target.metadata["rope.dimension_count_swa"],
            "rope.freq_base": target.metadata.get("rope.freq_base", 10000.0),
            "rope.freq_base_swa": target.metadata.get("rope.freq_base_swa", 10000.0),
        }

    def tensors(self) -> dict[str, Array]:
        """Matrices [outputs, inputs], norms around 1; before they are quantized."""
        random, of_target = np.random.default_rng(self.seed), self.target.width
        found: dict[str, Array] = {}

        def matrix(name: str, rows: int, cols: int) -> None:
            found[f"{name}.weight"] = (random.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

        def norm(name: str, size: int, scale: float = 1) -> None:
            found[f"{name}.weight"] = (scale * (1 + 0.1 * random.standard_normal(size))).astype(np.float32)

        matrix("token_embd", self.target.vocab_size, self.width)
        matrix("nextn.pre_projection", self.width, 2 * of_target)
        matrix("nextn.post_projection", of_target, self.width)
        norm("output_norm", self.width)
        found["rope_freqs.weight"] = self.target.vectors["rope_freqs.weight"]
        for layer in range(len(self.windowed)):
            block, dim = f"blk.{layer}.", self.head_dim(layer)
            for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                norm(block + name, self.width)
            norm(block + "attn_q_norm", dim, 1 / np.sqrt(dim))  # as nothing else scales scores
            norm(block + "layer_output_scale", 1)
            matrix(block + "attn_q", self.heads * dim, self.width)
            matrix(block + "attn_output", self.width, self.heads * dim)
            matrix(block + "ffn_gate", self.ffn_width, self.width)
            matrix(block + "ffn_up", self.ffn_width, self.width)
            matrix(block + "ffn_down", self.width, self.ffn_width)
        if self.centroids:
            matrix("masked_embd_centroids", 20, self.width)
            found["masked_embd_ordering"] = np.arange(self.target.vocab_size, dtype=np.int32)
        return found


def write_assistant(path: Path, draft: Assistant, changed: Mapping[str, Array | None] | None = None) -> Path:
    """Write an assistant; the same seed gives the same file.

    Args:
        changed: tensors that differ, by name; None to leave one out.
    """
    kind = GGMLQuantizationType[draft.quantization]
    with gguf_file(path, FAMILY) as writer:
        writer.add_name("a random draft")
        for key, value in (draft.keys() | draft.metadata).items():
            if value is not None:
                add_key(writer, f"{FAMILY}.{key}", value)
        add_vocabulary(writer, draft.target.vocab_size)
        for name, values in (draft.tensors() | dict(changed or {})).items():
            if values is not None and values.ndim == 2:
                writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
            elif values is not None:
                writer.add_tensor(name, values)
    return path


class AssistantTwin:
    """An assistant behind the first tokens of a text of its target.

    Args:
        tokens: that its rows see.
    """

    def __init__(self, path: Path, target_path: Path, tokens: Sequence[int]) -> None:
        contents, target = Contents.of(path), FamilyReference(target_path)
        self._keys, self._tensors, self._length = contents.keys, contents.tensors, len(tokens)
        self._embedding = target.weights["token_embd.weight"] * np.sqrt(target.width)
        target.logits(list(tokens))
        self._cells = target.cells

    def rows(self, tokens: Sequence[int], states: npt.ArrayLike) -> tuple[Doubles, Doubles]:
        """Logits [n, vocabulary] after rows of tokens and of what the head reads of the token before each, or what the
        row before handed on, [n, target's width]; and what they hand on, as wide."""
        x = self._linear("nextn.pre_projection", np.concatenate([self._embedding[list(tokens)], states], axis=1))
        for layer in range(self._keys["block_count"]):
            block = f"blk.{layer}."
            x = x + self._norm(
                block + "post_attention_norm", self._attention(layer, self._norm(block + "attn_norm", x))
            )
            read = self._norm(block + "ffn_norm", x)
            opened = gelu(self._linear(block + "ffn_gate", read)) * self._linear(block + "ffn_up", read)
            x = x + self._norm(block + "post_ffw_norm", self._linear(block + "ffn_down", opened))
            x = x * self._tensors[block + "layer_output_scale.weight"]
        x = self._norm("output_norm", x)
        return self._linear("token_embd", x), self._linear("nextn.post_projection", x)

    def _attention(self, layer: int, x: Doubles) -> Doubles:
        windowed = self._keys["attention.sliding_window_pattern"][layer]
        k, v = (part.astype(np.float16).astype(np.float64) for part in self._cells[windowed])
        first = max(0, self._length + 1 - self._keys["attention.sliding_window"]) if windowed else 0
        k, v, dim = k[first:], v[first:], k.shape[2]
        q = self._norm(f"blk.{layer}.attn_q_norm", self._linear(f"blk.{layer}.attn_q", x).reshape(len(x), -1, dim))
        ending = "_swa" if windowed else ""
        frequencies = self._keys[f"rope.freq_base{ending}"] ** (-np.arange(0, dim, 2) / dim)
        angles = self._length * frequencies / (1.0 if windowed else self._tensors["rope_freqs.weight"])
        a, b = np.split(q, 2, axis=2)
        q = np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=2)
        k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
        scores = np.einsum("nhd,chd->nhc", q, k)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        mixed = np.einsum("nhc,chd->nhd", weights / weights.sum(axis=2, keepdims=True), v)
        return self._linear(f"blk.{layer}.attn_output", mixed.reshape(len(x), -1))

    def _linear(self, name: str, x: Doubles) -> Doubles:
        return np.asarray(x @ self._tensors[f"{name}.weight"].T)

    def _norm(self, name: str, x: Doubles) -> Doubles:
        scale = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self._keys["attention.layer_norm_rms_epsilon"])
        return np.asarray(x / scale * self._tensors[f"{name}.weight"])
