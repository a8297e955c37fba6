"""Costs of a mixture's passes by distinct experts, and trees that are grown by them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pystaged.decoding.cost import ExpertCost
from pystaged.decoding.policy import GainPolicy, Growth
from pystaged.decoding.tree import Stage, TreeBuilder

SECONDS = {1: 1.0, 2: 1.4, 4: 2.0, 8: 3.0, 32: 5.0}
UNIONS = {1: 100, 2: 170, 4: 270, 8: 390, 32: 600}


def cost(price: float = 0.004) -> ExpertCost:
    return ExpertCost(SECONDS, None, UNIONS, price)


def used(*experts: int) -> np.ndarray:
    """Bits of a row, as in Session.experts."""
    return np.packbits(np.isin(np.arange(200), experts), bitorder="little")


def tree(*guesses: tuple[int, int, float], stage: Stage = Stage.NGRAM) -> tuple[TreeBuilder, list[int]]:
    """A tree of (parent, token, score) after token 0, and its ranked guesses."""
    builder = TreeBuilder(0)
    nodes = [builder.add(parent, token, score, stage, (1, 0, 0)) for parent, token, score in guesses]
    return builder, sorted(nodes, key=lambda node: -builder.nodes[node].score)


def test_experts_beyond_the_usual_number_add_their_price() -> None:
    found = cost()
    assert found.union(3) == 220
    assert found(3) == found(3, 0, 220) == 1.7
    assert found(3, 0, 230) == pytest.approx(1.74)
    assert found(3, 0, 120) == pytest.approx(1.3)
    assert found(1, 0, 0) > 0


def test_costs_are_learnt_by_rows_and_experts() -> None:
    """From passes of rows that overlap more than was measured, on a machine where experts cost five times as much."""
    rng, found = random.Random(0), cost(0.001)
    usual = {1: 100, 2: 150, 3: 190, 4: 225, 6: 290, 8: 340}

    def seconds(rows: int, experts: float) -> float:
        return 0.3 + 0.15 * rows + 0.005 * experts

    for _ in range(4000):
        rows = rng.choice(list(usual))
        experts = round(usual[rows] * rng.uniform(0.8, 1.2)) if rows > 1 else 100
        found.observe(rows, 0, seconds(rows, experts) * rng.uniform(0.95, 1.05), 1.0, experts)
    assert found.price == pytest.approx(0.005, rel=0.15)
    for rows, experts in usual.items():
        assert found.union(rows) == pytest.approx(experts, rel=0.06)
        assert found(rows) == pytest.approx(seconds(rows, experts), rel=0.06)
        assert found(rows, 0, 0.9 * experts) == pytest.approx(seconds(rows, 0.9 * experts), rel=0.06)


def test_passes_with_prompts_teach_no_experts() -> None:
    found = cost()
    found.observe(100, 0, found(100), 0.3, 700)
    assert found.unions == UNIONS
    assert found.price == pytest.approx(0.004)


def test_a_pass_of_many_experts_is_not_taken_for_one_of_no_time() -> None:
    """By a coarse clock; what its experts beyond the usual number should have cost is more than all of its time."""
    found = ExpertCost(SECONDS, None, UNIONS, 0.004, {**dict.fromkeys(SECONDS, 3.0), 32: 0.0})
    usual = found(32)
    found.observe(32, 0, 0.1, 1.0, 700)
    assert found(32) == pytest.approx(0.25 * usual, rel=0.1)


def test_of_equal_guesses_those_whose_experts_are_there_come_first() -> None:
    found = cost()
    found.learn([0, 1, 2], np.stack([used(*range(100)), used(*range(90, 190)), used(*range(2, 102))]))
    builder, ranked = tree((0, 1, 0.5), (0, 2, 0.5), (0, 3, 0.5))
    order, experts = found.order(builder.nodes, ranked, 0, 31)
    # 2 new experts, unknown, and 90 before which the others' are counted; half of each is the usual number.
    assert [builder.nodes[node].token for node in order[:2]] == [2, 3]
    assert experts[:2] == [100, 100 + (70 + 2) / 2]
    assert len(order) == 3
    assert len(experts) == 4


def test_likelier_guesses_come_first_unless_their_experts_cost_more() -> None:
    found = cost()
    found.learn([0, 1, 2], np.stack([used(*range(100)), used(*range(100, 200)), used(*range(100))]))
    for score, first in ((0.9, 1), (0.55, 2)):
        builder, ranked = tree((0, 1, score), (0, 2, 0.5))
        order, _ = found.order(builder.nodes, ranked, 0, 31)
        assert builder.nodes[order[0]].token == first


def test_parents_and_forced_tokens_come_first() -> None:
    rng, found = random.Random(1), cost()
    for token in range(40):
        found.learn([token], used(*rng.sample(range(200), 100))[None])
    builder, _ = tree((0, 50, 1.0), (1, 51, 1.0), stage=Stage.GRAMMAR)
    for token in range(40):
        parent = rng.randrange(2, len(builder.nodes)) if token else 2
        builder.add(parent, token, builder.nodes[parent].score * rng.uniform(0.5, 1), Stage.NGRAM, (1, 0, 0))
    ranked = sorted(range(1, len(builder.nodes)), key=lambda node: -builder.nodes[node].score)
    order, experts = found.order(builder.nodes, ranked, 0, 31)
    assert order[:2] == [1, 2]
    assert len(set(order)) == len(order) <= 31
    assert len(experts) == len(order) + 1
    placed = {0}
    for node in order:
        assert builder.nodes[node].parent in placed
        placed.add(node)
    assert len(builder.build(order)) == len(order) + 1


def test_rows_that_cost_more_than_any_gain_are_left_out() -> None:
    builder, ranked = tree((0, 1, 0.13), (0, 2, 0.09))
    assert cost().order(builder.nodes, ranked, 0, 31)[0] == [1]  # without new experts a row costs 0.12, the next 0.1
    assert ExpertCost(SECONDS, None, UNIONS, 0.0).order(builder.nodes, ranked, 0, 31)[0] == []


def test_a_wide_tree_is_found_behind_sizes_that_do_not_pay() -> None:
    """Costs are concave: every size is compared, by the experts that it is predicted to use."""
    policy = GainPolicy(cost(0.002))
    scores = [0.3] * 31
    assert policy.keep(Growth(scores[:4], [], 1, 0.0)) == 0
    assert policy.keep(Growth(scores, [], 1, 0.0)) == 31
    few = [100.0 + 10 * n for n in range(32)]  # more than usual are shared
    assert policy.keep(Growth([0.35, 0.2], [], 1, 0.0, experts=few)) == 1
    assert policy.keep(Growth([0.2], [], 1, 0.0, experts=few)) == 0


def test_what_tokens_used_is_kept_of_the_latest() -> None:
    found = cost()
    for first in range(0, 9000, 1000):
        found.learn(range(first, first + 1000), np.zeros((1000, 25), np.uint8))
    assert list(found._masks) == list(range(9000 - 4096, 9000))
