"""Drafts that read the target's features: files, their twins in numpy, and conversion."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.feature_drafts import (
    Array,
    Block,
    BlockTwin,
    Contents,
    Eagle3,
    Eagle3Twin,
    block_tensors,
    dspark,
    eagle3_tensors,
    write_dflash,
    write_eagle3,
)

EAGLE3 = {
    "plain": Eagle3(),
    "normed residual": Eagle3(norm_before_residual=True),
    "norm before fc": Eagle3(norm_before_fc=True, taps=[2, 3, 4]),
    "3.1": Eagle3(separate_fc_norm=True, norm_output=True, taps=[2, 3, 4]),
    "Qwen3 layer, five taps": Eagle3(head_norms=True, taps=[1, 2, 3, 4, 5]),
    "two layers, own parts": Eagle3(layers=2, own_embedding=True, own_head=True, draft_vocab=90),
    "narrower": Eagle3(width=32, own_embedding=True, own_head=True, draft_vocab=90, rope_factors=True),
    "linear scaling": Eagle3(metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
}
BLOCKS = {
    "DFlash": Block(),
    "DFlash, one layer, cut head": Block(layers=1, own_head=True, draft_vocab=90),
    "causal": Block(causal=True),
    "DSpark": dspark(),
    "DSpark, own parts": dspark(own_embedding=True, own_head=True, draft_vocab=90),
    "DSpark without anchor": dspark(from_anchor=False),
}


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(5)


def target_parts(random: np.random.Generator) -> dict[str, Array]:
    return {name: random.standard_normal((300, 64)) for name in ("embedding", "head")}


@pytest.mark.parametrize("draft", EAGLE3.values(), ids=EAGLE3)
def test_rows_of_eagle3_depend_on_their_ancestors_only(
    draft: Eagle3, tmp_path: Path, random: np.random.Generator
) -> None:
    twin = Eagle3Twin.of(write_eagle3(tmp_path / "draft.gguf", draft), **target_parts(random))
    features = random.standard_normal((6, len(draft.taps) * 64))
    tokens = [5, 7, 299, 0, 7, 11]
    logits, fed = twin.commit(features, tokens)
    assert logits.shape == (6, draft.num_rows)
    assert fed.shape == (6, draft.width)

    # The same rows one by one, then a tree below the last one, whose paths equal chains.
    twin.clear()
    alone = [twin.commit(features[i : i + 1], tokens[i : i + 1]) for i in range(6)]
    np.testing.assert_allclose(np.concatenate([each[0] for each in alone]), logits, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([each[1] for each in alone]), fed, atol=1e-12)
    tree, read = twin.add(fed[[5, 5]], [20, 21], [5, 5])
    deeper, _ = twin.add(read[[1, 0]], [30, 31], [7, 6])
    for first, second, place in ((20, 31, 1), (21, 30, 0)):
        twin.crop(6)
        logits, y = twin.add(fed[[5]], [first])
        np.testing.assert_allclose(logits[0], tree[first - 20], atol=1e-12)
        np.testing.assert_allclose(twin.add(y, [second])[0][0], deeper[place], atol=1e-12)


@pytest.mark.parametrize("draft", BLOCKS.values(), ids=BLOCKS)
def test_contexts_of_blocks_grow_by_pieces(draft: Block, tmp_path: Path, random: np.random.Generator) -> None:
    path = write_dflash(tmp_path / "draft.gguf", draft)
    parts = target_parts(random)
    whole, pieces = BlockTwin.of(path, **parts), BlockTwin.of(path, **parts)
    features = random.standard_normal((7, 128))
    whole.commit(features)
    for start, stop in ((0, 1), (1, 5), (5, 7)):
        pieces.commit(features[start:stop])
        pieces.block(3)  # leaves nothing behind
    logits, _ = whole.block(9)
    assert logits.shape == (4, draft.num_rows)
    np.testing.assert_allclose(pieces.block(9)[0], logits, atol=1e-12)
    shorter, _ = whole.block(9, 2)
    assert np.allclose(shorter[0], logits[0]) == draft.causal
    if draft.markov_rank:
        assert whole.correction(3).shape == (draft.num_rows,)


def test_both_twins_compute_layers_alike(tmp_path: Path, random: np.random.Generator) -> None:
    """A block of one place is an ordinary layer; so is EAGLE-3's, with the embedding's half of its matrices at 0."""
    parts = target_parts(random)
    block = Block(layers=1, block=1, taps=[1])
    made = block_tensors(block)
    plain = Eagle3(head_norms=True, taps=[1])
    changed: dict[str, Array | None] = {name: made.get(name) for name in eagle3_tensors(plain) if name in made}
    for name in ("q", "k", "v"):
        matrix = changed[f"blk.0.attn_{name}.weight"]
        assert matrix is not None
        changed[f"blk.0.attn_{name}.weight"] = np.concatenate([0 * matrix, matrix], 1)
    changed["blk.0.attn_norm_2.weight"] = made["blk.0.attn_norm.weight"]
    contents = Contents.of(write_eagle3(tmp_path / "eagle3.gguf", plain, changed))
    eagle3 = Eagle3Twin(contents, **parts, adjacent=False)
    twin = BlockTwin.of(write_dflash(tmp_path / "dflash.gguf", block), **parts)
    np.testing.assert_allclose(eagle3.add(parts["embedding"][[8]], [3])[0], twin.block(8)[0], atol=1e-9)


def test_pairs_of_rotated_numbers_are_adjacent_or_halves(tmp_path: Path, random: np.random.Generator) -> None:
    draft = Eagle3(head_norms=True)
    parts = target_parts(random)
    contents = Contents.of(write_eagle3(tmp_path / "draft.gguf", draft))
    halves = replace(contents, tensors=dict(contents.tensors))
    order = np.arange(16).reshape(8, 2).T.reshape(-1)
    for part, heads in (("q", 4), ("k", 2)):
        name = f"blk.0.attn_{part}.weight"
        halves.tensors[name] = contents.tensors[name].reshape(heads, 16, -1)[:, order].reshape(heads * 16, -1)
        name = f"blk.0.attn_{part}_norm.weight"
        halves.tensors[name] = contents.tensors[name][order]
    features = random.standard_normal((5, 128))
    adjacent, other = Eagle3Twin(contents, **parts), Eagle3Twin(halves, **parts, adjacent=False)
    np.testing.assert_allclose(
        adjacent.commit(features, [1, 2, 3, 4, 5])[0], other.commit(features, [1, 2, 3, 4, 5])[0], atol=1e-12
    )
