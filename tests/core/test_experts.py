"""Mixtures of experts: the same bits whatever a row's neighbours choose, and what they cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.random_models import RandomModel, write

from pystaged._core import Model, ModelError, Session, Work, run

TOKENS = np.random.default_rng(3).integers(0, 257, 60).tolist()


@pytest.fixture(scope="module", params=["Q8_0", "F32"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = RandomModel("qwen3moe", experts=(64, 8, 32, 0), quantization=request.param, tie=False)
    return write(tmp_path_factory.mktemp("experts") / "model.gguf", model)


def last_logits(session: Session) -> npt.NDArray[np.float32]:
    session.evaluate(TOKENS[-1:], [-1])
    return session.logits(0)


def test_prompts_cut_anywhere(path: Path) -> None:
    model = Model(path)
    whole = Session(model)
    whole.prefill(TOKENS[:-1])
    expected = last_logits(whole)
    for cut in range(1, len(TOKENS) - 1):
        session = Session(model)
        session.prefill(TOKENS[:cut])
        session.prefill(TOKENS[cut:-1])
        assert (last_logits(session) == expected).all()


def test_texts_that_share_passes(path: Path) -> None:
    model = Model(path)
    texts = [TOKENS[:-1], TOKENS[20:-1], TOKENS[5:-1]]
    alone, together = ([Session(model) for _ in texts] for _ in range(2))
    for session, text in zip(alone, texts, strict=True):
        session.prefill(text)
    for first in range(0, len(TOKENS), 7):
        pieces = [(session, text[first : first + 7]) for session, text in zip(together, texts, strict=True)]
        run([Work.read(session, piece) for session, piece in pieces if piece])
    for one, other in zip(alone, together, strict=True):
        assert (last_logits(one) == last_logits(other)).all()


def test_weights_of_a_pass(tmp_path: Path) -> None:
    """Those of a row's experts alone."""
    shape = {"family": "qwen3moe", "quantization": "F32", "tie": False}
    used, more, all_used = (
        Model(write(tmp_path / f"{i}.gguf", RandomModel(**shape, experts=experts)))
        for i, experts in enumerate([(8, 2, 32, 0), (8, 4, 32, 0), (4, 4, 32, 0)])
    )
    expert = 3 * 64 * 32  # weights
    assert more.num_weights - used.num_weights == 2 * 2 * expert
    assert more.weight_bytes - used.weight_bytes == 2 * 2 * expert * 4
    router = 2 * 4 * 64
    assert more.num_weights - all_used.num_weights == router
    assert more.matrix_bytes == all_used.matrix_bytes + 2 * 4 * expert * 4


def test_experts_need_our_kernels(path: Path) -> None:
    with pytest.raises(ModelError, match="has experts, which run on the CPU's own kernels alone"):
        Model(path, device="ggml-cpu")
