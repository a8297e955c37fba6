"""Checkpoints of random drafts that read the target's features, as several projects write them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.feature_drafts import Array, Block, Eagle3
from support.paths import table

_LAYER: dict[str, str] = dict(table("layer_names"))
_OTHERS = {"output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens"}
_OTHERS |= {name: f"markov_head.{name}" for name in ("markov_w1", "markov_w2")}
_RANDOM = np.random.default_rng(3)
EMBEDDING, HEAD = (_RANDOM.standard_normal((300, 64)).astype(np.float32) for _ in range(2))  # a target's


@dataclass
class Form:
    """How a project writes a draft.

    Attributes:
        draft: what is in it.
        config: keys of config.json, beside the numbers of layers.
        nested: the key that holds the numbers of layers.
        names: parts of tensors' names that differ from the usual ones.
        more: further tensors.
        neighbours: RoPE rotates neighbouring dimensions together.
    """

    draft: Eagle3 | Block
    config: dict[str, Any]
    nested: str = ""
    names: dict[str, str] = field(default_factory=dict)
    more: dict[str, Array] = field(default_factory=dict)
    neighbours: bool = False

    def numbers(self) -> dict[str, Any]:
        """config.json."""
        draft = self.draft
        layer = {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": draft.width,
            "intermediate_size": draft.ffn_width,
            "num_hidden_layers": draft.layers,
            "num_attention_heads": draft.heads,
            "num_key_value_heads": draft.kv_heads,
            "head_dim": draft.head_dim,
            "max_position_embeddings": draft.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": draft.rope_base,
            "vocab_size": draft.vocab_size,
        }
        return ({self.nested: layer} if self.nested else layer) | self.config

    def tensors(self) -> dict[str, Array]:
        """By the checkpoint's names."""
        eagle3 = isinstance(self.draft, Eagle3)
        found: dict[str, Array] = {}
        for name, values in self.draft.tensors().items():
            stem, _, end = name.rpartition(".")
            if name == "d2t":
                found["d2t"] = values - np.arange(len(values))
                found["t2d"] = np.isin(np.arange(self.draft.vocab_size), values)
            elif stem == "fc_norm":
                found |= {f"fc_norm.{i}.weight": row for i, row in enumerate(values)}
            else:
                if stem.startswith("blk."):
                    _, layer, part = stem.split(".")
                    stem = f"layers.{layer}.{_LAYER[part]}"
                elif stem == "enc.output_norm":
                    stem = "input_norm" if eagle3 else "hidden_norm"
                else:
                    stem = _OTHERS.get(stem, stem)
                found[f"{stem}.{end}"] = values
        for old, new in self.names.items():
            found = {name.replace(old, new): values for name, values in found.items()}
        return found | self.more


def _form(row: dict[str, Any]) -> Form:
    """A row of data/draft_forms.jsonl; further tensors are a target's, or of a type, all of one number."""
    kind = {"Eagle3": Eagle3, "Block": Block}[row["kind"]]
    fields = {name: value for name, value in row.items() if name not in ("name", "kind", "draft", "more")}
    more = {name: _TARGETS[of] if isinstance(of, str) else filled(*of) for name, of in row.get("more", {}).items()}
    return Form(kind(**copy.deepcopy(row["draft"])), more=more, **fields)


def filled(kind: str, number: float, *shape: int) -> Array:
    return np.full(shape, number, kind)


_TARGETS = {"embedding": EMBEDDING, "head": HEAD}
FORMS: dict[str, Callable[[], Form]] = {row["name"]: partial(_form, row) for row in table("draft_forms")}


def write_form(folder: Path, form: Form) -> Path:
    """A whole checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(form.numbers()))
    save_file(
        {name: np.ascontiguousarray(values) for name, values in form.tensors().items()}, folder / "model.safetensors"
    )
    return folder
