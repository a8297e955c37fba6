"""Mixtures of experts: the same bits whatever a row's neighbours choose, and what they cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.decoding import Text, generate, step
from support.random_models import RandomModel, write

from pystaged._core import Model, RecycledCandidates, Session
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import GainPolicy
from pystaged.decoding.requests import Clocks
from pystaged.decoding.stepper import Stepper
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import lookups
from pystaged.options.config import SamplingConfig

TOKENS = np.random.default_rng(3).integers(0, 257, 60).tolist()


@pytest.fixture(scope="module", params=["Q8_0", "F32"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = RandomModel("qwen3moe", experts=(64, 8, 32, 0), quantization=request.param, tie=False)
    return write(tmp_path_factory.mktemp("experts") / "model.gguf", model)


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


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=0.4, seed=3)], ids=["greedy", "warm"]
)
def test_trees_change_no_token(path: Path, sampling: SamplingConfig) -> None:
    model, clocks = Model(path), Clocks(lambda: 0.0, lambda: 0.0)  # nothing takes any time
    prompts = [np.array(tokens, np.int32) for tokens in (TOKENS[:7] * 4, TOKENS, TOKENS[30:40] * 2)]
    plain = Context(Session(model))
    expected = [[t for step in generate(plain, prompt, sampling, 30) for t in step.tokens] for prompt in prompts]
    cost = PassCost({1: 1.0, 2: 1.3, 32: 3.0})
    recycled, texts, guesses = RecycledCandidates(), [], 0
    for prompt, written in zip(prompts, expected, strict=True):
        drafter = TreeDrafter(lookups(None, recycled), GainPolicy(cost), 257)
        decoder = Context(Session(model), drafter, cost=cost, clocks=clocks)
        for _ in range(2):  # then with what was learnt
            steps = list(generate(decoder, prompt, sampling, 30))
            assert [token for step in steps for token in step.tokens] == written
            guesses += sum(len(step.tree) - 1 for step in steps)
        texts.append(Text(decoder, prompt, sampling, 30))
    stepper = Stepper(cost, clocks=clocks)
    while not all(text.is_over for text in texts):
        step(stepper, texts)
    assert [text.error for text in texts] == [None] * 3
    assert [text.tokens for text in texts] == expected
    assert guesses + sum(len(each.tree) - 1 for text in texts for each in text.steps) > 20
