"""Checkpoints of random drafts that read the target's features, as several projects write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.feature_drafts import Array, Block, Eagle3, block_tensors, dspark, eagle3_tensors

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {"output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens"}
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
        for name, values in (eagle3_tensors(self.draft) if eagle3 else block_tensors(self.draft)).items():
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
                    stem = {"markov_w1": "markov_head.markov_w1", "markov_w2": "markov_head.markov_w2"}.get(
                        stem, _OTHERS.get(stem, stem)
                    )
                found[f"{stem}.{end}"] = values
        for old, new in self.names.items():
            found = {name.replace(old, new): values for name, values in found.items()}
        return found | self.more


_CONFIDENCE = {"weight": np.ones((1, 80), np.float32), "bias": np.ones(1, np.float32)}  # of a head that is not used
_COPIES = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
_MIDLAYER = {"layers.0.": "midlayer."}
_CUT = {"draft_vocab": 90, "own_head": True}
_SPECULATORS = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
_DSPARK = {"enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": 16}
_PUBLISHED = {"layer_types": ["full_attention"] * 5, "markov_rank": 256, "markov_head_type": "vanilla"} | {
    "enable_confidence_head": True
}
# Of config.json of LFM2.5-1.2B-Instruct-DSpark and of MiniCPM5-2B-DSpark, as published.
LFM2 = _PUBLISHED | {
    "architectures": ["Lfm2DSparkDraftModel"],
    "model_type": "qwen3",
    "block_size": 9,
    "rms_norm_eps": 1e-5,
    "rope_is_neox_style": False,
    "dflash_config": {"mask_token_id": 64402, "target_layer_ids": [2, 5, 8, 11, 14], "num_target_layers": 16},
}
MINICPM5 = _PUBLISHED | {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "modeling.Qwen3DSparkModel"},
    "block_size": 7,
    "attention_bias": False,
    "attention_mode": "gqa",
    "tie_word_embeddings": False,
    "projector_type": "dspark",
    "confidence_head_with_markov": True,
    "confidence_head_alpha": 1.0,
    "num_target_layers": 42,
    "mask_token_id": 75982,
    "target_layer_ids": [1, 10, 20, 30, 39],
    "draft_vocab_size": 130560,
}
FORMS: dict[str, Callable[[], Form]] = {
    "EAGLE": lambda: Form(
        Eagle3(taps=[2, 3, 4], **_CUT),
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 90, "rope_scaling": None},
        names=_MIDLAYER,
    ),
    "EAGLE, narrower than its target": lambda: Form(
        Eagle3(width=32, taps=[2, 3, 4], own_embedding=True, **_CUT),
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 90, "target_hidden_size": 64},
        names=_MIDLAYER,
    ),
    "SpecForge": lambda: Form(
        Eagle3(taps=[2, 3, 4], separate_fc_norm=True, norm_output=True, own_head=True),
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 300, "fc_norm": True, "norm_output": True},
        names=_MIDLAYER,
        more={"t2d": np.ones(300, bool), "d2t": np.zeros(300, np.int64)},
    ),
    "AngelSlim": lambda: Form(
        Eagle3(taps=[3, 4, 5], metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, **_CUT),
        {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "draft_vocab_size": 90,
            "eagle_aux_hidden_state_layer_ids": [3, 4, 5],
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        names=_MIDLAYER,
    ),
    "ModelOpt": lambda: Form(
        Eagle3(taps=[1, 4, 6], norm_before_fc=True, **_CUT),
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 90,
            "norm_before_fc": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True},
        },
    ),
    "Speculators": lambda: Form(
        Eagle3(taps=[2, 3, 4], norm_before_residual=True, layers=2, **_CUT),
        _SPECULATORS
        | {
            "draft_vocab_size": 90,
            "norm_before_residual": True,
            "norm_before_fc": False,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
            "speculators_config": {"verifier": {"name_or_path": "some/model"}},
        },
        nested="transformer_layer_config",
        more={"embed_tokens.weight": EMBEDDING, "verifier_norm.weight": np.ones(64, np.float32)},
    ),
    "DeepSpec": lambda: Form(
        Eagle3(taps=[2, 4, 6, 8, 10], head_norms=True),
        {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 3, 5, 7, 9]},
        more=_COPIES,
    ),
    "DFlash": lambda: Form(
        Block(taps=[2, 5], mask_token=299),
        {
            "architectures": ["DFlashDraftModel"],
            "block_size": 4,
            "layer_types": ["full_attention"] * 2,
            "dflash_config": {"mask_token_id": 299, "target_layer_ids": [1, 4]},
        },
    ),
    "Speculators' DFlash": lambda: Form(
        Block(taps=[2, 5], mask_token=7, **_CUT),
        {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "draft_vocab_size": 90,
            "block_size": 4,
            "mask_token_id": 7,
            "aux_hidden_state_layer_ids": [2, 5],
            "sample_from_anchor": False,
        },
        nested="transformer_layer_config",
        more={"embed_tokens.weight": EMBEDDING},
    ),
    "DeepSpec's DFlash": lambda: Form(
        Block(taps=[0, 5], mask_token=298, from_anchor=True),
        {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 4,
            "mask_token_id": 298,
            "target_layer_ids": [-1, 4],
            "markov_rank": 0,
            "enable_confidence_head": False,
        },
        more=_COPIES,
    ),
    "DSpark": lambda: Form(
        dspark(taps=[2, 5]),
        _DSPARK
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 4,
            "mask_token_id": 299,
            "target_layer_ids": [1, 4],
            "markov_head_type": "vanilla",
        },
        more=_COPIES | {f"confidence_head.proj.{part}": values for part, values in _CONFIDENCE.items()},
    ),
    "SpecForge's DSpark": lambda: Form(
        dspark(taps=[2, 5], causal=True),
        {
            "architectures": ["DSparkDraftModel"],
            "block_size": 4,
            "dflash_config": _DSPARK
            | {"projector_type": "dspark", "mask_token_id": 299, "target_layer_ids": [1, 4], "causal": True},
        },
        names={"markov_head.": ""},
        more={f"confidence_proj.{part}": values for part, values in _CONFIDENCE.items()},
    ),
    "LFM2.5's DSpark": lambda: Form(
        dspark(
            taps=[3, 6, 9, 12, 15],
            block=9,
            mask_token=64,
            rope_base=1e7,
            layers=5,
            metadata={"attention.layer_norm_rms_epsilon": 1e-5},
        ),
        LFM2 | {"dflash_config": {"mask_token_id": 64, "target_layer_ids": [2, 5, 8, 11, 14], "num_target_layers": 16}},
        more={f"confidence_head.proj.{part}": values for part, values in _CONFIDENCE.items()},
        neighbours=True,
    ),
    "MiniCPM5's DSpark": lambda: Form(
        dspark(taps=[2, 11, 21, 31, 40], block=7, mask_token=75, rope_base=5e6, layers=5, heads=8, kv_heads=1),
        MINICPM5
        | {
            "draft_vocab_size": 300,
            "mask_token_id": 75,
            "rope_theta": None,
            "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"},
        },
        more={f"confidence_head.proj.{part}": values for part, values in _CONFIDENCE.items()},
    ),
    "Speculators' DSpark": lambda: Form(
        dspark(taps=[2, 5], from_anchor=False, **_CUT),
        {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "draft_vocab_size": 90,
            "block_size": 4,
            "mask_token_id": 299,
            "aux_hidden_state_layer_ids": [2, 5],
            "enable_confidence_head": False,
        },
        nested="transformer_layer_config",
    ),
}


def write_form(folder: Path, form: Form) -> Path:
    """A whole checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(form.numbers()))
    save_file(
        {name: np.ascontiguousarray(values) for name, values in form.tensors().items()}, folder / "model.safetensors"
    )
    return folder
