"""Every family in plain numpy, in double precision: slow, and the exact oracle of other tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, quants

Doubles = npt.NDArray[np.float64]

LAYER_NORM = ("gpt2", "starcoder2", "stablelm")
ADJACENT = ("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3", "ernie4_5-moe", "deepseek2")
NO_ROTATION = ("gpt2", "nemotron_h", "nemotron_h_moe")
WHOLE_NORMS = ("olmo2", "olmoe")
DELTA_NETS = ("qwen35", "qwen35moe")
NORM_BEHIND = (
    *DELTA_NETS,
    "glm4moe",
    "gpt-oss",
)  # the norm of the feed-forward network is named as if behind attention
SIGMOID = ("lfm2moe", "glm4moe", "bailingmoe2", "nemotron_h_moe")
NORMALIZED = ("llama", "gemma4", "granitemoe", "granitehybrid", "qwen3moe", "ernie4_5-moe", "lfm2moe", "qwen35moe")
WINDOW_PERIODS = {"gpt-oss": 2, "gemma2": 2, "gemma3": 6, "olmo2": 4}


class FamilyReference:
    """A GGUF model with all its weights as float64, whatever their type in the file.

    Args:
        half: whether keys and values are kept as float16, as the engines keep them.
    """

    def __init__(self, path: str | Path, *, half: bool = True) -> None:
        reader, self._half = GGUFReader(path), half
        self._values = {name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
        self.family: str = self._values["general.architecture"]
        self.chosen: list[npt.NDArray[np.int64]] = []  # experts of each row, of each layer that has any
        self.weights: dict[str, Doubles] = {
            # Falcon-H1 has a norm without the ending.
            tensor.name + ".weight" * tensor.name.endswith("ffn_norm"): np.array(
                quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float64
            )
            for tensor in reader.tensors
        }
        self.layers: int = self._key("block_count") - self._key("nextn_predict_layers", 0)
        self.heads: int = self._key("attention.head_count")
        self.kv_heads: int = np.max(self._key("attention.head_count_kv", self.heads)).item()
        self.width: int = self._key("embedding_length")
        self.dim: int = self._key("attention.key_length", self.width // self.heads)
        self.cells: dict[
            bool, tuple[Doubles, Doubles]
        ] = {}  # Gemma 4's last keys and values, with a window and without
        self._window: int = self._key("attention.sliding_window", 4096 if self.family == "gemma2" else 0)
        self._original: int = self._key("rope.scaling.original_context_length", self._key("context_length"))

    def logits(self, tokens: Sequence[int], context: int = 512) -> Doubles:
        """Logits after each token: float64[len(tokens), vocabulary]; `context` chooses among long factors."""
        x = self.weights["token_embd.weight"][list(tokens)] * self._embedding_scale()
        if self.family == "gpt2":
            x = x + self.weights["position_embd.weight"][: len(x)]
        own = self._layer_embeddings(x, tokens) if self._key("embedding_length_per_layer_input", 0) else None
        self.cells.clear()
        for layer in range(self.layers):
            x = self._layer(layer, x, context)
            block = f"blk.{layer}."
            if own is not None:
                branch = gelu(self._linear(block + "inp_gate", x)) * own[:, layer]
                x = x + self._norm(block + "post_norm", self._linear(block + "proj", branch))
            x = x * self.weights.get(f"{block}layer_output_scale.weight", 1.0)
        return self._logits(self.judged(x))

    def _layer_embeddings(self, x: Doubles, tokens: Sequence[int]) -> Doubles:
        shape = (len(x), self.layers, -1)
        projected = (self._linear("per_layer_model_proj", x) / np.sqrt(self.width)).reshape(shape)
        embedded = self.weights["per_layer_token_embd.weight"][list(tokens)].reshape(shape)
        result: Doubles = self._norm("per_layer_proj_norm", projected) + embedded * np.sqrt(embedded.shape[-1])
        return result / np.sqrt(2)

    def judged(self, x: Doubles) -> Doubles:
        """What the head reads of hidden states behind the last layer, [n, width] both."""
        return self._norm("token_embd_norm" if self.family.startswith("lfm2") else "output_norm", x)

    def ahead(self, states: Doubles, tokens: Sequence[int]) -> tuple[Doubles, Doubles]:
        """A chain of rows of the MTP layer: logits after each, [n, vocabulary], and what the head reads of each.

        Args:
            states: what the head reads of the token before each row's, [n, width].
            tokens: of the rows.
        """
        block = f"blk.{self.layers}.nextn."
        embedded = self.weights["token_embd.weight"][list(tokens)]
        joined = np.concatenate([self._norm(block + "enorm", embedded), self._norm(block + "hnorm", states)], axis=1)
        x = self._layer(self.layers, self._linear(block + "eh_proj", joined), 512)
        own = f"{block}shared_head_norm"
        x = self._norm(own, x) if f"{own}.weight" in self.weights else self.judged(x)
        return self._logits(x), x

    def _layer(self, layer: int, x: Doubles, context: int) -> Doubles:
        scale = self._key("residual_scale", 1.0)
        block = f"blk.{layer}."
        read = self._norm(block + "attn_norm", x)
        branch = np.zeros_like(x)
        if f"{block}shortconv.conv.weight" in self.weights:
            branch = self._short_convolution(block, read)
        elif f"{block}ssm_in.weight" in self.weights:
            branch = self._state_space(block, read)
        elif f"{block}ssm_conv1d.weight" in self.weights:
            branch = self._delta_net(block, read)
        if f"{block}attn_output.weight" in self.weights:
            branch = branch + self._attention(layer, read, context)
        if self.family in NORM_BEHIND:
            x = x + branch
            read = self._norm(block + "post_attention_norm", x)
        else:
            x = x + scale * self._norm(block + "post_attention_norm", branch)
        if f"{block}ffn_norm.weight" in self.weights or self.family == "olmo2":
            read = self._norm(block + "ffn_norm", x)
        if f"{block}pre_ffw_norm_2.weight" in self.weights:
            beside = self._norm(block + "post_ffw_norm_1", self._feed_forward(block, read))
            found = self._norm(
                block + "post_ffw_norm_2", self._experts(block, self._norm(block + "pre_ffw_norm_2", x), x)
            )
            return x + self._norm(block + "post_ffw_norm", beside + found)
        if f"{block}ffn_gate_inp.weight" in self.weights:
            return x + scale * self._experts(block, read)
        if f"{block}ffn_down.weight" not in self.weights:
            return x
        return x + scale * self._norm(block + "post_ffw_norm", self._feed_forward(block, read))

    def _logits(self, x: Doubles) -> Doubles:
        head = "output" if "output.weight" in self.weights else "token_embd"
        logits = x @ self.weights[f"{head}.weight"].T + self.weights.get("output.bias", 0)
        logits = logits / self._key("logit_scale", 1.0)
        usual = 30.0 if self.family in ("gemma2", "gemma4") else 0.0
        return capped(logits, self._key("final_logit_softcapping", usual))

    def _attention(self, layer: int, x: Doubles, context: int) -> Doubles:
        block, n, heads, kv_heads, dim = f"blk.{layer}.", len(x), self.heads, self.kv_heads, self.dim
        if self.family == "gemma4":
            return self._attend(layer, *self._differing_heads(layer, x, context))
        if self.family == "deepseek2":
            return self._latent_attention(layer, x, context)
        if f"{block}attn_qkv.weight" in self.weights:
            joint = self._linear(block + "attn_qkv", x)
            q, k, v = np.split(joint, [heads * dim, (heads + kv_heads) * dim], axis=1)
        else:
            q, k, v = (self._linear(block + f"attn_{part}", x) for part in "qkv")
        if self.family in WHOLE_NORMS:
            q, k = self._norm(block + "attn_q_norm", q), self._norm(block + "attn_k_norm", k)
        gate = None
        if self.family in DELTA_NETS:
            q, gate = np.split(q.reshape(n, heads, 2 * dim), 2, axis=2)
        q, k, v = q.reshape(n, heads, dim), k.reshape(n, kv_heads, dim), v.reshape(n, kv_heads, dim)
        if self.family not in WHOLE_NORMS:
            q, k = self._norm(block + "attn_q_norm", q), self._norm(block + "attn_k_norm", k)
        q, k = self._rotate(layer, q, context), self._rotate(layer, k, context)
        return self._attend(layer, q, k, v, gate)

    def _differing_heads(self, layer: int, x: Doubles, context: int) -> tuple[Doubles, Doubles, Doubles]:
        """Gemma 4's queries, keys and values, which may be another layer's or made of the keys."""
        block, n = f"blk.{layer}.", len(x)
        dim = self.weights[f"{block}attn_q_norm.weight"].size

        def heads(part: str) -> Doubles:
            result: Doubles = self._linear(f"{block}attn_{part}", x).reshape(n, -1, dim)
            return result

        q = self._rotate(layer, self._norm(block + "attn_q_norm", heads("q")), context)
        if f"{block}attn_k.weight" in self.weights:
            k, v = heads("k"), heads("v" if f"{block}attn_v.weight" in self.weights else "k")
            v = v / np.sqrt(np.square(v).mean(axis=-1, keepdims=True) + self._key("attention.layer_norm_rms_epsilon"))
            k = self._rotate(layer, self._norm(block + "attn_k_norm", k), context)
            self.cells[self._windowed(layer)] = k, v
        return q, *self.cells[self._windowed(layer)]

    def _latent_attention(self, layer: int, x: Doubles, context: int) -> Doubles:
        block, n, heads = f"blk.{layer}.", len(x), self.heads
        turned, rank = self._key("rope.dimension_count"), self._key("attention.kv_lora_rank")
        if f"{block}attn_q_a.weight" in self.weights:
            ranked = self._norm(block + "attn_q_a_norm", self._linear(block + "attn_q_a", x))
            q = self._linear(block + "attn_q_b", ranked).reshape(n, heads, -1)
        else:
            q = self._linear(block + "attn_q", x).reshape(n, heads, -1)
        joint = self._linear(block + "attn_kv_a_mqa", x)[:, None]
        latent = self._norm(block + "attn_kv_a_norm", joint[..., :rank])
        own, q_turned = q[..., :-turned], self._rotate(layer, q[..., -turned:], context)
        k_turned = self._rotate(layer, joint[..., rank:], context)
        k = v = latent
        if absorbed := f"{block}attn_k_b.weight" in self.weights:
            own = np.einsum("nhi,hci->nhc", own, self.weights[f"{block}attn_k_b.weight"])
        else:
            k, v = np.split(self._linear(block + "attn_kv_b", latent).reshape(n, heads, -1), [own.shape[2]], axis=2)
            k_turned = np.repeat(k_turned, heads, axis=1)
        log_factor = np.log(self._key("rope.scaling.factor", 1.0))
        of_file = self._key("rope.scaling.yarn_log_multiplier", 0.0)
        sharpening = self._key("rope.scaling.attn_factor", 1.0) * (1 + (of_file or 0.1) * log_factor)
        scale = sharpening**2 / np.sqrt(q.shape[2])
        q, k = np.concatenate([own, q_turned], axis=2), np.concatenate([k, k_turned], axis=2)
        mixed = self._mixed(layer, q, k, v, scale)
        if absorbed:
            mixed = np.einsum("nhc,hvc->nhv", mixed, self.weights[f"{block}attn_v_b.weight"])
        return self._linear(block + "attn_output", mixed.reshape(n, -1))

    def _attend(self, layer: int, q: Doubles, k: Doubles, v: Doubles, gate: Doubles | None = None) -> Doubles:
        largest = (self.family, self.layers) in (("gemma2", 46), ("gemma3", 62))
        scale = self._key("attention.scale", 0.0) or (self.width // self.heads if largest else q.shape[2]) ** -0.5
        mixed = self._mixed(layer, q, k, v, 1.0 if self.family == "gemma4" else scale)
        if gate is not None:
            mixed = mixed * sigmoid(gate)
        return self._linear(f"blk.{layer}.attn_output", mixed.reshape(len(q), -1))

    def _mixed(self, layer: int, q: Doubles, k: Doubles, v: Doubles, scale: float) -> Doubles:
        n, heads, _ = q.shape
        positions = np.arange(n)
        if temperature := self._key("attention.temperature_scale", 0.0):
            q = q * (1 + temperature * np.log(positions // self._original + 1))[:, None, None]
        if self._half:
            k, v = (part.astype(np.float16).astype(np.float64) for part in (k, v))
        k, v = (np.repeat(part, heads // part.shape[1], axis=1).transpose(1, 0, 2) for part in (k, v))
        scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) * scale
        scores = capped(scores, self._key("attn_logit_softcapping", 50.0) if self.family == "gemma2" else 0.0)
        distance = positions[:, None] - positions[None]
        hidden = distance < 0
        if self._windowed(layer):
            hidden |= distance >= self._window
        scores = np.where(hidden, -np.inf, scores)
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        sums = powers.sum(axis=-1, keepdims=True)
        if f"blk.{layer}.attn_sinks.weight" in self.weights:
            sinks = self.weights[f"blk.{layer}.attn_sinks.weight"][:, None, None]
            sums = sums + np.exp(sinks - scores.max(axis=-1, keepdims=True))
        mixed: Doubles = ((powers / sums) @ v).transpose(1, 0, 2)
        return mixed

    def _short_convolution(self, block: str, x: Doubles) -> Doubles:
        b, c, values = np.split(self._linear(block + "shortconv.in_proj", x), 3, axis=1)
        taps = self.weights[block + "shortconv.conv.weight"].T
        padded = np.concatenate([np.zeros((len(taps) - 1, self.width)), b * values])
        mixed = sum(tap * padded[i : i + len(x)] for i, tap in enumerate(taps))
        return self._linear(block + "shortconv.out_proj", c * mixed)

    def _convolved(self, block: str, x: Doubles) -> Doubles:
        taps = self.weights[block + "ssm_conv1d.weight"].T
        padded = np.concatenate([np.zeros((len(taps) - 1, x.shape[1])), x])
        found: Doubles = self.weights.get(block + "ssm_conv1d.bias", 0) + sum(
            tap * padded[i : i + len(x)] for i, tap in enumerate(taps)
        )
        return found * sigmoid(found)

    def _state_space(self, block: str, x: Doubles) -> Doubles:
        n, heads, groups = len(x), self._key("ssm.time_step_rank"), self._key("ssm.group_count")
        inner, size = self._key("ssm.inner_size"), self._key("ssm.state_size")
        joint = self._linear(block + "ssm_in", x)
        gate, channels, step = np.split(joint, [inner, 2 * inner + 2 * groups * size], axis=1)
        values, keys, queries = np.split(self._convolved(block, channels), [inner, inner + groups * size], axis=1)
        values = values.reshape(n, heads, inner // heads)
        keys, queries = (np.repeat(part.reshape(n, groups, size), heads // groups, axis=1) for part in (keys, queries))
        step = np.log1p(np.exp(step + self.weights[block + "ssm_dt.bias"]))
        decay = np.exp(step * self.weights[block + "ssm_a"][:, 0])
        state, mixed = np.zeros((heads, inner // heads, size)), np.zeros(values.shape)
        for i in range(n):
            state *= decay[i, :, None, None]
            state += np.einsum("hp,hn->hpn", values[i] * step[i, :, None], keys[i])
            mixed[i] = np.einsum("hpn,hn->hp", state, queries[i]) + self.weights[block + "ssm_d"] * values[i]
        opened = mixed.reshape(n, inner) * gate * sigmoid(gate)
        normed = self._norm(block + "ssm_norm", opened.reshape(n, groups, inner // groups))
        return self._linear(block + "ssm_out", normed.reshape(n, inner))

    def _delta_net(self, block: str, x: Doubles) -> Doubles:
        n, keys, values = len(x), self._key("ssm.group_count"), self._key("ssm.time_step_rank")
        size: int = self._key("ssm.state_size")
        joint = self._linear(block + "attn_qkv", x)
        heads = self._convolved(block, joint).reshape(n, 2 * keys + values, size)
        q, k, v = np.split(heads, [keys, 2 * keys], axis=1)
        epsilon = self._key("attention.layer_norm_rms_epsilon")
        q, k = (part / np.sqrt(np.square(part).sum(axis=-1, keepdims=True) + epsilon) for part in (q, k))
        rate = sigmoid(self._linear(block + "ssm_beta", x))
        step = np.log1p(np.exp(self._linear(block + "ssm_alpha", x) + self.weights[block + "ssm_dt.bias"]))
        decay = np.exp(self.weights[block + "ssm_a"] * step)
        shared = np.arange(values) % keys  # head of keys of each head of values
        state, mixed = np.zeros((values, size, size)), np.zeros((n, values, size))
        for i in range(n):
            state *= decay[i, :, None, None]
            delta = rate[i, :, None] * (v[i] - np.einsum("hvk,hk->hv", state, k[i, shared]))
            state += np.einsum("hv,hk->hvk", delta, k[i, shared])
            mixed[i] = np.einsum("hvk,hk->hv", state, q[i, shared]) / np.sqrt(size)
        gate = self._linear(block + "attn_gate", x).reshape(n, values, size)
        opened = self._norm(block + "ssm_norm", mixed) * gate * sigmoid(gate)
        return self._linear(block + "ssm_out", opened.reshape(n, values * size))

    def _windowed(self, layer: int) -> bool:
        if self.family.startswith("lfm2"):
            return self._window > 0
        if self.family == "gemma4":
            return bool(self._key("attention.sliding_window_pattern")[layer])
        period = self._key("attention.sliding_window_pattern", WINDOW_PERIODS.get(self.family, 0))
        return self.family in WINDOW_PERIODS and self._window > 0 and layer % period < period - 1

    def _rotate(self, layer: int, x: Doubles, context: int) -> Doubles:
        skipped = (self.family == "smollm3" and layer % 4 == 3) or self.family in NO_ROTATION
        if skipped or not self._key("rope.scaling.finetuned", True):
            return x
        own = self.family == "gemma4" and self._windowed(layer)
        ending = "_swa" if own else ""
        n, dims = len(x), self._key(f"rope.dimension_count{ending}", self.dim)
        base, factor = self._key(f"rope.freq_base{ending}", 10000.0), self._key("rope.scaling.factor", 1.0)
        kind, amplitude = self._key("rope.scaling.type", "linear"), self._key("rope.scaling.attn_factor", 1.0)
        if self._windowed(layer) and self.family == "gemma3":
            base, factor = 10000.0, 1.0
        if self._windowed(layer) and self.family == "olmo2":
            kind, factor = "none", 1.0
        frequencies = base ** (-np.arange(0, dims, 2) / dims)
        plain = frequencies / (1.0 if own else self._factors(context))
        if kind == "yarn":
            mistral = self.family == "mistral3"
            fast = self._key("rope.scaling.yarn_beta_fast", 32.0) if mistral else 32.0
            slow = self._key("rope.scaling.yarn_beta_slow", 1.0) if mistral else 1.0
            bounds = [dims * np.log(self._original / (2 * np.pi * beta)) / (2 * np.log(base)) for beta in (fast, slow)]
            low, high = max(0.0, np.floor(bounds[0])), min(dims - 1.0, np.ceil(bounds[1]))
            kept = 1 - np.clip((np.arange(dims // 2) - low) / max(0.001, high - low), 0, 1)
            plain = kept * plain + (1 - kept) * plain / factor
            amplitude *= 0.1 * np.log(factor) + 1
            if self.family == "deepseek2" and self._key("rope.scaling.yarn_log_multiplier", 0.0):
                amplitude /= 0.1 * np.log(factor) + 1
            if mistral:
                amplitude /= 0.1 * self._key("rope.scaling.yarn_log_multiplier", 0.0) * np.log(factor) + 1
        else:
            plain = plain / factor
        angles = np.arange(n)[:, None] * plain
        cosines, sines = (amplitude * f(angles)[:, None, :] for f in (np.cos, np.sin))
        result = x.copy()
        adjacent = self.family in ADJACENT
        first = slice(0, dims, 2) if adjacent else slice(0, dims // 2)
        second = slice(1, dims, 2) if adjacent else slice(dims // 2, dims)
        result[..., first] = x[..., first] * cosines - x[..., second] * sines
        result[..., second] = x[..., first] * sines + x[..., second] * cosines
        return result

    def _factors(self, context: int) -> Doubles | float:
        if "rope_freqs.weight" in self.weights:
            return self.weights["rope_freqs.weight"]
        length = "long" if context > self._original else "short"
        return self.weights.get(f"rope_factors_{length}.weight", 1.0)

    def _feed_forward(self, block: str, x: Doubles) -> Doubles:
        up = self._linear(block + "ffn_up", x)
        if self.family in ("gpt2", "starcoder2"):
            return self._linear(block + "ffn_down", gelu(up))
        if self.family == "nemotron_h":
            return self._linear(block + "ffn_down", np.square(np.maximum(up, 0)))
        if self.family == "phi3":
            gate, up = np.split(up, 2, axis=1)
        else:
            gate = self._linear(block + "ffn_gate", x)
        opened = gelu(gate) if self.family.startswith("gemma") else gate / (1 + np.exp(-gate))
        return self._linear(block + "ffn_down", opened * up)

    def _experts(self, block: str, x: Doubles, routed: Doubles | None = None) -> Doubles:
        used, count = self._key("expert_used_count"), self._key("expert_count")
        if routed is not None:
            unit = routed / np.sqrt(np.square(routed).mean(axis=-1, keepdims=True) + 1e-6)
            routed = unit / np.sqrt(self.width) * self.weights[f"{block}ffn_gate_inp.scale"]
        logits = self._linear(block + "ffn_gate_inp", x if routed is None else routed)
        usual = 3 if self.family == "gpt-oss" else 2 if self.family in SIGMOID else 1
        kind = self._key("expert_gating_func", 0) or usual
        scores = sigmoid(logits) if kind == 2 else softmax(logits) if kind == 1 else logits
        ranked = scores + self.weights.get(f"{block}exp_probs_b.bias", 0)
        if (groups := self._key("expert_group_count", 1)) > 1:
            grouped = ranked.reshape(len(x), groups, -1)
            sums = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
            kept = np.argsort(-sums, axis=1, kind="stable")[:, : self._key("expert_group_used_count")]
            mask = np.full((len(x), groups), -np.inf)
            np.put_along_axis(mask, kept, 0.0, axis=1)
            ranked = ranked + np.repeat(mask, count // groups, axis=1)
        best = np.argsort(-ranked, axis=1, kind="stable")[:, :used]
        self.chosen.append(best)
        chosen = np.take_along_axis(scores, best, axis=1)
        if kind == 3:
            chosen = softmax(chosen)
        if self.family in NORMALIZED or self._key("expert_weights_norm", False):
            chosen = chosen / chosen.sum(axis=1, keepdims=True)
        chosen = chosen * (self._key("expert_weights_scale", 0.0) or 1.0)
        found = np.zeros_like(x)
        for row, (experts, weights) in enumerate(zip(best, chosen, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                parts = [self.weights.get(f"{block}ffn_{name}_exps.weight") for name in ("gate", "up", "gate_up")]
                gate, up, both = (part[expert] if part is not None else None for part in parts)
                if both is not None:
                    gate, up = np.split(both, 2)
                assert up is not None
                down = self.weights[f"{block}ffn_down_exps.weight"][expert]
                biases = (self.weights.get(f"{block}ffn_{name}_exps.bias") for name in ("gate", "up", "down"))
                of_gate, of_up, of_down = (0 if bias is None else bias[expert] for bias in biases)
                opened = self._opened(None if gate is None else gate @ x[row] + of_gate, up @ x[row] + of_up)
                factor = self.weights.get(f"{block}ffn_down_exps.scale", np.ones(count))[expert]
                found[row] += weight * factor * (down @ opened + of_down)
        if f"{block}ffn_up_shexp.weight" not in self.weights:
            return found
        gate = self._linear(block + "ffn_gate_shexp", x) if f"{block}ffn_gate_shexp.weight" in self.weights else None
        shared = self._linear(block + "ffn_down_shexp", self._opened(gate, self._linear(block + "ffn_up_shexp", x)))
        if f"{block}ffn_gate_inp_shexp.weight" in self.weights:
            shared = shared * sigmoid(x @ self.weights[f"{block}ffn_gate_inp_shexp.weight"])[:, None]
        return found + shared

    def _opened(self, gate: Doubles | None, up: Doubles) -> Doubles:
        if gate is None:
            return np.square(np.maximum(up, 0))
        if self.family == "gemma4":
            return gelu(gate) * up
        if self.family == "gpt-oss":
            gate = np.minimum(gate, 7)
            return gate * sigmoid(1.702 * gate) * (np.clip(up, -7, 7) + 1)
        return gate * sigmoid(gate) * up

    def _linear(self, name: str, x: Doubles) -> Doubles:
        result: Doubles = x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)
        return result

    def _norm(self, name: str, x: Doubles) -> Doubles:
        if f"{name}.weight" not in self.weights:
            return x
        if self.family in LAYER_NORM:
            x = x - x.mean(axis=-1, keepdims=True)
        epsilon = self._key("attention.layer_norm_epsilon", None) or self._key("attention.layer_norm_rms_epsilon")
        unit = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon)
        result: Doubles = unit * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0)
        return result

    def _embedding_scale(self) -> float:
        if self.family.startswith("gemma"):
            return float(np.sqrt(self.width))
        return float(self._key("embedding_scale", 1.0))

    def _key(self, key: str, *otherwise: Any) -> Any:
        return self._values.get(f"{self.family}.{key}", *otherwise)


def sigmoid(x: Doubles) -> Doubles:
    result: Doubles = 1 / (1 + np.exp(-x))
    return result


def softmax(x: Doubles) -> Doubles:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Doubles = powers / powers.sum(axis=-1, keepdims=True)
    return result


def capped(x: Doubles, cap: float) -> Doubles:
    return cap * np.tanh(x / cap) if cap else x


def gelu(x: Doubles) -> Doubles:
    result: Doubles = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return result
