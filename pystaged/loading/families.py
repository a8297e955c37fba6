"""Config keys and tensor names of each family of Hugging Face checkpoints, with GGUF's names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_OFF = (False, None)
FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LLAMA = _NORMS | _ATTENTION | FEED_FORWARD
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_QWEN35 = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", **FEED_FORWARD}
_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_GRANITE_HYBRID = _NORMS | {
    "ffn_gate": "shared_mlp.input_linear",
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
}
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SHORT_CONVOLUTION = {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
_STATE_SPACE = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True)
class Experts:
    """Config keys of a mixture: the number of experts, how many each token uses, and the width of one."""

    count: str
    used: str
    width: str


@dataclass(frozen=True)
class Family:
    """How checkpoints of one `model_type` differ from the others.

    Args:
        architecture: GGUF's name of the family.
        layers: tensors of a layer: GGUF's names, and the checkpoint's below `blocks`; "*" stands for each expert.
        others: the same for tensors outside layers.
        recurrent: tensors of a layer that does not attend.
        ahead: tensors of a block for multi-token prediction besides those of a layer, below `mtp`.
        biased: tensors that have a bias; with a key of config.json, only if that is true.
        defaults: values that config.json may omit.
        renamed: config keys that this family names differently.
        older: other names of config keys, by version; values under these win.
        only: values that config keys may have, the default first; others do not fit GGUF or are not implemented.
        reals: GGUF's keys of further numbers, and config.json's.
        ropes: kinds of rotary scaling that llama.cpp supports for it; none for learnt positions.
        partial: rotary positions may turn only a part of each head.
        adjacent: GGUF stores the rows of Q and K that rotate together side by side.
        norm_offset: added to the weights of norms.
        fused_gate: gate and up projection are one tensor, in GGUF files, too.
        split_gate: they are one tensor in checkpoints only.
        gated: each head of attn_q has, after its query, a gate by which its output is multiplied.
        transposed: matrices of layers are stored as inputs x outputs.
        skipped: name prefixes of tensors that belong to other parts of the model.
        mixer: the kind of recurrent layers.
        attending: GGUF's name of the family if all layers attend.
        experts: of a mixture.
        fused_experts: the tensors of all experts are one, inputs before outputs, gate and up projection in turns; or
            the same in MXFP4, outputs before inputs.
    """

    architecture: str
    layers: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    recurrent: Mapping[str, str] = field(default_factory=dict)
    ahead: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(
        default_factory=lambda: {"token_embd": "embed_tokens", "output_norm": "norm"},
    )
    blocks: str = "layers"
    biased: Mapping[str, str | None] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    reals: Mapping[str, str] = field(default_factory=dict)
    ropes: tuple[str, ...] = ("linear", "yarn")
    partial: bool = False
    adjacent: bool = False
    norm_offset: int = 0
    fused_gate: bool = False
    split_gate: bool = False
    gated: bool = False
    transposed: bool = False
    skipped: tuple[str, ...] = ()
    mixer: Literal["", "delta net", "short convolution", "state space"] = ""
    attending: str = ""
    experts: Experts | None = None
    fused_experts: bool = False


_UNTIED = {"tie_word_embeddings": False}
_SILU = {"hidden_act": ("silu", "swish")}
_PLAIN = {"use_sliding_window": _OFF, "attention_bias": _OFF, "mlp_bias": _OFF}
_OPTIONAL_BIASES = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias") | dict.fromkeys(
    FEED_FORWARD, "mlp_bias"
)
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
        only={"activation_function": _TANH_GELU, "add_cross_attention": _OFF},
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
        "qwen2",
        biased=dict.fromkeys(("attn_q", "attn_k", "attn_v")),
        defaults=_UNTIED,
        only=_SILU | _PLAIN,
    ),
    "qwen3": Family("qwen3", layers=LLAMA | HEAD_NORMS, defaults=_UNTIED, only=_SILU | _PLAIN),
    "qwen3_moe": Family(
        "qwen3moe",
        layers=_NORMS
        | _ATTENTION
        | HEAD_NORMS
        | {
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.*.gate_proj",
            "ffn_up_exps": "mlp.experts.*.up_proj",
            "ffn_down_exps": "mlp.experts.*.down_proj",
        },
        defaults=_UNTIED | {"norm_topk_prob": False},
        older={"num_experts": "num_local_experts"},
        only=_SILU | _PLAIN | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        experts=Experts("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    ),
    "gpt_oss": Family(
        "gpt-oss",
        layers={
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            **_ATTENTION,
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.gate_up_proj",
            "ffn_up_exps": "mlp.experts.gate_up_proj",
            "ffn_down_exps": "mlp.experts.down_proj",
        },
        biased=dict.fromkeys((*_ATTENTION, "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")),
        defaults=_UNTIED | {"head_dim": 64, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "sliding_window": 128},
        only=_SILU | {"attention_bias": (True,), "swiglu_limit": (7.0,)},
        experts=Experts("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        fused_experts=True,
    ),
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
    "granitemoehybrid": Family(
        "granitehybrid",
        layers=_GRANITE_HYBRID | _ATTENTION,
        recurrent=_GRANITE_HYBRID | _STATE_SPACE,
        biased={"ssm_conv1d": None},
        defaults=_UNTIED
        | dict.fromkeys(_GRANITE_SCALES.values(), 1.0)
        | {
            "num_local_experts": 8,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
        },
        renamed={"intermediate_size": "shared_intermediate_size"},
        only=_SILU
        | {
            "attention_bias": _OFF,
            "mamba_conv_bias": (True, None),
            "mamba_expand": (2,),
            "mamba_proj_bias": _OFF,
            "normalization_function": ("rmsnorm", None),
            "position_embedding_type": (None, "nope", "rope"),
            "time_step_limit": (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
        },
        reals=_GRANITE_SCALES,
        ropes=("linear", "yarn"),
        adjacent=True,
        split_gate=True,
        mixer="state space",
        attending="granite",
    ),
    "lfm2": Family(
        "lfm2",
        layers=_LFM2
        | _ATTENTION
        | {
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
        },
        others={"token_embd": "embed_tokens", "token_embd_norm": "embedding_norm"},
        recurrent=_LFM2 | _SHORT_CONVOLUTION,
        defaults={
            "rope_theta": 1e6,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        renamed={"rms_norm_eps": "norm_eps"},
        older={"intermediate_size": "block_ff_dim", "rope_theta": "theta", "tie_word_embeddings": "tie_embedding"},
        only={"conv_bias": _OFF, "sliding_window": (None,)},
        mixer="short convolution",
    ),
    "qwen3_5_text": Family(
        "qwen35",
        layers=_QWEN35 | _ATTENTION | HEAD_NORMS,
        recurrent=_QWEN35 | _DELTA_NET,
        ahead={
            "nextn.eh_proj": "fc",
            "nextn.enorm": "pre_fc_norm_embedding",
            "nextn.hnorm": "pre_fc_norm_hidden",
            "nextn.shared_head_norm": "norm",
        },
        defaults=_UNTIED
        | {
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        only=_SILU
        | {
            "attention_bias": _OFF,
            "attn_output_gate": (True, None),
            "mtp_num_hidden_layers": (0, 1, None),
            "mtp_use_dedicated_embeddings": _OFF,
        },
        partial=True,
        norm_offset=1,
        gated=True,
        skipped=("model.visual.", "visual."),
        mixer="delta net",
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
        partial=True,
        fused_gate=True,
    ),
}
# Checkpoints of text and images, of which only the language model is converted.
WITH_PICTURES = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
MODEL_TYPES = (*FAMILIES, *WITH_PICTURES)
GGUF_INSTEAD = "a GGUF file of the model may be supported"
# Architectures that the engine loads from GGUF files; not all can be converted. It also loads dense models of
# qwen3next, but all published ones are mixtures of experts.
ARCHITECTURES = (
    "gpt2",
    "llama",
    "mistral3",
    "granite",
    "granitemoe",
    "smollm3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "glm4moe",
    "ernie4_5-moe",
    "bailingmoe2",
    "deepseek2",
    "olmoe",
    "gpt-oss",
    "phi3",
    "starcoder2",
    "stablelm",
    "olmo2",
    "gemma2",
    "gemma3",
    "gemma4",
    "lfm2",
    "lfm2moe",
    "qwen35",
    "qwen35moe",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "falcon-h1",
    "qwen3next",
)
# Of drafts that read their target's hidden states: of all tokens, or of the last one and the keys and values of all.
FEATURES = EAGLE3, DFLASH = "eagle3", "dflash"  # DSpark is DFlash with more tensors
ASSISTANT = "gemma4-assistant"
DRAFT_ARCHITECTURES = (*FEATURES, ASSISTANT)
ASSISTANT_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
DRAFT_MODEL_TYPES = ("speculator_model", *ASSISTANT_MODEL_TYPES)  # the first is of Speculators' checkpoints


def not_converted(kind: object, known: Iterable[str]) -> str:
    """Why checkpoints of an unknown type are refused, in words."""
    return f"checkpoints of {kind!r} cannot be converted, only those of {', '.join(known)}; {GGUF_INSTEAD}"
