"""Whole generations over a set of prompts: is it plain output whatever drafts, and what does each part bring?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Model, RecycledCandidates, Session
from pystaged.bench.suite import SAMPLINGS
from pystaged.config import SamplingConfig
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.loop import Decoder
from pystaged.decoding.policy import FixedPolicy, TreePolicy
from pystaged.decoding.requests import Requests
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.drafting.head import HeadDrafter
from pystaged.drafting.model import ModelDrafter
from pystaged.drafting.ngrams import NgramDrafter
from pystaged.drafting.table import NgramTable
from pystaged.loading.bundle import Bundle
from pystaged.stats import GenerationStats

MODES = SAMPLINGS | {"T=0.8 top-p 0.95": SamplingConfig(temperature=0.8, top_p=0.95)}


class LyingDrafter(NgramDrafter):
    """Proposes random tokens: what no drafter may do to the output.

    Args:
        vocab_size: tokens to choose from.
        seed: of the choice.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        super().__init__(None, FixedPolicy(width=1, depth=1, budget=1), vocab_size)
        self._random = np.random.default_rng(seed)

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        yield from ()
        del sampling, seconds
        builder = TreeBuilder(self._context[-1])
        for _ in range(12):
            parent = int(self._random.integers(len(builder.nodes)))
            if builder.nodes[parent].depth < max_depth:
                builder.add(parent, int(self._random.integers(self._vocab_size)), 0.5, Stage.DRAFT, (1, 0, 0))
        return builder.build(range(1, len(builder.nodes)))


class UnsharedDrafter(ModelDrafter):
    """Ranks by probability alone, whatever noise the target's tokens are drawn with: what shared noise is compared
    with."""

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        del sampling
        return super().draft(SamplingConfig(), max_depth, seconds)


def parts(bundle: Bundle, session: Session, budget: int) -> Mapping[str, Drafter]:
    """Drafting with trees of `budget` nodes: with a draft model, and then without one of its parts; or of n-grams, and
    then with one source more each time. A memory is the drafter's own, and empty.

    Args:
        session: of the target, which the decoders of all of them step.
    """
    return _of_model(bundle, bundle.draft, budget) if bundle.draft else _of_ngrams(bundle, session, budget)


def _of_model(bundle: Bundle, draft: Model, budget: int) -> dict[str, ModelDrafter]:
    tree, one = FixedPolicy(width=4, depth=8, budget=budget), FixedPolicy(width=1, depth=1, budget=1)
    vocab_size = bundle.target.vocab_size

    def below() -> NgramDrafter:
        return NgramDrafter(bundle.table, one, vocab_size)

    def drafter(kind: type[ModelDrafter], below: NgramDrafter | None) -> ModelDrafter:
        return kind(Session(draft), tree, below=below, vocab_size=vocab_size, substitutes=bundle.substitutes)

    return {
        "shared noise, n-grams below": drafter(ModelDrafter, below()),
        "without n-grams below": drafter(ModelDrafter, None),
        "without shared noise": drafter(UnsharedDrafter, below()),
    }


def _of_ngrams(bundle: Bundle, session: Session, budget: int) -> dict[str, NgramDrafter]:
    tree, vocab_size = FixedPolicy(width=1, depth=budget, budget=budget), bundle.target.vocab_size
    ways = {"n-grams of the text": NgramDrafter(None, tree, vocab_size)}
    if bundle.table:
        ways["and of a table"] = NgramDrafter(bundle.table, tree, vocab_size)
    ways["and the memory"] = NgramDrafter(bundle.table, tree, vocab_size, recycled=RecycledCandidates())
    if bundle.head:
        memory = RecycledCandidates()
        ways["and the draft head"] = HeadDrafter(
            bundle.head, bundle.target, session, bundle.table, tree, vocab_size, recycled=memory
        )
    return ways


def drafters(
    target: Model, draft: Model | None, table: NgramTable | None, substitutes: Mapping[int, int] | None = None
) -> dict[str, Drafter]:
    """Ways to draft that differ as much as they can: what the output must not depend on.

    Args:
        draft: None for n-grams alone.
        table: of n-grams.
        substitutes: as in ModelDrafter.
    """
    vocab_size = target.vocab_size
    tree, chain = FixedPolicy(width=4, depth=6, budget=12), FixedPolicy(width=1, depth=6, budget=6, children=1)
    wide = FixedPolicy(width=8, depth=2, budget=31, children=8)

    def ngram(policy: TreePolicy) -> NgramDrafter:
        return NgramDrafter(table, policy, vocab_size)

    def model(draft: Model, policy: TreePolicy, below: Drafter | None) -> ModelDrafter:
        return ModelDrafter(Session(draft), policy, below=below, vocab_size=vocab_size, substitutes=substitutes)

    ways: dict[str, Drafter] = {
        "n-grams alone": ngram(tree),
        "n-grams of the context alone": NgramDrafter(None, tree, vocab_size),
        "lying": LyingDrafter(vocab_size),
    }
    if draft:
        below = model(draft, tree, ngram(chain))
        ways |= {
            "tree": model(draft, tree, ngram(chain)),
            "chain": model(draft, chain, ngram(chain)),
            "wide tree": model(draft, wide, ngram(chain)),
            "draft without n-grams": model(draft, tree, None),
            "three models": ModelDrafter(Session(target), chain, below=below, vocab_size=vocab_size),
        }
    return ways


def continuation(decoder: Decoder, prompt: NDArray[np.int32], sampling: SamplingConfig, max_tokens: int) -> list[int]:
    """The tokens a decoder writes after a prompt, end of text or not."""
    return [token for step in decoder.generate(prompt, sampling, max_tokens) for token in step.tokens]


def run_texts(
    decoder: Decoder,
    prompts: Sequence[NDArray[np.int32]],
    sampling: SamplingConfig,
    max_tokens: int,
    is_end: Callable[[int], bool],
) -> GenerationStats:
    """Continue prompts one after the other, each up to its end of text; the figures of all of them together."""
    stats = GenerationStats()
    for prompt in prompts:
        for _ in decoder.generate(prompt, sampling, max_tokens, is_end=is_end, stats=stats):
            pass
    return stats
