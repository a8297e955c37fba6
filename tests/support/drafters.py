"""Drafters that differ as much as possible, and what a context writes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Model, Session
from pystaged.bench.pairs import reckoned
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.policy import FixedPolicy, GainPolicy, TreePolicy
from pystaged.decoding.stepper import generate
from pystaged.decoding.text import Text
from pystaged.drafting.calibration import CONTEXT
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import lookups
from pystaged.drafting.model import ModelProposer, ParallelModelProposer
from pystaged.drafting.proposer import GrowingTree, Proposal, Proposer
from pystaged.drafting.table import NgramTable
from pystaged.options.config import GenerationConfig, SamplingConfig


class _LyingProposer(Proposer):
    """Proposes random tokens, which must not affect the output."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._random = vocab_size, np.random.default_rng(0)

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> list[Proposal]:
        found = self._random.integers(self._vocab_size, size=(len(nodes), tree.num_candidates)).tolist()
        return [Proposal(dict.fromkeys(tokens, 1 / len(tokens)), CONTEXT[1]) for tokens in found]


class LyingDrafter(TreeDrafter):
    """Drafts trees of twelve random tokens."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__([_LyingProposer(vocab_size)], FixedPolicy(width=3, depth=4, budget=12), vocab_size)


def drafters(
    target: Model, draft: Model | None, table: NgramTable | None, substitutes: Mapping[int, int] | None = None
) -> dict[str, Drafter]:
    """Drafters that differ as much as possible; the output must be the same with all.

    Args:
        draft: None for n-grams alone.
        table: of n-grams.
        substitutes: see ModelProposer.
    """
    vocab_size = target.vocab_size
    tree, chain = FixedPolicy(width=4, depth=6, budget=12), FixedPolicy(width=1, depth=6, budget=6, children=1)
    wide = FixedPolicy(width=8, depth=2, budget=31, children=8)

    def drafter(policy: TreePolicy, *proposers: Proposer) -> TreeDrafter:
        return TreeDrafter(proposers, policy, vocab_size)

    ways: dict[str, Drafter] = {
        "n-grams alone": drafter(tree, *lookups(table)),
        "n-grams of the context alone": drafter(tree, *lookups()),
        "lying": LyingDrafter(vocab_size),
    }
    if draft:
        target_cost, cost = reckoned(10)

        def model(cost: PassCost | None = None) -> ModelProposer:
            return ModelProposer(Session(draft), cost, substitutes)

        parallel = ParallelModelProposer(Session(draft), draft.vocab_size - 1, substitutes=substitutes)
        ways |= {
            "tree": drafter(tree, model()),
            "chain": drafter(chain, model()),
            "wide tree": drafter(wide, model()),
            "parallel tree": drafter(tree, parallel),
            "chain with n-grams": drafter(chain, *lookups(table), model(cost)),
            "tree with n-grams": drafter(tree, *lookups(table), model(cost)),
            "one tree": drafter(GainPolicy(target_cost), *lookups(table), model(cost)),
        }
    return ways


def continuation(context: Context, prompt: NDArray[np.int32], sampling: SamplingConfig, max_tokens: int) -> list[int]:
    """The tokens that a context generates after a prompt, continuing past the end of text."""
    text = Text(prompt.tolist(), prompt, GenerationConfig(sampling=sampling, max_tokens=max_tokens))
    return [token for piece in generate(context, text) for token in piece.tokens]
