"""Popular models of late 2026 as skeletons: tiny layers, with the true flags, ratios and special tokens.

True are: the architecture, the period of layers, heads and their width, RoPE, windows, scales, how many experts there
are and how they are chosen, the tied head, the pre-tokenizer, and how texts begin and end. Made up are: the width of
layers, of feed-forward networks and of experts, how often layers repeat, the words, and all weights. Of heads whose
number the width of layers gives, and of Mamba-2's, the ratios to their groups are true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

from support.random_models import RandomModel, add_sentencepiece, add_vocabulary

SIZE = 320  # of a vocabulary
# What llama.cpp prints of a file; what the authors' configuration is known to be, which no such print confirmed here.
LOG, CARD, BOTH = "load log", "configuration", "load log, configuration"


@dataclass(frozen=True)
class Known:
    """A model.

    Attributes:
        pre: tokenizer.ggml.pre; "gemma4" for that vocabulary, "" for SentencePiece.
        begins, ends: the special tokens of a text.
        source: where its numbers are published.
        assumed: what no source told, and is as in other models of the architecture.
        others: further special tokens.
        adds: whether the first is put before every text.
    """

    model: RandomModel
    pre: str
    begins: str
    ends: str
    source: str
    assumed: str = ""
    others: tuple[str, ...] = ()
    adds: bool = False

    @property
    def written(self) -> RandomModel:
        """What to write."""
        return replace(self.model, vocab_size=SIZE, vocabulary=self._add_vocabulary)

    def _add_vocabulary(self, writer: GGUFWriter, size: int) -> None:
        special = list(dict.fromkeys([self.begins, self.ends, *self.others]))
        writer.add_add_bos_token(self.adds)
        if self.pre in ("", "gemma4"):
            _add_pieces(writer, size, special, self)
            return
        ids = {name: size - 1 - len(special) + i for i, name in enumerate(special)} | {"<|endoftext|>": size - 1}
        marks = {token: name for name, token in ids.items()}
        for token in {*range(size - 1 - len(special), size)} - marks.keys():
            marks[token] = f"<|reserved_{token}|>"
        add_vocabulary(writer, size, marks, pre=self.pre, begins=ids[self.begins], ends=ids[self.ends])


def _add_pieces(writer: GGUFWriter, size: int, special: list[str], known: Known) -> None:
    if not known.pre:
        add_sentencepiece(writer, size, marks=special)
        first = writer.kv_data[0]["tokenizer.ggml.tokens"].value.index(special[0])
        writer.add_bos_token_id(first)
        writer.add_eos_token_id(first + 1)
        return
    letters = ["\u2581", *"ethoainsrl"]
    merges = ["h e", "t h", "t he", "\u2581 t", "i n"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(m.replace(" ", "") for m in merges)]
    names += [f"<unused{i}>" for i in range(size - len(names))]
    kinds = (
        [TokenType.CONTROL] * len(special) + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * (size - len(special) - 256)
    )
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(names)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(names.index(known.begins))
    writer.add_eos_token_id(names.index(known.ends))


IM = ("<|im_start|>",)


def _qwen35(heads: int, kv_heads: int, value_heads: int, tie: bool, **more: Any) -> RandomModel:
    model = RandomModel("qwen35moe" if "experts" in more else "qwen35", 64, 4, heads, kv_heads, 256, context=262144)
    metadata = {"rope.freq_base": 1e7, "full_attention_interval": 4}
    return replace(
        model, rotary=64, recurrent=(0, 1, 2), delta_heads=(16, value_heads, 128), tie=tie, metadata=metadata, **more
    )


def _gemma4(heads: int, kv: int | list[int], layers: int, window: int, more: Mapping[str, Any], **own: Any) -> Known:
    metadata = {
        "attention.head_count_kv": kv,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": [i % 6 != 5 for i in range(layers)],
        "attention.shared_kv_layers": 0,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "rope.dimension_count_swa": 256,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }
    factors = np.array([1] * 64 + [1e30] * 192, dtype=np.float32)
    vectors = {"rope_freqs.weight": factors}
    model = RandomModel(
        "gemma4", 64, layers, heads, head_dim=512, context=131072, metadata=metadata | more, vectors=vectors, **own
    )
    return Known(model, "gemma4", "<bos>", "<turn|>", LOG, others=(*TURN, "<pad>", "<unk>"), adds=True)


def _granite(heads: int, kv_heads: int, attention: float, logits: float, **more: Any) -> RandomModel:
    scales = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": attention, "logit_scale": logits}
    family = "granitehybrid" if "recurrent" in more else "granite"
    metadata = scales | more.pop("metadata")
    return RandomModel(family, 64, more.pop("layers", 2), heads, kv_heads, context=131072, metadata=metadata, **more)


QWEN3 = {"rope.freq_base": 1e6}
YARN3 = {
    "rope.freq_base": 1e6,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 16384,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 1.0,
    "attention.temperature_scale": 0.1,
}
LLAMA3 = {"rope.freq_base": 5e5}
LFM2 = {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-5}
GEMMA3 = {"rope.freq_base": 1e6}
GPT_OSS = {
    "attention.sliding_window": 128,
    "rope.freq_base": 150000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
PHI = {
    "rope.scaling.attn_factor": 1.190238,
    "rope.scaling.original_context_length": 4096,
    "attention.sliding_window": 262144,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
LING = {"expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_gating_func": 2}
LING |= {"expert_group_count": 8, "expert_group_used_count": 4, "rope.freq_base": 6e5}
FLASH = {"expert_weights_norm": True, "expert_weights_scale": 1.8, "expert_gating_func": 2, "rope.freq_base": 1e6}
NEMOTRON = {"expert_weights_norm": True, "expert_weights_scale": 2.5, "rope.scaling.finetuned": False}
NEMOTRON |= {"expert_group_count": 1, "expert_group_used_count": 1, "rope.dimension_count": 84}
E4B = {"embedding_length_per_layer_input": 256, "attention.shared_kv_layers": 6}  # of 12; the model's are 18 of 42
TURN = ("<|turn>",)
LLAMA_FACTORS = {"rope_freqs.weight": np.geomspace(1, 32, 32, dtype=np.float32)}
LONG = {
    f"rope_factors_{kind}.weight": np.linspace(1, most, 48, dtype=np.float32)
    for kind, most in (("long", 60), ("short", 1))
}

MODELS: dict[str, Known] = {
    "Qwen3.5-0.8B": Known(_qwen35(8, 2, 16, True), "qwen35", "<|endoftext|>", "<|im_end|>", BOTH, others=IM),
    "Qwen3.5-4B": Known(_qwen35(16, 4, 32, True), "qwen35", "<|endoftext|>", "<|im_end|>", BOTH, others=IM),
    "Qwen3.5-9B": Known(_qwen35(16, 4, 32, False), "qwen35", "<|endoftext|>", "<|im_end|>", BOTH, others=IM),
    "Qwen3.6-27B": Known(_qwen35(24, 4, 48, False, ahead=1), "qwen35", "<|endoftext|>", "<|im_end|>", BOTH, others=IM),
    "Qwen3.8-27B": Known(
        _qwen35(24, 4, 48, False, ahead=1), "qwen35", "<|endoftext|>", "<|im_end|>", "", "all, as Qwen3.6-27B", IM
    ),
    "Qwen3.6-35B-A3B": Known(
        _qwen35(16, 2, 32, False, experts=(256, 8, 32, 32)), "qwen35", "<|endoftext|>", "<|im_end|>", CARD, others=IM
    ),
    "Qwen3-4B": Known(
        RandomModel("qwen3", 64, 2, 32, 8, 128, context=40960, metadata=QWEN3),
        "qwen2",
        "<|endoftext|>",
        "<|im_end|>",
        CARD,
        others=IM,
    ),
    "Qwen3-30B-A3B": Known(
        RandomModel("qwen3moe", 64, 2, 32, 4, 128, context=40960, tie=False, experts=(128, 8, 32, 0), metadata=QWEN3),
        "qwen2",
        "<|endoftext|>",
        "<|im_end|>",
        CARD,
        others=IM,
    ),
    "Qwen2.5-Coder-1.5B": Known(
        RandomModel("qwen2", 768, 2, 6, 1, context=32768, biases=True, metadata=QWEN3),
        "qwen2",
        "<|endoftext|>",
        "<|im_end|>",
        CARD,
        others=(*IM, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ),
    "Gemma 4 E4B": _gemma4(8, 2, 12, 512, E4B),
    "Gemma 4 12B": _gemma4(16, [8, 8, 8, 8, 8, 1], 6, 1024, {}, keys_are_values=True),
    "Gemma 4 26B-A4B": _gemma4(
        16, [8, 8, 8, 8, 8, 2], 6, 1024, {}, keys_are_values=True, experts=(128, 8, 32, 0), fused_experts=True
    ),
    "Gemma 3 1B": Known(
        RandomModel("gemma3", 64, 7, 4, 1, 256, context=32768, metadata=GEMMA3 | {"attention.sliding_window": 512}),
        "",
        "<bos>",
        "<end_of_turn>",
        CARD,
        others=("<start_of_turn>",),
        adds=True,
    ),
    "LFM2.5-1.2B": Known(
        RandomModel("lfm2", 256, 6, 4, 1, context=128000, recurrent=(0, 1, 3, 4), metadata=LFM2),
        "lfm2",
        "<|startoftext|>",
        "<|im_end|>",
        LOG,
        others=("<|pad|>", *IM),
        adds=True,
    ),
    "LFM2.5-8B-A1B": Known(
        RandomModel(
            "lfm2moe",
            256,
            6,
            4,
            1,
            context=128000,
            recurrent=(0, 1, 3, 4),
            experts=(32, 4, 32, 0),
            dense=2,
            selection_bias=True,
            metadata=LFM2 | {"expert_gating_func": 2},
        ),
        "lfm2",
        "<|startoftext|>",
        "<|im_end|>",
        CARD,
        others=("<|pad|>", *IM),
        adds=True,
    ),
    "MiniCPM5-2B": Known(
        RandomModel("llama", 64, 2, 16, 2, 128, context=131072, tie=False),
        "minicpm5",
        "<s>",
        "<|im_end|>",
        CARD,
        "pre-tokenizer, width of heads, RoPE's base, head, adds <s>",
        ("</s>", *IM),
    ),
    "Phi-4-mini": Known(
        RandomModel("phi3", 384, 2, 3, 1, context=131072, rotary=96, fused=True, vectors=LONG, metadata=PHI),
        "gpt-4o",
        "<|endoftext|>",
        "<|endoftext|>",
        LOG,
        "the values of factors",
        ("<|end|>", "<|user|>"),
    ),
    "Granite 4.0-micro": Known(
        _granite(40, 8, 0.015625, 10.0, head_dim=64, metadata={"rope.freq_base": 1e7}),
        "dbrx",
        "<|end_of_text|>",
        "<|end_of_text|>",
        BOTH,
        "pre-tokenizer",
        ("<|start_of_role|>", "<|end_of_role|>"),
    ),
    "Granite 4.0-h-small": Known(
        _granite(
            32,
            8,
            0.0078125,
            16.0,
            head_dim=128,
            layers=6,
            recurrent=(0, 1, 2, 3, 4),
            spaces=(8, 1, 128),
            ffn_width=32,
            experts=(72, 10, 32, 64),
            metadata={"rope.scaling.finetuned": False},
        ),
        "dbrx",
        "<|end_of_text|>",
        "<|end_of_text|>",
        BOTH,
        "pre-tokenizer",
        ("<|start_of_role|>", "<|end_of_role|>"),
    ),
    "SmolLM3-3B": Known(
        RandomModel("smollm3", 64, 4, 16, 4, 128, context=65536, metadata={"rope.freq_base": 5e6}),
        "smaug-bpe",
        "<|begin_of_text|>",
        "<|im_end|>",
        LOG,
        others=IM,
    ),
    "SmolLM2-1.7B": Known(
        RandomModel("llama", 64, 2, 32, 32, 64, context=8192, metadata={"rope.freq_base": 130000.0}),
        "smollm",
        "<|im_start|>",
        "<|im_end|>",
        CARD,
    ),
    "Llama 3.2 1B": Known(
        RandomModel("llama", 64, 2, 32, 8, 64, context=131072, metadata=LLAMA3, vectors=LLAMA_FACTORS),
        "llama-bpe",
        "<|begin_of_text|>",
        "<|eot_id|>",
        CARD,
        "the values of factors",
        ("<|start_header_id|>",),
        True,
    ),
    "gpt-oss-20b": Known(
        RandomModel(
            "gpt-oss",
            64,
            2,
            64,
            8,
            64,
            context=131072,
            tie=False,
            biases=True,
            experts=(32, 4, 32, 0),
            metadata=GPT_OSS,
        ),
        "gpt-4o",
        "<|startoftext|>",
        "<|return|>",
        CARD,
        others=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
    ),
    "Ministral 3 3B": Known(
        RandomModel("mistral3", 64, 2, 32, 8, 128, context=262144, metadata=YARN3),
        "tekken",
        "<s>",
        "</s>",
        CARD,
        others=("[INST]", "[/INST]"),
        adds=True,
    ),
    "Ministral 3 8B": Known(
        RandomModel("mistral3", 64, 2, 32, 8, 128, context=262144, tie=False, metadata=YARN3),
        "tekken",
        "<s>",
        "</s>",
        CARD,
        others=("[INST]", "[/INST]"),
        adds=True,
    ),
    "GLM-4.7-Flash": Known(
        RandomModel(
            "deepseek2",
            64,
            2,
            20,
            1,
            context=202752,
            tie=False,
            latent=(512, 768, 192, 64, 256),
            experts=(64, 4, 32, 32),
            dense=1,
            selection_bias=True,
            metadata=FLASH,
        ),
        "glm4",
        "<|endoftext|>",
        "<|user|>",
        LOG,
        "the first end of several",
        ("<|assistant|>", "[gMASK]", "<sop>"),
    ),
    "Nemotron 3 Nano 30B-A3B": Known(
        RandomModel(
            "nemotron_h_moe",
            64,
            7,
            32,
            2,
            128,
            context=1048576,
            tie=False,
            ffn_width=32,
            recurrent=(0, 2, 4),
            feeding=(1, 3, 6),
            spaces=(8, 1, 128),
            experts=(128, 6, 32, 64),
            selection_bias=True,
            metadata=NEMOTRON,
        ),
        "pixtral",
        "<s>",
        "<|im_end|>",
        LOG,
        "adds <s>",
        ("</s>", "<|im_start|>"),
    ),
    "Ling-mini-2.0": Known(
        RandomModel(
            "bailingmoe2",
            512,
            2,
            4,
            1,
            context=32768,
            rotary=64,
            fused=True,
            tie=False,
            experts=(256, 8, 32, 32),
            dense=1,
            selection_bias=True,
            metadata=LING,
        ),
        "bailingmoe2",
        "<|startoftext|>",
        "<|endoftext|>",
        CARD,
    ),
    "Falcon-H1-1.5B": Known(
        RandomModel(
            "falcon-h1",
            64,
            2,
            8,
            2,
            128,
            context=131072,
            tie=False,
            spaces=(8, 1, 256),
            space_norm=False,
            metadata={"rope.freq_base": 1e11},
        ),
        "falcon-h1",
        "<|begin_of_text|>",
        "<|im_end|>",
        CARD,
        "norm, head, adds a beginning",
        IM,
    ),
}
