"""Parallel draft models: what one pass proposes, beside the same rows evaluated by hand; and that no text changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from support.decoding import drafted, started, stepped
from support.random_models import Floats, RandomModel, add_key, add_vocabulary, write
from support.steps import Heard, evaluate, prefill, rank

from pystaged import Engine
from pystaged._core import Model, ModelError, Session, Tokenizer
from pystaged.bench.pairs import continuation
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import FixedPolicy, GainPolicy, TreePolicy
from pystaged.decoding.tree import Stage
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import lookups
from pystaged.drafting.model import PLACES, ModelProposer, ParallelModelProposer
from pystaged.loading.costs import Costs
from pystaged.loading.metadata import PARD_TOKEN
from pystaged.options.config import SamplingConfig

MASK, VOCAB = 299, 300
CONTEXT = np.arange(3, 40, dtype=np.int32)
SAMPLINGS = [SamplingConfig(), SamplingConfig(temperature=1.0, top_k=40, seed=5)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """A target and a draft."""
    folder = tmp_path_factory.mktemp("pard")
    target, draft = (write(folder / f"{seed}.gguf", RandomModel("llama", seed=seed)) for seed in (1, 2))
    return Model(str(target)), Model(str(draft))


def only_positions(tensors: Mapping[str, Floats]) -> None:
    """Make the next token a function of the position: no token has a say, nor has attention."""
    for name, values in tensors.items():
        if name == "token_embd.weight" or "attn_output" in name or "ffn_down" in name:
            values[:] = 0


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("children", [1, 3])
def test_one_pass_proposes_for_all_depths(models: tuple[Model, Model], sampling: SamplingConfig, children: int) -> None:
    _, draft = models
    passes: list[str] = []
    session: Any = Heard(Session(draft), lambda kind, *_: passes.append(kind))
    proposer = ParallelModelProposer(session, MASK)
    drafter = TreeDrafter([proposer], FixedPolicy(children, 10, 40, children), VOCAB)
    drafter.start(CONTEXT)
    tree = drafted(drafter, sampling, 20)
    assert passes.count("propose") == drafter.work()["draft"].passes == 1
    hand = Session(draft)
    prefill(hand, CONTEXT[:-1])
    evaluate(hand, [int(CONTEXT[-1]), *[MASK] * (PLACES - 1)], list(range(-1, PLACES - 1)), PLACES)
    expected, _ = rank(hand, list(range(PLACES)), children, sampling.native)
    depths = [0] * len(tree)
    for node in range(1, len(tree)):
        depths[node] = depths[tree.parents[node]] + 1
        assert tree.tokens[node] in expected[depths[node] - 1]
    assert max(depths) == PLACES if children == 1 else len(tree) > PLACES
    assert set(tree.stages[1:].tolist()) == {Stage.DRAFT}


POLICIES = {"fixed": FixedPolicy(2, 4, 8), "gain": GainPolicy(PassCost({1: 1.0, 2: 1.01}))}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_shorter_context_than_the_targets(models: tuple[Model, Model], policy: TreePolicy) -> None:
    target, draft = models
    plain = continuation(Context(Session(target, 120)), CONTEXT, SAMPLINGS[0], 60)
    proposers = [*lookups(), ParallelModelProposer(Session(draft, len(CONTEXT) + 20), MASK)]
    decoder = Context(Session(target, 120), TreeDrafter(proposers, policy, VOCAB))
    assert continuation(decoder, CONTEXT, SAMPLINGS[0], 60) == plain


def test_masks_are_never_part_of_the_text(models: tuple[Model, Model]) -> None:
    """What the draft's session holds after each step is the text, though the target accepted guesses."""
    target, _ = models
    session = Session(target)
    proposer = ParallelModelProposer(session, MASK)
    decoder = Context(Session(target), TreeDrafter([proposer], FixedPolicy(4, 4, 12), VOCAB))
    started(decoder, CONTEXT)
    text, accepted = CONTEXT.tolist(), 0
    for _ in range(20):
        step = stepped(decoder, SamplingConfig(), 100)
        text += step.tokens
        accepted += len(step.tokens) - 1
        held = session.tokens.tolist()
        assert held == text[: len(held)]
        assert len(held) >= len(text) - len(step.tokens)
    assert accepted >= 20  # the target drafts for itself, and its first place is right


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_texts_are_those_of_plain_decoding(models: tuple[Model, Model], sampling: SamplingConfig) -> None:
    target, draft = models
    plain = continuation(Context(Session(target, 96)), CONTEXT, sampling, 100)
    drafter = TreeDrafter([ParallelModelProposer(Session(draft, 96), MASK)], FixedPolicy(3, 9, 20), VOCAB)
    assert continuation(Context(Session(target, 96), drafter), CONTEXT, sampling, 100) == plain
    assert len(plain) == 60  # to the end of the context


@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_draft_that_overflows_drafts_no_more(models: tuple[Model, Model], tmp_path: Path, is_parallel: bool) -> None:
    """Its keys do, of each token that is not in the prompt: of what it guesses."""

    def overflow(tensors: dict[str, Floats]) -> None:
        tensors["token_embd.weight"][:, 0] = 1
        tensors["token_embd.weight"][CONTEXT, 0] = 0
        tensors["blk.0.attn_k.weight"][:, 0] = 1e8

    target, draft = models[0], Model(write(tmp_path / "draft.gguf", RandomModel("llama", seed=2), overflow))
    session = Session(draft, 96)
    proposer = ParallelModelProposer(session, MASK) if is_parallel else ModelProposer(session)
    drafter = TreeDrafter([proposer], FixedPolicy(3, 9, 20), VOCAB)
    decoder = Context(Session(target, 96), drafter)
    for context in (CONTEXT, CONTEXT[5:]):
        found = continuation(decoder, context, SAMPLINGS[1], 30)
        assert found == continuation(Context(Session(target, 96)), context, SAMPLINGS[1], 30)
        assert (proposer.lag(), proposer.is_ready, session.num_pending) == (math.inf, False, 0)


def test_all_places_of_a_draft_that_is_right_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is known by a key of its file, and the budget knows that one pass brings many guesses."""
    shape = RandomModel("gpt2", tie=False)
    target = write(tmp_path / "target.gguf", shape, only_positions)

    def vocabulary(writer: GGUFWriter, num_tokens: int) -> None:
        add_vocabulary(writer, num_tokens)
        writer.add_uint32(PARD_TOKEN, MASK)

    draft = write(tmp_path / "draft.gguf", replace(shape, vocabulary=vocabulary), only_positions)
    # A draft that costs half a pass of the target: it would never pay if each guess took one.
    costs = {target: PassCost({1: 1.0, 32: 1.2}), draft: PassCost({1: 0.5, 32: 0.5})}
    monkeypatch.setattr(Costs, "of", lambda _, path, *__, **___: costs[path])
    with Engine(target, draft=draft, recycle=False) as engine:
        result = engine.generate([5, 6, 7], max_tokens=100)
        plain = engine.generate([5, 6, 7], max_tokens=100, speculate=False)
    assert result.tokens == plain.tokens
    assert len(set(result.tokens)) > 20
    assert result.stats.new_tokens / result.stats.steps > 4


@pytest.mark.parametrize(
    ("value", "words"),
    [([MASK], "is not an integer"), ("7", "is not an integer"), (True, "is not an integer"), (VOCAB, "is 300")],
)
def test_a_mask_token_that_is_none_is_named(tmp_path: Path, value: object, words: str) -> None:
    def vocabulary(writer: GGUFWriter, num_tokens: int) -> None:
        add_vocabulary(writer, num_tokens)
        add_key(writer, PARD_TOKEN, value)

    draft = write(tmp_path / "draft.gguf", RandomModel("llama", vocabulary=vocabulary))
    with pytest.raises(ModelError, match=f"pystaged.pard_token' {words}"):
        Tokenizer(draft)
