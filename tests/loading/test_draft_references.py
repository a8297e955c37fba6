"""The arithmetic of drafts in tests is llama.cpp's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from support.feature_drafts import Array, Block, BlockTwin, Eagle3, Eagle3Twin, dspark, write_draft
from support.logits import llama_context, llama_output

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.oracle]
TOKENS = [5, 7, 299, 0, 7, 11, 90, 250, 31, 2]


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
        Eagle3(taps=[1, 2, 3], norm_output=True, draft_vocab=90),
    ],
    ids=["plain", "normed residual", "rope factors", "3.1"],
)
def test_eagle3_is_that_of_llama_cpp(draft: Eagle3, tmp_path: Path) -> None:
    """From g on; llama.cpp gives access to that to C++ alone."""
    own = replace(draft, own_embedding=True, own_head=True, tokenizer=True)
    path = write_draft(tmp_path / "draft.gguf", own)
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
    own = replace(draft, own_embedding=True, own_head=True, tokenizer=True, mask_token=290)
    path = write_draft(tmp_path / "draft.gguf", own)
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
