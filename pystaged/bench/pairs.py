"""Generate over a set of prompts: does the output equal plain decoding's with any drafter, and what does each gain?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Model, RecycledCandidates, Session
from pystaged.bench.suite import SAMPLINGS
from pystaged.config import SamplingConfig
from pystaged.decoding.decoder import Decoder
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.policy import FixedPolicy, TreePolicy
from pystaged.decoding.requests import Requests
from pystaged.decoding.tree import TokenTree
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.features import feature_proposer
from pystaged.drafting.head import HeadProposer
from pystaged.drafting.lookups import lookups
from pystaged.drafting.mixing import CONTEXT
from pystaged.drafting.model import ModelProposer
from pystaged.drafting.pard import ParallelModelProposer, draft_proposer
from pystaged.drafting.proposer import GrowingTree, Proposal, Proposer
from pystaged.drafting.table import NgramTable
from pystaged.drafting.third_stage import GuidedModelProposer
from pystaged.loading.bundle import Bundle
from pystaged.stats import GenerationStats

MODES = SAMPLINGS | {"T=0.8 top-p 0.95": SamplingConfig(temperature=0.8, top_p=0.95)}


class _LyingProposer(Proposer):
    """Proposes random tokens, which must not affect the output."""

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


class UnsharedDrafter(TreeDrafter):
    """Ranks by probability alone, ignoring the noise that the target samples with; the comparison for shared noise."""

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        del sampling
        return super().draft(SamplingConfig(), max_depth, seconds)


def parts(bundle: Bundle, session: Session, budget: int) -> Mapping[str, Drafter]:
    """Drafters with trees of `budget` nodes: with a draft model, then without one of its parts; or of n-grams, then
    with one more source each. Each drafter has its own recycled candidates, empty at first.

    Args:
        session: the target's, which all decoders step.
    """
    return _of_model(bundle, bundle.draft, budget) if bundle.draft else _of_ngrams(bundle, session, budget)


def _of_model(bundle: Bundle, draft: Model, budget: int) -> dict[str, TreeDrafter]:
    tree, vocab_size = FixedPolicy(width=4, depth=8, budget=budget), bundle.target.vocab_size
    shared, unshared = (
        draft_proposer(Session(draft), bundle.draft_mask, substitutes=bundle.substitutes) for _ in range(2)
    )
    guided = GuidedModelProposer(Session(draft), lookups(bundle.table), substitutes=bundle.substitutes)
    return {
        "shared noise": TreeDrafter([shared], tree, vocab_size),
        "n-grams below": TreeDrafter([guided], tree, vocab_size),
        "without shared noise": UnsharedDrafter([unshared], tree, vocab_size),
    }


def _of_ngrams(bundle: Bundle, session: Session, budget: int) -> dict[str, TreeDrafter]:
    table = bundle.table
    ways: dict[str, list[Proposer]] = {"n-grams of the text": [*lookups()]}
    if table:
        ways["and of a table"] = [*lookups(table)]
    ways["and recycled candidates"] = [*lookups(table, RecycledCandidates())]
    if bundle.head:
        head = HeadProposer(bundle.head, bundle.target, session)
        ways["and the draft head"] = [*lookups(table, RecycledCandidates()), head]
    if bundle.features:
        proposer = feature_proposer(Session(bundle.features, target=session), bundle.features, session)
        ways["and the draft"] = [*lookups(table, RecycledCandidates()), proposer]
    tree = FixedPolicy(width=1, depth=budget, budget=budget)
    return {name: TreeDrafter(proposers, tree, bundle.target.vocab_size) for name, proposers in ways.items()}


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

    def model(policy: TreePolicy) -> TreeDrafter:
        assert draft is not None
        return TreeDrafter([ModelProposer(Session(draft), substitutes=substitutes)], policy, vocab_size)

    def parallel(policy: TreePolicy) -> TreeDrafter:
        assert draft is not None
        proposer = ParallelModelProposer(Session(draft), draft.vocab_size - 1, substitutes=substitutes)
        return TreeDrafter([proposer], policy, vocab_size)

    def guided(policy: TreePolicy) -> TreeDrafter:
        assert draft is not None
        proposer = GuidedModelProposer(Session(draft), lookups(table), substitutes=substitutes)
        return TreeDrafter([proposer], policy, vocab_size)

    ways: dict[str, Drafter] = {
        "n-grams alone": TreeDrafter(lookups(table), tree, vocab_size),
        "n-grams of the context alone": TreeDrafter(lookups(), tree, vocab_size),
        "lying": LyingDrafter(vocab_size),
    }
    if draft:
        ways |= {
            "tree": model(tree),
            "chain": model(chain),
            "wide tree": model(wide),
            "parallel tree": parallel(tree),
            "chain over n-grams": guided(chain),
            "tree over n-grams": guided(tree),
        }
    return ways


def continuation(decoder: Decoder, prompt: NDArray[np.int32], sampling: SamplingConfig, max_tokens: int) -> list[int]:
    """The tokens that a decoder generates after a prompt, continuing past the end of text."""
    return [token for step in decoder.generate(prompt, sampling, max_tokens) for token in step.tokens]


def run_texts(
    decoder: Decoder,
    prompts: Sequence[NDArray[np.int32]],
    sampling: SamplingConfig,
    max_tokens: int,
    is_end: Callable[[int], bool],
) -> GenerationStats:
    """Continue prompts one after the other, each up to its end of text; returns the statistics of all."""
    stats = GenerationStats()
    for prompt in prompts:
        for _ in decoder.generate(prompt, sampling, max_tokens, is_end=is_end, stats=stats):
            pass
    return stats
