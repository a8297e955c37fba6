"""Generate over a set of prompts: does the output equal plain decoding's with any drafter, and what does each gain?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import ne
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from pystaged._core import Model, RecycledCandidates, Sampling, Session, Work, run
from pystaged.bench.suite import SAMPLINGS
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.policy import FixedPolicy, GainPolicy, TreePolicy
from pystaged.decoding.stepper import generate
from pystaged.decoding.text import Text, TokenRoles
from pystaged.drafting.calibration import CONTEXT
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.features import feature_proposer
from pystaged.drafting.lookups import Lookup, lookups
from pystaged.drafting.model import ModelProposer, ParallelModelProposer, draft_proposer
from pystaged.drafting.proposer import Proposal, Proposer
from pystaged.drafting.table import NgramTable
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import ContextFactory
from pystaged.options.config import GenerationConfig, SamplingConfig
from pystaged.stats import DrafterStats, GenerationStats

_PIECE = 32  # rows of a pass
_SEEDS = 2  # of each sampling that `lossless` checks
MODES = SAMPLINGS | {"T=0.8 top-p 0.95": SamplingConfig(temperature=0.8, top_p=0.95)}


class _LyingProposer(Lookup):
    """Proposes random tokens, which must not affect the output."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._random = vocab_size, np.random.default_rng(0)

    def after(self, _tail: list[int]) -> Proposal:
        return Proposal(dict.fromkeys(self._random.integers(self._vocab_size, size=6).tolist(), 1 / 6), CONTEXT[1])


class LyingDrafter(TreeDrafter):
    """Drafts trees of twelve random tokens."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__([_LyingProposer(vocab_size)], FixedPolicy(width=3, depth=4, budget=12), vocab_size)


class Reckoned(PassCost):
    """Given costs, linear in the number of rows, which no measurement changes.

    Args:
        first: seconds of a pass over one row. more: of each further row.
    """

    def __init__(self, first: float, more: float) -> None:
        super().__init__({1: first, 2: first + more})

    def observe(self, *args: Any, **options: Any) -> None:
        """Nothing is measured."""

    def of(self, passes: int, rows: int) -> float:
        """Seconds of a number of passes over so many rows in all."""
        return passes * self(1) + (rows - passes) * (self(2) - self(1)) if passes else 0.0


def reckoned(ratio: float) -> tuple[Reckoned, Reckoned]:
    """Costs of a target and of a draft that is `ratio` times cheaper; a target's pass over one row takes a second."""
    return Reckoned(1.0, 0.012), Reckoned(1 / ratio, 0.02 / ratio)


def parts(bundle: Bundle, session: Session, ratio: float) -> dict[str, TreeDrafter]:
    """Drafters of n-grams, of the draft model, and of both; or of n-grams, with one more source each. Each drafter has
    its own recycled candidates, empty at first.

    Args:
        session: the target's, which all contexts step.
        ratio: see `reckoned`.
    """
    target, cheap = reckoned(ratio)
    table = bundle.table
    ways: dict[str, list[Proposer]] = {}
    if bundle.draft:
        alone, above = (
            draft_proposer(Session(bundle.draft), bundle.draft_mask, cheap, bundle.substitutes) for _ in range(2)
        )
        ways["n-grams"] = [*lookups(table, RecycledCandidates())]
        ways["draft"] = [alone]
        ways["one tree"] = [*lookups(table, RecycledCandidates()), above]
    else:
        ways["n-grams of the text"] = [*lookups()]
        if table:
            ways["and of a table"] = [*lookups(table)]
        ways["and recycled candidates"] = [*lookups(table, RecycledCandidates())]
        if bundle.features:
            proposer = feature_proposer(Session(bundle.features, target=session), bundle.features, session, cheap)
            ways["and the draft"] = [*lookups(table, RecycledCandidates()), proposer]
    size = bundle.target.vocab_size
    return {name: TreeDrafter(proposers, GainPolicy(target), size) for name, proposers in ways.items()}


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


def lossless(
    bundle: Bundle, texts: Sequence[NDArray[np.int32]], max_tokens: int, progress: Callable[[int, int], None]
) -> tuple[Table, bool]:
    """How many texts each way of drafting continues otherwise than plain decoding, as a table, and whether none does.

    Args:
        progress: called with the number of checks that are done, and of all.

    Raises:
        ValueError: the target is not exact.
    """
    bundle.check_exact()
    session, factory = Session(bundle.target), ContextFactory(bundle)
    ways = drafters(bundle.target, bundle.draft, bundle.table, bundle.substitutes)
    contexts = {way: Context(session, drafter) for way, drafter in ways.items()} | {
        "as measured costs decide": factory.context(0, None),
        "as loaded, in trees of 12 nodes": factory.context(0, FixedPolicy(width=4, depth=6, budget=12)),
    }
    runs = {
        f"{mode}, seed {seed}": replace(sampling, seed=seed)
        for mode, sampling in MODES.items()
        for seed in range(1 if sampling.is_greedy else _SEEDS)
    }
    plain, different = Context(session), dict[str, list[int]]((way, []) for way in contexts)
    for sampling in runs.values():
        expected = [continuation(plain, text, sampling, max_tokens) for text in texts]
        for way, context in contexts.items():
            found = [continuation(context, text, sampling, max_tokens) for text in texts]
            different[way].append(sum(map(ne, found, expected)))
            progress(sum(map(len, different.values())), len(runs) * len(contexts))
    title = f"{len(texts)} prompts, {max_tokens} tokens each: sequences that differ from plain decoding"
    table = Table("drafted by", *runs, title=title, box=None)
    for way, counts in different.items():
        table.add_row(way, *map(str, counts))
    return table, not any(map(any, different.values()))


def gains(
    bundle: Bundle,
    earlier: Sequence[NDArray[np.int32]],
    texts: Sequence[NDArray[np.int32]],
    max_tokens: int,
    ratio: float,
) -> Table:
    """What each of `parts` brings for texts that follow earlier ones, as a table; ratio: see `reckoned`."""
    session, (target, cheap) = Session(bundle.target), reckoned(ratio)
    draft = f"{bundle.draft.name} as a draft {ratio:g} times cheaper" if bundle.draft else "without a draft model"
    title = f"{bundle.target.name}, {draft}; {len(texts)} prompts, {max_tokens} tokens each"
    columns = "tokens per step", "draft passes per token", "x plain, reckoned", "acceptance at depth 1, 2, ..."
    table = Table("", *columns, title=title, box=None)
    for mode, sampling in MODES.items():
        for way, drafter in parts(bundle, session, ratio).items():
            context, options = Context(session, drafter), (sampling, max_tokens, bundle.tokenizer.is_end)
            run_texts(context, earlier, *options)
            stats = run_texts(context, texts, *options)
            judged = stats.drafters.get("draft", DrafterStats())
            spent = target.of(stats.steps, stats.rows) + cheap.of(judged.passes, judged.nodes)
            figures = stats.tokens_per_step, judged.passes / stats.new_tokens, stats.new_tokens / spent
            depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_at_depth[:8])
            table.add_row(f"{mode}: {way}", *(f"{each:.3f}" for each in figures), depths)
    return table


def agreement(
    draft: Model, texts: Iterable[tuple[Sequence[int], Sequence[int]]], substitutes: Mapping[int, int]
) -> float | None:
    """The share of tokens that are a draft's first choice, each after the target's tokens before it; None of no tokens.

    Args:
        texts: prompts, and the tokens that the target chose greedily after each; those that the draft's context holds
            are counted.
        substitutes: see ModelProposer.
    """
    session = Session(draft)
    piece = min(_PIECE, session.most_pending)
    hits: list[bool] = []
    for prompt, tokens in texts:
        read = [substitutes.get(token, token) for token in (*prompt, *tokens)]
        if len(read) > session.n_ctx:
            continue
        session.rewind(0)
        run([Work.read(session, read[: len(prompt) - 1])])
        for at in range(0, len(tokens), piece):
            rows = range(min(piece, len(tokens) - at))
            guessed = read[len(prompt) - 1 + at :][: len(rows)]
            [(chosen, _)] = run([Work.propose(session, guessed, [row - 1 for row in rows], len(rows), 1, Sampling())])
            session.commit(rows)
            hits += (chosen[:, 0] == tokens[at : at + piece]).tolist()
    return fmean(hits) if hits else None


def continuation(context: Context, prompt: NDArray[np.int32], sampling: SamplingConfig, max_tokens: int) -> list[int]:
    """The tokens that a context generates after a prompt, continuing past the end of text."""
    text = Text(prompt.tolist(), prompt, GenerationConfig(sampling=sampling, max_tokens=max_tokens))
    return [token for piece in generate(context, text) for token in piece.tokens]


def run_texts(
    context: Context,
    prompts: Sequence[NDArray[np.int32]],
    sampling: SamplingConfig,
    max_tokens: int,
    is_end: Callable[[int], bool],
) -> GenerationStats:
    """Continue prompts one after the other, each up to its end of text; returns the statistics of all."""
    stats, config = GenerationStats(), GenerationConfig(sampling=sampling, max_tokens=max_tokens)
    for prompt in prompts:
        text = Text(prompt.tolist(), prompt, config, roles=TokenRoles(is_end=is_end), stats=stats)
        deque(generate(context, text), maxlen=0)
    return stats
