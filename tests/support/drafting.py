"""Drafters that differ as much as possible, under all of which a text must be the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Model, Session
from pystaged.config import SamplingConfig
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.loop import Decoder
from pystaged.decoding.policy import FixedPolicy
from pystaged.decoding.requests import Requests
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import lookups
from pystaged.drafting.mixing import CONTEXT
from pystaged.drafting.model import ModelProposer
from pystaged.drafting.pard import ParallelModelProposer
from pystaged.drafting.proposer import GrowingTree, Proposal, Proposer
from pystaged.drafting.table import NgramTable
from pystaged.drafting.third_stage import GuidedModelProposer


class _LyingProposer(Proposer):
    """Proposes random tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._random = vocab_size, np.random.default_rng(0)

    def propose(self, tree: GrowingTree, nodes: Sequence[int]) -> Requests[list[Proposal]]:
        yield from ()
        found = self._random.integers(self._vocab_size, size=(len(nodes), tree.num_candidates)).tolist()
        return [Proposal(dict.fromkeys(tokens, 1 / len(tokens)), CONTEXT[1]) for tokens in found]


class LyingDrafter(TreeDrafter):
    """Drafts trees of twelve random tokens."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__([_LyingProposer(vocab_size)], FixedPolicy(width=3, depth=4, budget=12), vocab_size)


def drafters(
    target: Model, draft: Model | None, table: NgramTable | None, substitutes: Mapping[int, int] | None = None
) -> dict[str, Drafter]:
    """Drafters by name; without a draft those of n-grams alone. substitutes: see ModelProposer."""
    size = target.vocab_size
    tree, chain = FixedPolicy(width=4, depth=6, budget=12), FixedPolicy(width=1, depth=6, budget=6, children=1)
    wide = FixedPolicy(width=8, depth=2, budget=31, children=8)
    ways: dict[str, Drafter] = {
        "n-grams alone": TreeDrafter(lookups(table), tree, size),
        "n-grams of the context alone": TreeDrafter(lookups(), tree, size),
        "lying": LyingDrafter(size),
    }
    if draft:
        for name, policy in {"tree": tree, "chain": chain, "wide tree": wide}.items():
            ways[name] = TreeDrafter([ModelProposer(Session(draft), substitutes=substitutes)], policy, size)
        parallel = ParallelModelProposer(Session(draft), draft.vocab_size - 1, substitutes=substitutes)
        ways["parallel tree"] = TreeDrafter([parallel], tree, size)
        for name, policy in {"chain over n-grams": chain, "tree over n-grams": tree}.items():
            guided = GuidedModelProposer(Session(draft), lookups(table), substitutes=substitutes)
            ways[name] = TreeDrafter([guided], policy, size)
    return ways


def continuation(decoder: Decoder, prompt: NDArray[np.int32], sampling: SamplingConfig, max_tokens: int) -> list[int]:
    """The tokens that a decoder generates after a prompt, also after the end of text."""
    return [token for step in decoder.generate(prompt, sampling, max_tokens) for token in step.tokens]
