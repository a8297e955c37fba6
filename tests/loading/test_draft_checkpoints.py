"""Checkpoints of drafts that read the target's features become GGUF files that compute the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file
from support.convert import change_json, convert, write_bfloat16
from support.draft_checkpoints import EMBEDDING, FORMS, HEAD, LFM2, MINICPM5, Form, write_form
from support.feature_drafts import Array, BlockTwin, Contents, Eagle3Twin

from pystaged.loading import feature_drafts
from pystaged.loading.quantize import quantize_checkpoint


def outputs(contents: Contents, adjacent: bool | None = None) -> list[Array]:
    """What a draft computes for some features and tokens; `adjacent` None for a GGUF file's rotary pairs."""
    adjacent = contents.architecture == "eagle3" if adjacent is None else adjacent
    random = np.random.default_rng(1)
    features = random.standard_normal((6, contents.tensors["fc.weight"].shape[1]))
    narrow = contents.keys["embedding_length"] < 64
    parts: dict[str, Any] = {} if narrow else {"embedding": EMBEDDING, "head": HEAD}
    if contents.architecture == "eagle3":
        eagle3 = Eagle3Twin(contents, **parts, adjacent=adjacent)
        logits, fed = eagle3.commit(features, [5, 7, 299, 0, 7, 11])
        deeper, _ = eagle3.add(fed[[5, 5]], [20, 21], [5, 5])
        return [logits, fed, deeper]
    block = BlockTwin(contents, **parts, adjacent=adjacent)
    block.commit(features)
    logits, y = block.block(9)
    return [logits, y, block.correction(3)]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_converted_drafts_compute_what_their_checkpoints_do(form: Callable[[], Form], tmp_path: Path) -> None:
    made = form()
    convert(write_form(tmp_path / "draft", made), tmp_path / "draft.gguf")
    expected, found = Contents.made(made.draft), Contents.of(tmp_path / "draft.gguf")
    assert found.architecture == expected.architecture
    said = made.numbers()
    if "target_layer" not in json.dumps(said) and "layer_ids" not in json.dumps(said):
        assert "target_layers" not in found.keys  # they follow from the target's number of layers
        found.keys["target_layers"] = made.draft.taps
    for key, value in expected.keys.items():
        assert found.keys[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert found.tensors.keys() == expected.tensors.keys()
    for ours, theirs in zip(outputs(found), outputs(expected, adjacent=made.neighbours), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


# The vocabulary, query heads, heads of keys, head's width, and weights of the published files.
SIZES = {
    "LFM2.5-1.2B-Instruct-DSpark": (LFM2 | {"rope_theta": 1e7}, 65536, 32, 8, 64, 295_725_953),
    "MiniCPM5-2B-DSpark": (MINICPM5 | {"rope_parameters": {"rope_theta": 5e6}}, 130560, 16, 2, 128, 323_776_001),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_published_files_of_small_targets_are_read_whole(name: str, tmp_path: Path) -> None:
    config, tokens, heads, kv_heads, dim, weights = SIZES[name]
    width, ffn = 2048, 6144
    layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (heads * dim, width),
        "self_attn.k_proj": (kv_heads * dim, width),
        "self_attn.v_proj": (kv_heads * dim, width),
        "self_attn.o_proj": (width, heads * dim),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }
    unused = {"confidence_head.proj.weight": (1, width + 256), "confidence_head.proj.bias": (1,)}
    shapes = unused | {
        "fc.weight": (width, 5 * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        "markov_head.markov_w1.weight": (tokens, 256),
        "markov_head.markov_w2.weight": (tokens, 256),
        **{f"layers.{i}.{part}.weight": size for i in range(5) for part, size in layer.items()},
    }
    assert sum(np.prod(size) for size in shapes.values()) == weights
    numbers = feature_drafts.Numbers.of(
        config
        | {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": 5, "num_attention_heads": heads}
        | {"num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": tokens, "max_position_embeddings": 128000},
        tmp_path,
    )
    assert numbers
    plan = feature_drafts.plan(tmp_path, numbers, shapes)
    assert {each.source: each.shape for each in plan.tensors} == {
        name: size for name, size in shapes.items() if name not in unused
    }
    assert plan.ids is None
    assert plan.metadata == {
        "block_size": config["block_size"],
        "sample_from_anchor": True,
        "attention.causal": False,
    }
    assert numbers.shape.metadata["rope.freq_base"] == (5e6 if "MiniCPM5" in name else 1e7)


def change_tensors(change: Callable[[dict[str, Array]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return changed


def without(name: str) -> Callable[[Path], None]:
    return change_tensors(lambda found: found.pop(name))


def other(name: str, values: Array) -> Callable[[Path], None]:
    return change_tensors(lambda found: found.update({name: values}))


def test_bfloat16_stays_and_small_tensors_are_floats(tmp_path: Path) -> None:
    made = FORMS["DSpark"]()
    folder = write_form(tmp_path / "draft", made)
    floats = {name: values for name, values in made.tensors().items() if values.dtype == np.float32}
    write_bfloat16(folder / "model.safetensors", floats)
    convert(folder, tmp_path / "draft.gguf", "BF16")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "draft.gguf").tensors}
    assert {name for name, kind in types.items() if kind == "F32"} == {name for name in types if "norm" in name}
    assert set(types.values()) == {"F32", "BF16"}
    fused = Contents.of(tmp_path / "draft.gguf").tensors["fc.weight"]
    assert np.array_equal(fused, (floats["fc.weight"].view(np.uint32) >> 16 << 16).view(np.float32))


@pytest.mark.parametrize("form", ["Speculators", "SpecForge", "DeepSpec", "DSpark", "Speculators' DSpark"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_drafts_are_quantized_as_asked(form: str, kind: str, tmp_path: Path) -> None:
    made = FORMS[form]()
    quantize_checkpoint(write_form(tmp_path / "draft", made), tmp_path / "draft.gguf", kind)
    exact, found = Contents.made(made.draft), Contents.of(tmp_path / "draft.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "draft.gguf").tensors}
    for name, values in exact.tensors.items():
        if values.ndim == 1 or name == "fc_norm.weight":
            assert types[name] == ("I64" if name == "d2t" else "F32")
            assert np.array_equal(np.sort(found.tensors[name]), np.sort(values))
        else:
            assert types[name] == ("F16" if values.shape[1] % 32 else kind.upper())
    found.keys.setdefault("target_layers", made.draft.taps)
    ours, theirs = outputs(found)[0], outputs(exact, adjacent=False)[0]
    assert np.abs(ours - theirs).max() > 0
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > (0.999 if kind == "q8_0" else 0.9)


def test_types_that_a_draft_cannot_have_are_refused(tmp_path: Path) -> None:
    folder = write_form(tmp_path / "draft", FORMS["EAGLE"]())
    with pytest.raises(ValueError, match=r"q4_k_m.*q8_0"):
        quantize_checkpoint(folder, tmp_path / "draft.gguf", "q4_k_m")


NAN = np.full((90, 64), np.nan, np.float32)
IDS = np.zeros(90, np.int64)
BAD: list[tuple[str, Callable[[Path], None], str]] = [
    # Other kinds of drafts.
    ("EAGLE", change_json("config.json", architectures=["PEagleDraftModel"]), "of the kind 'PEagleDraftModel'"),
    ("Speculators", change_json("config.json", speculators_model_type="peagle"), "of the kind 'peagle'"),
    ("EAGLE", change_json("config.json", architectures=["Eagle3DeepseekV2ForCausalLM"]), "Eagle3DeepseekV2ForCausalLM"),
    ("DFlash", change_json("config.json", dflash_config={"projector_type": "domino"}), "of the kind 'domino'"),
    ("DFlash", change_json("config.json", conv_kernel_size=4), "conv_kernel_size is 4"),
    ("DSpark", change_json("config.json", markov_head_type="gated"), "markov_head_type"),
    ("DSpark", other("markov_head.gate_proj.weight", IDS), "gate_proj.weight' is unknown in dflash; there are EAGLE-3"),
    ("DSpark", lambda folder: (folder / "mask_embedding.pt").write_bytes(b"") and None, "mask embedding"),
    # Variants.
    ("EAGLE", change_json("config.json", attention_bias=True), "attention_bias"),
    ("DFlash", change_json("config.json", layer_types=["sliding_attention"]), "sliding_attention"),
    ("DFlash", change_json("config.json", use_sliding_window=True), "use_sliding_window"),
    ("DFlash", change_json("config.json", layer_types="full_attention"), "layer_types"),
    ("ModelOpt", change_json("config.json", eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
    ("ModelOpt", change_json("config.json", fc_norm=True), "exclude each other"),
    # Numbers.
    ("EAGLE", change_json("config.json", draft_vocab_size=301), "above vocab_size"),
    ("EAGLE", change_json("config.json", norm_output="yes"), "norm_output"),
    ("EAGLE", change_json("config.json", target_hidden_size=32), "3 features of 32"),
    ("EAGLE", change_json("config.json", num_hidden_layers=2), "layers.1.input_layernorm.weight"),
    ("EAGLE", change_json("config.json", head_dim=32), "self_attn.q_proj"),
    ("AngelSlim", change_json("config.json", eagle_aux_hidden_state_layer_ids=[]), "eagle_aux_hidden_state_layer_ids"),
    ("AngelSlim", change_json("config.json", eagle_aux_hidden_state_layer_ids=[1, -1, 3]), "names the layer -1"),
    (
        "AngelSlim",
        change_json("config.json", eagle_aux_hidden_state_layer_ids=[3, 5]),
        "embed_tokens.weight' is missing",
    ),
    ("DFlash", change_json("config.json", dflash_config={"mask_token_id": 299}), "target_layer_ids"),
    ("DFlash", change_json("config.json", dflash_config={"target_layer_ids": [1, 4]}), "mask_token_id"),
    ("DSpark", change_json("config.json", mask_token_id=300), "no token of vocab_size"),
    ("DSpark", change_json("config.json", block_size=1), "block_size"),
    # Tensors.
    ("EAGLE", without("fc.weight"), "fc.weight' is missing"),
    ("EAGLE", without("lm_head.weight"), "lm_head.weight' is missing"),
    ("EAGLE", without("d2t"), "d2t' is missing"),
    ("EAGLE", without("midlayer.hidden_norm.weight"), "hidden_norm.weight' is missing"),
    ("SpecForge", without("fc_norm.1.weight"), "fc_norm.1.weight' is missing"),
    ("SpecForge", other("fc_norm.1.weight", np.ones(32, np.float32)), "fc_norm.1.weight' has shape"),
    ("SpecForge", other("fc_norm.1.weight", np.full(64, np.inf, np.float32)), "not finite"),
    ("DSpark", without("markov_head.markov_w2.weight"), "markov_w2.weight' is missing"),
    ("DSpark", other("markov_head.markov_w1.weight", np.zeros((), np.float32)), "markov_w1.weight' has shape []"),
    ("DSpark", other("markov_head.markov_w1.weight", np.zeros((300, 0), np.float32)), "markov_w1.weight' has shape"),
    ("DFlash", without("layers.1.self_attn.q_norm.weight"), "q_norm.weight' is missing"),
    ("EAGLE", other("lm_head.weight", NAN), "not finite"),
    ("EAGLE", other("lm_head.weight", NAN[:80]), "lm_head.weight' has shape"),
    ("EAGLE", other("strange.weight", NAN), "strange.weight' is unknown"),
    ("EAGLE", other("layers.0.hidden_norm.weight", NAN), "have the same meaning"),
    ("EAGLE", other("d2t", IDS[:80]), "'d2t' has shape"),
    ("EAGLE", other("d2t", IDS - 1), "names tokens outside"),
    ("EAGLE", other("d2t", IDS + np.iinfo(np.int64).max), "names tokens outside"),
    ("EAGLE", other("d2t", -np.arange(90)), "names a token twice"),
    ("EAGLE", other("d2t", np.zeros(90, np.float32)), "not of integers"),
]


@pytest.mark.parametrize(("form", "change", "said"), BAD, ids=[f"{form}: {said}" for form, _, said in BAD])
def test_what_is_wrong_with_a_draft_is_named(
    form: str, change: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    folder = write_form(tmp_path / "draft", FORMS[form]())
    change(folder)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        convert(folder, tmp_path / "draft.gguf")
    assert str(folder) in str(error.value)
    assert not (tmp_path / "draft.gguf").exists()


def test_an_absurd_number_of_layers_ends_at_the_first_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_form(tmp_path / "draft", FORMS["EAGLE"]())
    change_json("config.json", num_hidden_layers=1 << 24)(folder)
    found = feature_drafts._wanted

    def counted(*given: Any) -> Iterator[Any]:
        for number, each in enumerate(found(*given)):
            assert number < 100
            yield each

    monkeypatch.setattr(feature_drafts, "_wanted", counted)
    with pytest.raises(ValueError, match=r"layers\.1\.input_layernorm\.weight' is missing"):
        convert(folder, tmp_path / "draft.gguf")
