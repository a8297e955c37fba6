"""Draft heads, for a small target."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from support.draft_heads import RandomHead
from support.draft_heads import write as write_head
from support.gguf_parts import Gguf as Parts
from support.random_models import RandomModel, write

from fuzz.gguf import Gguf
from fuzz.target import Target
from pystaged import _core
from pystaged.loading.heads import load_head

TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q5_1")


class Head(Gguf):
    """A head's steps, where the file is not refused."""

    def __init__(self, folder: Path) -> None:
        Target.__init__(self, folder)
        self._path, target = folder / "damaged.gguf", write(folder / "target.gguf", RandomModel("llama", layers=3))
        self._target, self._tokenizer = _core.Model(os.fsencode(target)), _core.Tokenizer(os.fsencode(target))
        tokens = list(range(0, 300, 3))
        heads = {
            kind: RandomHead(
                self._tokenizer.fingerprint, tokens, width=64 if i % 2 else 32, target_layers=3, quantization=kind
            )
            for i, kind in enumerate(TYPES)
        }
        self._bases = {kind: write_head(self._path, head).read_bytes() for kind, head in heads.items()}
        self._parts = {kind: Parts(data) for kind, data in self._bases.items()}

    def _use(self, data: bytes, is_device: bool) -> None:
        del is_device
        self._path.write_bytes(data)
        head = load_head(self._path, self._target, self._tokenizer)
        session = _core.Session(self._target)
        session.verify([5], [-1], _core.Sampling())
        before = np.tile(head.begin(self._target, session.states[-1]), (3, 1))
        states, tokens, _ = head.step(self._target, before, [0, 7, 299], min(4, len(head.tokens)))
        if states.shape != before.shape or not (tokens.min() >= 0 and tokens.max() < 300):
            raise AssertionError(f"a step gave states {states.shape} and tokens {tokens}")
