"""Small random draft heads, and their arithmetic in numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from support.random_models import add_key, gguf_file

Floats = npt.NDArray[np.float32]
EPSILON = 1e-5


@dataclass
class RandomHead:
    """What to write.

    Attributes:
        vocabulary: fingerprint of the target's. tokens: those it can propose. taps: the target's layers it reads.
        metadata: other values of keys, None to leave one out.
    """

    vocabulary: str
    tokens: list[int]
    taps: list[int] = field(default_factory=lambda: [1, 2])
    width: int = 64
    ffn_width: int = 96
    blocks: int = 2
    target_layers: int = 2
    quantization: str = "F32"
    seed: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Floats]:
        """Matrices and norms, as the file rounds them."""
        random = np.random.default_rng(self.seed)
        w, f = self.width, self.ffn_width
        shapes: dict[str, tuple[int, ...]] = {
            "state_norm.weight": (len(self.taps) * w,),
            "state.weight": (w, len(self.taps) * w),
            "step_norm.weight": (2 * w,),
            "step.weight": (w, 2 * w),
            "output_norm.weight": (w,),
            "output.weight": (len(self.tokens), w),
        }
        for i in range(self.blocks):
            shapes |= {
                f"blk.{i}.ffn_norm.weight": (w,),
                f"blk.{i}.ffn_gate.weight": (f, w),
                f"blk.{i}.ffn_up.weight": (f, w),
                f"blk.{i}.ffn_down.weight": (w, f),
            }
        found = {}
        for name, shape in shapes.items():
            values = random.standard_normal(shape).astype(np.float32)
            found[name] = 1 + values / 10 if len(shape) == 1 else values / np.sqrt(np.float32(shape[1]))
        kind = GGMLQuantizationType[self.quantization]
        return {
            name: quants.dequantize(quants.quantize(values, kind), kind) if values.ndim == 2 else values
            for name, values in found.items()
        }


def write(path: Path, head: RandomHead, changed: dict[str, Floats] | None = None) -> Path:
    """Write a head; the same seed gives the same file.

    Args:
        changed: tensors that differ, by name.
    """
    keys: dict[str, Any] = {
        "embedding_length": head.width,
        "feed_forward_length": head.ffn_width,
        "block_count": head.blocks,
        "attention.layer_norm_rms_epsilon": EPSILON,
        "vocabulary": head.vocabulary,
        "target_layers": head.target_layers,
        "taps": head.taps,
        "tokens": head.tokens,
    }
    kind = GGMLQuantizationType[head.quantization]
    with gguf_file(path, "draft-head") as writer:
        writer.add_name("a random head")
        for key, value in (keys | head.metadata).items():
            if value is not None:
                add_key(writer, f"draft-head.{key}", value)
        for name, values in (head.tensors() | (changed or {})).items():
            if values.ndim == 2:
                writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, values)
    return path


class SlowHead:
    """A head's arithmetic in doubles.

    Args:
        embedding: the target's, [vocabulary, width].
    """

    def __init__(self, head: RandomHead, embedding: Floats) -> None:
        self._tensors = {name: values.astype(np.float64) for name, values in head.tensors().items()}
        self._head, self._embedding = head, embedding.astype(np.float64)

    def begin(self, states: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The state before the root, from the target's, [taps, its width]."""
        w = self._head.width
        read = np.concatenate([self._norm(state[:w]) for state in states.astype(np.float64)])
        return self._tensors["state.weight"] @ (read * self._tensors["state_norm.weight"])

    def step(self, state: npt.NDArray[Any], token: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The state after a token, and the log-probabilities of the head's tokens."""
        t, w = self._tensors, self._head.width
        read = np.concatenate([self._norm(state), self._norm(self._embedding[token, :w])])
        state = state + t["step.weight"] @ (read * t["step_norm.weight"])
        for i in range(self._head.blocks):
            x = self._norm(state) * t[f"blk.{i}.ffn_norm.weight"]
            gate = t[f"blk.{i}.ffn_gate.weight"] @ x
            hidden = gate / (1 + np.exp(-gate)) * (t[f"blk.{i}.ffn_up.weight"] @ x)
            state = state + t[f"blk.{i}.ffn_down.weight"] @ hidden
        logits = t["output.weight"] @ (self._norm(state) * t["output_norm.weight"])
        return state, logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    def _norm(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return np.asarray(x / np.sqrt((x * x).mean() + EPSILON))
