"""Random models of every family, with each of its options."""

from __future__ import annotations

import numpy as np

from support.random_models import RandomModel

ROPE_FACTORS = np.linspace(1, 8, 16, dtype=np.float32)
LONG_ROPE = {
    "rope_factors_long.weight": np.linspace(1, 30, 8, dtype=np.float32),
    "rope_factors_short.weight": np.linspace(1, 2, 8, dtype=np.float32),
}
PROPORTIONAL = np.array([1, 1, 1, 1, *[1e30] * 12], dtype=np.float32)  # turns a quarter
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
GRANITE = {"logit_scale": 2.0, "residual_scale": 0.8, "embedding_scale": 3.0, "attention.scale": 0.1}

CASES: dict[str, RandomModel] = {
    "gpt2": RandomModel("gpt2", kv_heads=4),
    "llama": RandomModel("llama", head_dim=32),
    "llama-untied": RandomModel("llama", tie=False, width=96, heads=6, kv_heads=3),
    "llama-biases": RandomModel("llama", biases=True),
    "llama-fused": RandomModel("llama", fused=True, biases=True, kv_heads=1),
    "llama-factors": RandomModel("llama", head_dim=32, vectors={"rope_freqs.weight": ROPE_FACTORS}),
    "llama-linear": RandomModel("llama", metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama-yarn": RandomModel("llama", head_dim=32, metadata=YARN | {"rope.freq_base": 5e4}),
    "llama-odd": RandomModel("llama", width=50, heads=5, kv_heads=1, ffn_width=70, vocab_size=301),
    "llama-no-groups": RandomModel("llama", kv_heads=4),
    "qwen2": RandomModel("qwen2", biases=True, metadata={"rope.freq_base": 1e6}),
    "qwen2-yarn": RandomModel("qwen2", biases=True, head_bias=True, tie=False, metadata=YARN),
    "qwen3": RandomModel("qwen3", head_dim=32),
    "qwen3-untied": RandomModel("qwen3", head_dim=16, tie=False, fused=True),
    "smollm3": RandomModel("smollm3", layers=5),
    "granite": RandomModel("granite", metadata=GRANITE),
    "granite-no-rope": RandomModel(
        "granite", metadata={"rope.scaling.finetuned": False, "logit_scale": 0.5}, biases=True
    ),
    "mistral3": RandomModel("mistral3", head_dim=32),
    "mistral3-yarn": RandomModel(
        "mistral3",
        metadata=YARN
        | {
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_log_multiplier": 0.5,
            "attention.temperature_scale": 0.1,
        },
    ),
    "phi3": RandomModel("phi3", fused=True),
    "phi3-long": RandomModel(
        "phi3",
        fused=True,
        tie=False,
        kv_heads=4,
        vectors=LONG_ROPE,
        metadata={
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.2,
            "attention.sliding_window": 40,
        },
    ),
    "phi3-partial": RandomModel("phi3", fused=True, rotary=8, ffn_width=70),
    "starcoder2": RandomModel("starcoder2"),
    "starcoder2-biases": RandomModel("starcoder2", biases=True, tie=False),
    "stablelm": RandomModel("stablelm", rotary=4, tie=False),
    "stablelm-parallel": RandomModel("stablelm", rotary=4, tie=False, parallel=True, own_head_norms=True, biases=True),
    "olmo2": RandomModel("olmo2", tie=False),
    "olmo2-windows": RandomModel(
        "olmo2", tie=False, layers=4, seed=1, metadata=YARN | {"attention.sliding_window": 50}
    ),
    "gemma2": RandomModel("gemma2", head_dim=32, layers=4, metadata={"attention.sliding_window": 50}),
    "gemma2-no-window": RandomModel("gemma2", metadata={"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": RandomModel("gemma3", head_dim=32, kv_heads=1, layers=7, metadata={"attention.sliding_window": 50}),
    "gemma3-linear": RandomModel(
        "gemma3",
        layers=4,
        tie=False,
        metadata={
            "attention.sliding_window": 33,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "final_logit_softcapping": -3.0,
        },
    ),
    "gemma3-no-window": RandomModel("gemma3"),
    "gemma4": RandomModel(
        "gemma4",
        head_dim=32,
        kv_heads=1,
        layers=7,
        metadata={
            "attention.sliding_window": 50,
            "attention.sliding_window_pattern": [True, True, True, False, True, True, False],
            "attention.shared_kv_layers": 3,
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 16,
            "rope.dimension_count_swa": 16,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "feed_forward_length": [96, 96, 96, 96, 160, 160, 160],
            "embedding_length_per_layer_input": 24,
            "final_logit_softcapping": 30.0,
        },
        vectors={"rope_freqs.weight": PROPORTIONAL},
    ),
    "gemma4-experts": RandomModel(
        "gemma4",
        head_dim=32,
        layers=2,
        experts=(8, 2, 32, 0),
        fused_experts=True,
        metadata={
            "attention.sliding_window": 40,
            "attention.sliding_window_pattern": [True, False],
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 16,
            "rope.dimension_count_swa": 16,
            "embedding_length_per_layer_input": 0,
        },
        vectors={"rope_freqs.weight": PROPORTIONAL},
    ),
    "gemma4-keys-are-values": RandomModel(
        "gemma4",
        head_dim=64,
        layers=4,
        keys_are_values=True,
        metadata={
            "attention.sliding_window": 40,
            "attention.sliding_window_pattern": [True, True, True, False],
            "attention.head_count_kv": [4, 4, 4, 2],
            "attention.key_length_swa": 32,
            "attention.value_length_swa": 32,
            "rope.dimension_count_swa": 32,
            "embedding_length_per_layer_input": 0,
        },
        vectors={"rope_freqs.weight": np.ones(32, dtype=np.float32)},
    ),
    "lfm2": RandomModel("lfm2", layers=4, recurrent=(0, 2)),
    "lfm2-window": RandomModel("lfm2", layers=5, recurrent=(1, 4), metadata={"attention.sliding_window": 50}),
    "qwen35": RandomModel("qwen35", layers=4, recurrent=(0, 1, 2), rotary=8),
    "qwen35-ahead": RandomModel("qwen35", layers=3, recurrent=(0, 2), ahead=1, delta_heads=(3, 3, 32), kv_heads=1),
    "qwen35-many": RandomModel("qwen35", layers=4, recurrent=(0, 1, 2), tie=False, delta_heads=(1, 3, 48), head_dim=32),
    "granitehybrid": RandomModel(
        "granitehybrid", layers=3, recurrent=(0, 2), metadata=GRANITE | {"rope.scaling.finetuned": False}
    ),
    "granitehybrid-turned": RandomModel("granitehybrid", layers=3, recurrent=(1,), spaces=(4, 1, 16)),
    "nemotron_h": RandomModel("nemotron_h", layers=6, recurrent=(0, 3), feeding=(1, 4, 5)),
    "nemotron_h-biases": RandomModel(
        "nemotron_h", layers=4, recurrent=(1,), feeding=(0, 2), tie=False, biases=True, spaces=(4, 1, 16), head_dim=32
    ),
    "falcon-h1": RandomModel("falcon-h1", metadata={"rope.freq_base": 1e11}),
    "falcon-h1-no-norm": RandomModel(
        "falcon-h1", tie=False, space_norm=False, width=120, spaces=(5, 1, 32), kv_heads=1
    ),
    "lfm2-odd": RandomModel("lfm2", layers=3, recurrent=(0, 2), width=290, heads=5, kv_heads=1, ffn_width=70),
    "gpt-oss": RandomModel(
        "gpt-oss",
        layers=3,
        head_dim=32,
        tie=False,
        biases=True,
        experts=(8, 3, 32, 0),
        seed=4,
        metadata=YARN | {"attention.sliding_window": 50, "rope.freq_base": 150000.0},
    ),
    "qwen3moe": RandomModel("qwen3moe", head_dim=32, experts=(8, 2, 32, 0)),
    "qwen3moe-many": RandomModel("qwen3moe", tie=False, experts=(64, 8, 40, 0)),
    "olmoe": RandomModel("olmoe", tie=False, kv_heads=4, ffn_width=32, experts=(8, 3, 32, 0)),
    "llama-experts": RandomModel("llama", experts=(4, 2, 96, 0)),
    "qwen2moe": RandomModel("qwen2moe", biases=True, tie=False, experts=(8, 2, 32, 64)),
    "granitemoe": RandomModel("granitemoe", metadata=GRANITE, ffn_width=32, experts=(8, 2, 32, 0)),
    "granitemoe-shared": RandomModel("granitemoe", metadata=GRANITE, ffn_width=32, experts=(8, 2, 32, 64)),
    "granitehybrid-experts": RandomModel(
        "granitehybrid", layers=3, recurrent=(0, 2), metadata=GRANITE, ffn_width=32, experts=(8, 2, 32, 64)
    ),
    "glm4moe": RandomModel(
        "glm4moe",
        layers=3,
        biases=True,
        rotary=8,
        experts=(8, 2, 32, 32),
        dense=1,
        selection_bias=True,
        metadata={"expert_weights_norm": True, "expert_weights_scale": 1.5},
    ),
    "ernie4_5-moe": RandomModel(
        "ernie4_5-moe",
        layers=3,
        experts=(8, 3, 32, 64),
        dense=1,
        selection_bias=True,
        metadata={"interleave_moe_layer_step": 1},
    ),
    "bailingmoe2": RandomModel(
        "bailingmoe2",
        layers=3,
        fused=True,
        tie=False,
        rotary=8,
        experts=(16, 4, 32, 32),
        dense=1,
        selection_bias=True,
        metadata={
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "deepseek2": RandomModel(
        "deepseek2",
        layers=3,
        latent=(64, 32, 32, 16, 32),
        experts=(8, 2, 32, 32),
        dense=1,
        selection_bias=True,
        metadata={"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.8},
    ),
    "deepseek2-yarn": RandomModel(
        "deepseek2",
        layers=2,
        latent=(32, 40, 24, 8, 64),
        tie=False,
        experts=(16, 4, 32, 64),
        metadata=YARN
        | {
            "rope.scaling.yarn_log_multiplier": 0.0707,
            "rope.scaling.attn_factor": 0.9,
            "attention.temperature_scale": 0.1,
            "attention.temperature_length": 64,
            "expert_weights_norm": True,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "deepseek2-expanded": RandomModel(
        "deepseek2",
        layers=3,
        latent=(40, 24, 20, 12, 28),
        absorbed=False,
        experts=(8, 3, 32, 64),
        dense=1,
        seed=3,
        metadata=YARN,
    ),
    # llama.cpp takes queries that are made of the input from models of so many layers alone.
    "deepseek2-lite": RandomModel(
        "deepseek2",
        width=32,
        layers=27,
        heads=2,
        latent=(32, 0, 16, 8, 32),
        ffn_width=32,
        experts=(6, 2, 16, 32),
        dense=1,
        metadata={"expert_gating_func": 1},
        seed=3,
    ),
    "lfm2moe": RandomModel(
        "lfm2moe",
        layers=4,
        recurrent=(0, 2),
        experts=(8, 2, 32, 0),
        dense=1,
        selection_bias=True,
        metadata={"expert_gating_func": 2},
    ),
    "qwen35moe": RandomModel("qwen35moe", layers=4, recurrent=(0, 1, 2), rotary=8, experts=(8, 2, 32, 32)),
    "qwen35moe-fused": RandomModel(
        "qwen35moe", layers=4, recurrent=(0, 1, 2), rotary=8, experts=(8, 3, 32, 64), fused_experts=True
    ),
    "nemotron_h_moe": RandomModel(
        "nemotron_h_moe",
        layers=6,
        recurrent=(0, 3),
        feeding=(1, 4, 5),
        tie=False,
        ffn_width=32,
        experts=(8, 2, 32, 64),
        selection_bias=True,
        metadata={"expert_weights_norm": True, "expert_weights_scale": 2.5},
    ),
}
