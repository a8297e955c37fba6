"""The device on which the portable path is tested: $PYSTAGED_TEST_DEVICE, by default ggml's CPU backend."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pystaged._core import Session
from pystaged.options.config import SamplingConfig
from support.steps import evaluate, prefill, rank

DEVICE = os.environ.get("PYSTAGED_TEST_DEVICE", "ggml-cpu")
GPU_LAYERS = 0 if DEVICE == "ggml-cpu" else 99  # of llama.cpp


def gap_alone(
    session: Session, prompt: npt.NDArray[np.int32], tokens: Sequence[int], sampling: SamplingConfig
) -> float:
    """Difference of the two best scores where a pass over one row first chooses another token; 0 if none does."""
    session.rewind(0)
    prefill(session, prompt[:-1])
    for root, token in zip([prompt[-1], *tokens], tokens, strict=False):
        evaluate(session, [int(root)], [-1])
        if session.follow(sampling.native)[1][0] != token:
            _, scores = rank(session, [0], 2, sampling.native)
            session.discard()
            return float(scores[0, 0] - scores[0, 1])
        session.commit([0])
    return 0.0
