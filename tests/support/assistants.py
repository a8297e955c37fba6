"""Small random assistants of Gemma 4 as GGUF files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from support.feature_drafts import Array
from support.random_models import RandomModel, Tensors


@dataclass
class Assistant:
    """An assistant of a target.

    Attributes:
        target: whose heads of keys and values, window, width and vocabulary it has.
        windowed: of each layer, whether it has a window.
        centroids: whether the file has tensors of a head that scores few tokens, which is not used.
        metadata: other values of keys; None to leave one out.
    """

    architecture: ClassVar[str] = "gemma4-assistant"
    tokenizer: ClassVar[bool] = True
    target: RandomModel
    width: int = 32
    heads: int = 4
    windowed: tuple[bool, ...] = (True, True, False)
    ffn_width: int = 64
    centroids: bool = False
    quantization: str = "F32"
    seed: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

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
        found, of_target = Tensors(self.seed), self.target.width
        matrix, norm = found.matrix, found.norm
        matrix("token_embd", self.target.vocab_size, self.width)
        matrix("nextn.pre_projection", self.width, 2 * of_target)
        matrix("nextn.post_projection", of_target, self.width)
        norm("output_norm", self.width)
        found["rope_freqs.weight"] = self.target.vectors["rope_freqs.weight"]
        for layer in range(len(self.windowed)):
            block, dim = f"blk.{layer}.", self.head_dim(layer)
            for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                norm(block + name, self.width)
            norm(block + "attn_q_norm", dim, scale=1 / np.sqrt(dim))  # as nothing else scales scores
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
