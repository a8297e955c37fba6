"""Load a draft that reads its target's hidden states: EAGLE-3, DFlash or DSpark."""

from __future__ import annotations

import os
from pathlib import Path

from pystaged._core import Model


def load_features(path: Path, target: Model) -> Model:
    """Load such a draft; from then on its target keeps the hidden states that it reads.

    Raises:
        ModelError: the file is damaged, or the draft was made for another target.
        ValueError: the target is not on the CPU.
    """
    if target.devices:
        raise ValueError(
            f"{path} is a draft that reads hidden states, which needs this package's kernels; choose the device cpu"
        )
    draft = Model(os.fsencode(path), target.kernel, target.num_threads, kv=target.kv, lender=target)
    target.tap(draft.target_layers, all_rows=True)
    return draft
