"""Mixtures of experts: the same bits whatever a row's neighbours choose, and what they cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.decoding import Text, generate, step
from support.family_reference import FamilyReference
from support.random_models import RandomModel, write
from support.steps import evaluate, prefill, verify

from pystaged._core import Model, RecycledCandidates, Session, Work, run
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


def sets(session: Session, count: int, layers: int) -> list[list[set[int]]]:
    """The experts of each row, by layer."""
    bits = np.unpackbits(session.experts[0], axis=1, bitorder="little")[:, : layers * count]
    return [[set(np.nonzero(layer)[0].tolist()) for layer in row.reshape(layers, count)] for row in bits]


@pytest.mark.parametrize("family", ["qwen3moe", "glm4moe"])
def test_experts_of_rows(tmp_path: Path, family: str) -> None:
    """Those of a reference; rows of a tree use those of their own paths."""
    dense = int(family == "glm4moe")
    path = write(tmp_path / "model.gguf", RandomModel(family, experts=(12, 3, 32, 0), tie=False, dense=dense))
    layers, model, reference = 2 - dense, Model(path), FamilyReference(path)
    assert model.experts_per_row == 3 * layers
    reference.logits(TOKENS[:9])
    expected = [[set(layer[row].tolist()) for layer in reference.chosen] for row in range(9)]
    session = Session(model)
    prefill(session, TOKENS[:5])
    found = sets(session, 12, layers)
    assert [row[:-1] for row in found] == [row[:-1] for row in expected[:5]]
    assert not any(row[-1] for row in found)  # whose results nobody reads
    tree = [TOKENS[5], TOKENS[6], 7, TOKENS[7], TOKENS[8], 9]
    evaluate(session, tree, [-1, 0, 0, 1, 3, 2])
    found = sets(session, 12, layers)
    assert [found[i] for i in (0, 1, 3, 4)] == expected[5:9]
    assert session.experts[1] == sum(len(set.union(*(row[i] for row in found))) for i in range(layers))
    session.discard()
    evaluate(session, tree[:1], [-1], num_logits=0)
    session.discard()
    for token, parents in ((7, [-1, 0]), (TOKENS[6], [-1, 0])):
        verify(session, [tree[0], token], parents, SamplingConfig().native)
        assert len(sets(session, 12, layers)) == 2
        session.rewind(5)


def test_experts_of_a_pass_of_several_texts(path: Path) -> None:
    model = Model(path)
    sessions = [Session(model) for _ in range(3)]
    run([Work.read(session, TOKENS[i : i + 9]) for i, session in enumerate(sessions)])
    greedy = SamplingConfig().native
    run([Work.verify(session, TOKENS[i : i + 2], [-1, 0], greedy) for i, session in enumerate(sessions)])
    rows = np.concatenate([session.experts[0] for session in sessions])
    assert rows.shape == (6, 2 * 64 // 8)
    distinct = int(np.unpackbits(np.bitwise_or.reduce(rows)).sum())
    assert {session.experts[1] for session in sessions} == {distinct}
    dense = Session(Model(write(path.with_name("dense.gguf"), RandomModel("llama"))))
    prefill(dense, TOKENS)
    assert dense.experts[0].size == dense.experts[1] == 0


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
