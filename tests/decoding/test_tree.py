"""Trees: parents before children, distinct siblings, best nodes closed under ancestors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pystaged.decoding.tree import Stage, TreeBuilder

CELL = (1, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.floats(0.05, 1.0)), max_size=40), st.data())
def test_any_number_of_best_nodes_is_a_tree(guesses: list[tuple[int, int, float]], data: st.DataObject) -> None:
    builder = TreeBuilder(7)
    for guess, token, rate in guesses:
        parent = guess % len(builder.nodes)
        builder.add(parent, token, builder.nodes[parent].score * rate, Stage.DRAFT, CELL)
    best = sorted(range(1, len(builder.nodes)), key=lambda node: -builder.nodes[node].score)
    kept = best[: data.draw(st.integers(0, len(builder.nodes)))]
    tree = builder.build(kept)
    parents = tree.parents.tolist()
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
    children = list(zip(parents, tree.tokens.tolist(), strict=True))
    assert len(set(children)) == len(children)
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens[1:].tolist(), parents[1:], strict=True):
        paths.append([*paths[parent], token])
    assert paths[1:] == [builder.path(node) for node in kept]


def test_a_token_proposed_twice_is_one_node_with_the_higher_score() -> None:
    builder = TreeBuilder(0)
    first = builder.add(0, 5, 0.2, Stage.DRAFT, CELL)
    assert builder.add(0, 5, 0.6, Stage.NGRAM, CELL) == first
    assert builder.nodes[first].score == 0.6
    assert len(builder.nodes) == 2


def test_a_certain_child_of_a_raised_node_stays_behind_it() -> None:
    builder = TreeBuilder(0)
    parent = builder.add(0, 5, 0.3, Stage.DRAFT, CELL)
    child = builder.add(parent, 6, 0.3, Stage.NGRAM, CELL)
    for score in (0.1, 0.7, 0.3, 0.9, 0.21, 0.57):
        builder.add(0, 5, score, Stage.DRAFT, CELL)
        assert builder.nodes[child].score <= builder.nodes[parent].score == score
