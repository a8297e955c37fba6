"""The arithmetic of drafts in tests is llama.cpp's, and that of Speculators on what it saves and we convert."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from support.convert import convert
from support.feature_drafts import Array, Block, BlockTwin, Eagle3, Eagle3Twin, dspark, write_dflash, write_eagle3
from support.logits import llama_context, llama_output

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.oracle]
TOKENS = [5, 7, 299, 0, 7, 11, 90, 250, 31, 2]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


# ---- llama.cpp ----


def llama_rows(context: Any, tokens: Sequence[int] | None, vectors: Array | None, position: int) -> Array:
    """Logits of rows of tokens, of vectors [n, width], or of both, from a position on."""
    batch = llama_cpp.llama_batch_ext_init(context)
    rows = None if vectors is None else np.ascontiguousarray(vectors, np.float32)
    count = len(rows if tokens is None else tokens)
    for i in range(count):
        given = rows is not None and llama_cpp.llama_embd(
            rows[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, rows.shape[1]
        )
        if tokens is None:
            assert llama_cpp.llama_batch_ext_add_embd(batch, 0, given) == i
        else:
            assert llama_cpp.llama_batch_ext_add_token(batch, 0, tokens[i]) == i
        llama_cpp.llama_batch_ext_set_pos(batch, i, ctypes.byref(llama_cpp.llama_pos(position + i)))
        if tokens is not None:
            assert rows is None or llama_cpp.llama_batch_ext_set_embd_token(batch, i, given)
            llama_cpp.llama_batch_ext_set_output_logits(batch, i, True)
    assert llama_cpp.llama_process(context, llama_cpp.LLAMA_PROCESS_TYPE_DECODE, batch) == 0
    llama_cpp.llama_batch_ext_free(batch)
    return np.empty(0) if tokens is None else llama_output(context, count)


@pytest.mark.parametrize(
    "draft",
    [
        Eagle3(taps=[1, 2, 3]),
        Eagle3(taps=[1, 2, 3], norm_before_residual=True, draft_vocab=90),
        Eagle3(taps=[1, 2, 3], norm_before_fc=True, rope_factors=True, rope_base=500.0, draft_vocab=90),
    ],
    ids=["plain", "normed residual", "rope factors"],
)
def test_eagle3_is_that_of_llama_cpp(draft: Eagle3, tmp_path: Path) -> None:
    """From g on; llama.cpp gives access to that to C++ alone."""
    own = replace(draft, own_embedding=True, own_head=True, tokenizer=True)
    path = write_eagle3(tmp_path / "draft.gguf", own)
    twin = Eagle3Twin.of(path)
    g = twin.fuse(np.random.default_rng(1).standard_normal((len(TOKENS), 192)))
    expected, fed = twin.add(g, TOKENS)
    deeper, _ = twin.add(fed[-1:], [20])
    with llama_context(path, exact=True) as context:
        found = llama_rows(context, TOKENS, g, 0)
        last = llama_rows(context, [20], fed[-1:], len(TOKENS))
    kept = np.arange(300) if twin.d2t is None else twin.d2t
    assert np.isfinite(found[0]).sum() == len(kept)
    np.testing.assert_allclose(found[:, kept], expected, atol=1e-3)
    np.testing.assert_allclose(last[:, kept], deeper, atol=1e-3)


@pytest.mark.parametrize(
    "draft",
    [
        Block(),
        Block(draft_vocab=90, causal=True),
        dspark(draft_vocab=90),
        dspark(draft_vocab=90, from_anchor=False, rope_factors=True),
    ],
    ids=["DFlash", "causal", "DSpark", "bonus anchor"],
)
def test_blocks_are_those_of_llama_cpp(draft: Block, tmp_path: Path) -> None:
    path = write_dflash(
        tmp_path / "draft.gguf", replace(draft, own_embedding=True, own_head=True, tokenizer=True, mask_token=290)
    )
    twin = BlockTwin.of(path)
    features = np.random.default_rng(1).standard_normal((9, 128))
    twin.commit(features)
    expected, _ = twin.block(7)
    kept = np.arange(300) if twin.d2t is None else twin.d2t
    before = 7
    for place in range(twin.first_place, 4):  # llama.cpp corrects a block along its likeliest tokens
        expected[place] += twin.correction(before)
        before = int(kept[expected[place].argmax()])
    with llama_context(path, exact=True) as context:
        llama_cpp.llama_set_causal_attn(context, draft.causal)
        llama_rows(context, None, features, 0)
        found = llama_rows(context, [7, 290, 290, 290], None, 9)
    np.testing.assert_allclose(found[:, kept], expected, atol=1e-3)


# ---- Speculators ----


@pytest.fixture(scope="module")
def torch() -> Any:
    pytest.importorskip("speculators", reason="Speculators is not installed")
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def layers(kind: str, count: int, **changes: Any) -> Any:
    """A configuration of layers of Llama or Qwen3."""
    import transformers  # noqa: PLC0415

    made = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=count,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=300,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **changes,
    )
    made._attn_implementation = "eager"
    return made


def randomize(torch: Any, model: Any, draft_tokens: int) -> Any:
    """Weights of a model with random numbers, and its tokens."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter) + float("norm" in name))
    if draft_tokens < 300:
        kept = torch.randperm(300)[:draft_tokens].sort().values
        model.t2d[kept] = True
        model.d2t.copy_(kept - torch.arange(draft_tokens))
    return model.eval()


def algorithm(name: str) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: PLC0415
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: PLC0415

    return SpeculatorsConfig(
        algorithm=name,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


@pytest.mark.parametrize(
    ("kind", "count", "taps", "draft_tokens", "rope", "flags"),
    [
        ("llama", 1, 3, 90, {}, {}),
        ("llama", 1, 3, 90, LLAMA3, {"norm_before_residual": True}),
        ("llama", 2, 3, 300, {}, {"norm_before_fc": True}),
        ("llama", 1, 3, 90, {}, {"fc_norm": True, "norm_output": True, "embed_requires_grad": True}),
        ("qwen3", 1, 5, 300, {}, {"norm_before_residual": True}),
        ("qwen3", 2, 3, 90, {}, {"fc_norm": True, "norm_before_residual": True, "norm_output": True}),
    ],
)
def test_eagle3_is_that_of_speculators(
    torch: Any,
    tmp_path: Path,
    kind: str,
    count: int,
    taps: int,
    draft_tokens: int,
    rope: dict[str, Any],
    flags: dict[str, bool],
) -> None:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig  # noqa: PLC0415
    from speculators.models.eagle3.core import Eagle3DraftModel  # noqa: PLC0415

    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers(kind, count, **({"rope_parameters": rope} if rope else {})),
        draft_vocab_size=draft_tokens,
        eagle_aux_hidden_state_layer_ids=list(range(2, 2 + taps)),
        speculators_config=algorithm("eagle3"),
        **flags,
    )
    model = randomize(torch, Eagle3DraftModel(config=config), draft_tokens)
    features = torch.randn(1, len(TOKENS), taps * 64)
    said: list[Array] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: said.append(logits[0].numpy()))
    with torch.no_grad():
        model(features, torch.tensor([TOKENS]), torch.zeros(1, len(TOKENS), dtype=torch.long), ttt_steps=3)
    model.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "draft.gguf")

    embedding = None if flags.get("embed_requires_grad") else model.embed_tokens.weight.detach().numpy()
    head = model.lm_head.weight.detach().numpy() if draft_tokens == 300 else None
    twin = Eagle3Twin.of(tmp_path / "draft.gguf", embedding, head)
    assert ("token_embd.weight" in twin.tensors) == (embedding is None)
    logits, fed = twin.commit(features[0].numpy(), TOKENS)
    np.testing.assert_allclose(said[0], logits, atol=2e-3)
    # Speculators grows a chain below every row, with the text's own tokens.
    for level in (1, 2):
        tokens = [*TOKENS[level:], *[0] * level]
        parents = range((level - 1) * len(TOKENS), level * len(TOKENS))
        logits, fed = twin.add(fed, tokens, parents)
        np.testing.assert_allclose(said[level], logits, atol=2e-3)
    if twin.d2t is not None:
        assert np.array_equal(twin.d2t, np.flatnonzero(model.t2d.numpy()))


@pytest.mark.parametrize(
    ("name", "draft_tokens", "flags"),
    [
        ("dflash", 90, {}),
        ("dflash", 300, {"sample_from_anchor": True}),
        ("dspark", 90, {}),
        ("dspark", 300, {"sample_from_anchor": False, "confidence_head_with_markov": False}),
        ("dspark", 90, {"enable_confidence_head": False}),
    ],
)
def test_blocks_are_those_of_speculators(
    torch: Any, tmp_path: Path, name: str, draft_tokens: int, flags: dict[str, Any]
) -> None:
    from speculators.models.dflash.config import DFlashSpeculatorConfig  # noqa: PLC0415
    from speculators.models.dflash.core import DFlashDraftModel  # noqa: PLC0415
    from speculators.models.dspark.config import DSparkSpeculatorConfig  # noqa: PLC0415
    from speculators.models.dspark.core import DSparkDraftModel  # noqa: PLC0415

    made, configured = {
        "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
    }[name]
    config = configured(
        transformer_layer_config=layers("qwen3", 2),
        draft_vocab_size=draft_tokens,
        block_size=4,
        aux_hidden_state_layer_ids=[2, 5],
        mask_token_id=298,
        speculators_config=algorithm(name),
        **({"markov_rank": 16} if name == "dspark" else {}),
        **flags,
    )
    model = randomize(torch, made(config=config), draft_tokens)
    features, tokens = torch.randn(1, len(TOKENS), 128), torch.tensor([TOKENS])
    mask = torch.zeros(1, len(TOKENS))
    mask[0, 5] = 1  # the one place where a block may begin
    with torch.no_grad():
        hidden, logits, _, _, places = model._backbone_forward(
            features, tokens, mask, torch.randn(1, len(TOKENS), 64), torch.zeros_like(tokens), max_anchors=1
        )
    model.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "draft.gguf")
    start = int(places[0])
    assert start == 5

    head = model.lm_head.weight.detach().numpy() if draft_tokens == 300 else None
    twin = BlockTwin.of(tmp_path / "draft.gguf", model.embed_tokens.weight.detach().numpy(), head)
    twin.commit(features[0, :start].numpy())
    ours, y = twin.block(TOKENS[start])
    np.testing.assert_allclose(logits[0].numpy(), ours, atol=2e-3)
    np.testing.assert_allclose(hidden[0].numpy(), y, atol=2e-3)
    assert twin.first_place == int(not config.sample_from_anchor)
    if name == "dspark":
        before = torch.tensor([[TOKENS[start]]])
        with torch.no_grad():
            bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden[:, :1])
        np.testing.assert_allclose(bias[0, 0].numpy(), twin.correction(TOKENS[start]), atol=1e-5)
