"""Pairs of which the draft is right: the target's next token depends on the last one alone, and the draft knows how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from support.assistants import Assistant
from support.families import CASES
from support.feature_drafts import Block, Eagle3, write_draft
from support.random_models import Floats, RandomModel, write

KINDS = ("eagle", "dspark", "dflash")
TARGET = RandomModel("llama", layers=3, head_dim=32, tie=False, context=1024)
GEMMA4 = replace(CASES["gemma4-keys-are-values"], context=1024)


def write_right(folder: Path, kind: str) -> tuple[Path, Path]:
    """Write a target and a draft of one of KINDS, "mtp" for a target with an MTP layer, or "assistant" for Gemma 4 with
    one; returns their paths.

    Guesses of a block, of an MTP layer and of an assistant are right in every place. Those of EAGLE-3 nearly always are
    in the first place only, because its rows know the token before the one that they stand for.
    """
    weights: dict[str, Floats] = {}

    def keep(tensors: dict[str, Floats]) -> None:
        for name, values in tensors.items():
            if "attn_output" in name or "ffn_down" in name:
                values[:] = 0
        if kind == "mtp":  # it knows the token that a row stands for, as the target does
            width = TARGET.width
            tensors["blk.3.nextn.eh_proj.weight"] = np.eye(width, 2 * width, dtype=np.float32)
            tensors["blk.3.nextn.enorm.weight"][:] = 1
            del tensors["blk.3.nextn.shared_head_norm.weight"]
        weights.update(tensors)

    if kind == "assistant":
        target = write(folder / "target.gguf", GEMMA4, keep)
        changed = {name: weights[name] for name in ("token_embd.weight", "output_norm.weight")}
        changed["nextn.pre_projection.weight"] = np.eye(64, 128, dtype=np.float32)  # the token's embedding alone
        draft = Assistant(GEMMA4, width=GEMMA4.width)
        tensors = draft.tensors()
        keep(tensors)
        return target, write_draft(folder / "draft.gguf", draft, tensors | changed)
    target = write(folder / "target.gguf", replace(TARGET, ahead=int(kind == "mtp")), keep)
    if kind == "mtp":
        return target, target
    embedding, norm, head = (weights[f"{name}.weight"] for name in ("token_embd", "output_norm", "output"))
    following = (_normed(embedding) * norm @ head.T).argmax(-1)
    silent: dict[str, Floats] = {}
    for layer in range(2):
        silent[f"blk.{layer}.attn_output.weight"] = np.zeros((64, 64), np.float32)
        silent[f"blk.{layer}.ffn_down.weight"] = np.zeros((64, 96), np.float32)
    if kind == "eagle":
        # The head knows the next token but one of the token whose hidden states a row reads.
        found = np.zeros_like(embedding)
        np.add.at(found, following[following], _normed(embedding))
        ones = np.ones(64, np.float32)
        changed = {"fc.weight": np.diag(ones), "output.weight": found, "output_norm.weight": ones}
        changed |= {name: values for name, values in silent.items() if name.startswith("blk.0")}
        return target, write_draft(folder / "draft.gguf", Eagle3(taps=[1], own_head=True, seed=1), changed)
    # The Markov head is the target.
    changed = {
        "output.weight": np.zeros_like(embedding),
        "markov_w1.weight": _normed(embedding) * norm,
        "markov_w2.weight": head,
    }
    draft = Block(block=6, from_anchor=kind == "dspark", markov_rank=64, own_head=True)
    return target, write_draft(folder / "draft.gguf", draft, changed | silent)


def _normed(x: Floats) -> Floats:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), np.float32)
