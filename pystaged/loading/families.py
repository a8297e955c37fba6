"""Config keys and tensor names of each family of Hugging Face checkpoints, with GGUF's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_OFF = (False, None)
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ATTENTION = {f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"} | {"attn_output": "self_attn.o_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LLAMA = _NORMS | _ATTENTION | _FEED_FORWARD
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True)
class Family:
    """How checkpoints of one `model_type` differ from the others.

    Args:
        architecture: GGUF's name of the family.
        layers: tensors of a layer: GGUF's names, and the checkpoint's below `blocks`.
        others: the same for tensors outside layers.
        biased: tensors that have a bias; with a key of config.json, only if that is true.
        defaults: values that config.json may omit.
        renamed: config keys that this family names differently.
        only: values that config keys may have, the default first; others do not fit GGUF or are not implemented.
        reals: GGUF's keys of further numbers, and config.json's.
        ropes: kinds of rotary scaling that llama.cpp supports for it; none for learnt positions.
        adjacent: GGUF stores the rows of Q and K that rotate together side by side.
        norm_offset: added to the weights of norms.
        fused: gate and up projection are one tensor, in GGUF files, too; rotary positions may turn a part of each head.
        transposed: matrices of layers are stored as inputs x outputs.
        skipped: name prefixes of tensors that belong to other parts of the model.
    """

    architecture: str
    layers: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    others: Mapping[str, str] = field(default_factory=lambda: {"token_embd": "embed_tokens", "output_norm": "norm"})
    blocks: str = "layers"
    biased: Mapping[str, str | None] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    reals: Mapping[str, str] = field(default_factory=dict)
    ropes: tuple[str, ...] = ("linear", "yarn")
    adjacent: bool = False
    norm_offset: int = 0
    fused: bool = False
    transposed: bool = False
    skipped: tuple[str, ...] = ()


_UNTIED = {"tie_word_embeddings": False}
_SILU = {"hidden_act": ("silu", "swish")}
_PLAIN = {"use_sliding_window": _OFF, "attention_bias": _OFF, "mlp_bias": _OFF}
_OPTIONAL_BIASES = dict.fromkeys(_ATTENTION, "attention_bias") | dict.fromkeys(_FEED_FORWARD, "mlp_bias")
_GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GEMMA3 = Family(
    "gemma3",
    layers=LLAMA
    | HEAD_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    only={
        "hidden_activation": _TANH_GELU[1:2],
        "attention_bias": _OFF,
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": _OFF,
    },
    reals={"final_logit_softcapping": "final_logit_softcapping"},
    ropes=("linear",),
    norm_offset=1,
    skipped=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "gpt2",
        layers=_GPT2,
        others={"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"},
        blocks="h",
        biased=dict.fromkeys((*_GPT2, "output_norm")),
        defaults={"layer_norm_epsilon": 1e-5},
        renamed={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        only={
            "activation_function": _TANH_GELU,
            "add_cross_attention": _OFF,
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": _OFF,
        },
        ropes=(),
        transposed=True,
    ),
    "llama": Family(
        "llama",
        biased=_OPTIONAL_BIASES,
        defaults=_UNTIED,
        only=_SILU,
        ropes=("linear", "yarn", "llama3"),
        adjacent=True,
    ),
    "mistral": Family("llama", defaults=_UNTIED, only=_SILU | {"sliding_window": (None,)}, adjacent=True),
    "qwen2": Family(
        "qwen2", biased=dict.fromkeys(("attn_q", "attn_k", "attn_v")), defaults=_UNTIED, only=_SILU | _PLAIN
    ),
    "qwen3": Family("qwen3", layers=LLAMA | HEAD_NORMS, defaults=_UNTIED, only=_SILU | _PLAIN),
    "smollm3": Family(
        "smollm3",
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6},
        only=_SILU | _PLAIN | {"no_rope_layer_interval": (4,)},
        adjacent=True,
    ),
    "granite": Family(
        "granite",
        biased=_OPTIONAL_BIASES,
        defaults=_UNTIED | dict.fromkeys(_GRANITE_SCALES.values(), 1.0),
        only=_SILU,
        reals=_GRANITE_SCALES,
        ropes=("linear", "yarn", "llama3"),
        adjacent=True,
    ),
    "gemma3_text": GEMMA3,
    "phi3": Family(
        "phi3",
        layers={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        defaults=_UNTIED | {"original_max_position_embeddings": 4096, "sliding_window": None},
        only=_SILU | _PLAIN,
        ropes=("longrope",),
        fused=True,
    ),
}
MODEL_TYPES = (*FAMILIES, "gemma3")  # gemma3 also sees images; only its language model is converted
# Architectures that the engine loads from GGUF files; few can be converted. It also loads dense models of
# qwen3next, but all published ones are mixtures of experts.
_LOADED = (
    "gpt2 llama mistral3 granite granitemoe smollm3 qwen2 qwen2moe qwen3 qwen3moe glm4moe ernie4_5-moe bailingmoe2 "
    "deepseek2 olmoe gpt-oss phi3 starcoder2 stablelm olmo2 gemma2 gemma3 gemma4 lfm2 lfm2moe qwen35 qwen35moe "
    "granitehybrid nemotron_h nemotron_h_moe falcon-h1 qwen3next"
)
ARCHITECTURES = tuple(_LOADED.split())
# Of drafts that read their target's hidden states: of all tokens, or of the last one and the keys and values of all.
FEATURES = EAGLE3, DFLASH = "eagle3", "dflash"  # DSpark is DFlash with more tensors
DRAFT_ARCHITECTURES = (*FEATURES, "gemma4-assistant")
SPECULATORS = "speculator_model"  # model_type of Speculators' checkpoints of drafts


def not_converted(kind: object) -> str:
    """Why checkpoints of an architecture are refused, in words."""
    return (
        f"checkpoints of the architecture {kind!r} cannot be converted, only those of {', '.join(MODEL_TYPES)}; "
        "take a GGUF file of the model instead (pystaged pull owner/name-GGUF)"
    )
