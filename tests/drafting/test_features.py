"""Drafts that read hidden states: what they hold and propose while texts go on, and that no text changes."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.assistants import Assistant
from support.decoding import Text, drafted, started, step, stepped
from support.families import CASES
from support.feature_drafts import Block, Eagle3, dspark, load_pair, write_draft
from support.random_models import RandomModel, write
from support.right_drafts import KINDS, TARGET, write_right
from support.scheduling import ActingPolicy, wait_until
from support.steps import verify

from pystaged import Engine, ModelError
from pystaged._core import Model, Session
from pystaged.bench.pairs import continuation
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import FixedPolicy
from pystaged.decoding.requests import Read
from pystaged.decoding.stepper import Stepper
from pystaged.decoding.tree import TokenTree
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.features import feature_proposer
from pystaged.loading.costs import Costs
from pystaged.options.config import SamplingConfig

VOCAB = 300
CONTEXT = np.random.default_rng(2).integers(3, VOCAB, 90, dtype=np.int32)
READING: dict[str, Any] = {  # every token of a text
    "eagle": Eagle3(taps=[1, 2, 3], own_head=True, draft_vocab=150),
    "eagle 3.1": Eagle3(separate_fc_norm=True, norm_output=True, head_norms=True, layers=2),
    "dflash": Block(block=6),
    "dspark": dspark(draft_vocab=200, own_head=True, block=5),
    # A target with an MTP layer of its own.
    "mtp": RandomModel("qwen3", layers=3, ahead=1, head_dim=32, context=1024),
    "mtp of a hybrid": RandomModel("qwen35", layers=3, recurrent=(0, 2), ahead=1, context=1024),
    "mtp of experts": RandomModel(
        "qwen35moe", layers=3, recurrent=(0, 2), ahead=1, context=1024, experts=(8, 2, 32, 32)
    ),
    "mtp of latent attention": replace(CASES["deepseek2"], ahead=1, context=1024),
}
GEMMA4 = replace(CASES["gemma4"], context=1024)
DRAFTS: dict[str, Any] = READING | {"assistant": Assistant(GEMMA4, width=64)}
SAMPLINGS = {"greedy": SamplingConfig(), "sampled": SamplingConfig(temperature=1.0, top_k=40, seed=5)}


def write_pair_of(draft: Any, folder: Path, **changed: Any) -> tuple[Path, Path]:
    """A target, and a draft of which these tensors differ; one file where a target has an MTP layer of its own."""
    path = folder / "draft.gguf"
    if isinstance(draft, RandomModel):
        return (write(path, draft, lambda tensors: tensors.update(changed)),) * 2
    return write(folder / "target.gguf", target_of(draft)), write_draft(path, draft, changed)


def target_of(draft: Any) -> RandomModel:
    return draft.target if isinstance(draft, Assistant) else TARGET


@dataclass
class Pair:
    """A target and a draft, and their files."""

    target: Model
    draft: Model
    target_path: Path
    draft_path: Path

    def decoder(self, n_ctx: int = 256, like: Context | None = None) -> Context:
        """A decoder whose drafter asks the draft alone, and weighs candidates as another one's does."""
        target = Session(self.target, n_ctx)
        proposer = feature_proposer(Session(self.draft, n_ctx, target), self.draft, target)
        learnt = cast(TreeDrafter, like.drafter)._learnt if like else None
        return Context(target, TreeDrafter([proposer], FixedPolicy(3, 4, 12), VOCAB, learnt=learnt))


@pytest.fixture(scope="module", params=DRAFTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    paths = write_pair_of(DRAFTS[request.param], tmp_path_factory.mktemp("pair"))
    return Pair(*load_pair(*paths), *paths)


def first_tree(pair: Pair, text: list[int], sampling: SamplingConfig, like: Context) -> TokenTree:
    """The tree that a new decoder drafts after a text, if it weighs candidates as another one does."""
    decoder = pair.decoder(n_ctx=1024, like=like)
    started(decoder, np.array(text, np.int32))
    return drafted(decoder.drafter, sampling, 20)


def same(tree: TokenTree, other: TokenTree) -> None:
    assert len(tree) > 4
    np.testing.assert_array_equal(tree.tokens, other.tokens)
    np.testing.assert_array_equal(tree.parents, other.parents)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_after_steps_trees_are_those_after_reading_the_text(pair: Pair, sampling: SamplingConfig) -> None:
    """So nothing stays that the draft made up, whatever was accepted."""
    decoder = pair.decoder()
    started(decoder, CONTEXT)
    text, longest = CONTEXT.tolist(), 0
    for number in range(40):
        if number % 8 == 7:
            tree = drafted(decoder.drafter, sampling, 20)
            same(tree, first_tree(pair, text, sampling, decoder))
            same(tree, drafted(decoder.drafter, sampling, 20))  # the same one again
        done = stepped(decoder, sampling, 100)
        longest = max(longest, len(done.tokens))
        text += done.tokens
    assert len(text) >= len(CONTEXT) + 40


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_texts_are_those_of_plain_decoding(pair: Pair, sampling: SamplingConfig) -> None:
    plain = continuation(Context(Session(pair.target, 140)), CONTEXT, sampling, 100)
    assert continuation(pair.decoder(n_ctx=140), CONTEXT, sampling, 100) == plain
    assert len(plain) == 51  # to the end of the context


@pytest.mark.parametrize("pair", READING, indirect=True)
def test_a_drafter_that_waits_reads_what_it_missed(pair: Pair) -> None:
    """Steps without a draft leave rows unread; after too many it is out until the next text."""
    decoder = pair.decoder(n_ctx=1024)
    text = CONTEXT.tolist()
    started(decoder, CONTEXT)
    drafter = decoder.drafter
    sampling = SAMPLINGS["sampled"]

    def go_on(steps: int) -> None:
        for _ in range(steps):
            *_, tokens = verify(decoder.target, [text[-1]], [-1], sampling.native)
            drafter.advance(tokens.tolist())
            text.extend(tokens.tolist())

    go_on(70)
    proposer = drafter._costly
    proposer.cost = PassCost({1: 1.0, 32: 32.0})
    assert proposer.catch_up(2.0) is None
    part, whole = proposer.catch_up(20.0), proposer.catch_up(99.0)
    assert 8 <= len(part.tokens) < len(whole.tokens)
    proposer.cost = None
    same(drafted(drafter, sampling, 20), first_tree(pair, text, sampling, decoder))
    go_on(520)
    assert drafter.lag() == float("inf")
    assert len(drafted(drafter, sampling, 20)) == 1
    # The target does not read so much again for it, but a text that begins alike goes on from what it had read.
    assert started(decoder, np.array(text, np.int32)) == len(text) - 1
    assert drafter.lag() == float("inf")
    text = text[: len(CONTEXT) + 60]
    least = 0 if pair.target.state_bytes else len(text) - 2  # recurrent layers go back to few places
    assert started(decoder, np.array(text, np.int32)) >= least
    same(drafted(drafter, sampling, 20), first_tree(pair, text, sampling, decoder))


def test_the_next_prompt_goes_on_from_what_both_hold(pair: Pair) -> None:
    decoder, sampling = pair.decoder(), SAMPLINGS["greedy"]
    first = continuation(decoder, CONTEXT, sampling, 40)
    text = CONTEXT.tolist() + first
    for prompt, least in (
        ([*text, 7, 8, 9], len(text) - 2),  # the text goes on
        (CONTEXT.tolist(), len(CONTEXT) - 2),  # another answer
        ([*CONTEXT.tolist()[:50], 5, 6, 7], 49),  # another end
        (CONTEXT.tolist()[:50], 48),
        (CONTEXT.tolist()[:2], 0),
    ):
        reused = started(decoder, np.array(prompt, np.int32))
        assert (0 if pair.target.state_bytes else least) <= reused <= len(prompt) - 1
        same(drafted(decoder.drafter, sampling, 20), first_tree(pair, prompt, sampling, decoder))
        expected = continuation(Context(Session(pair.target, 256)), np.array(prompt, np.int32), sampling, 20)
        assert continuation(decoder, np.array(prompt, np.int32), sampling, 20) == expected


def test_a_text_goes_on_after_a_step_that_was_interrupted(pair: Pair) -> None:
    decoder, sampling = pair.decoder(), SAMPLINGS["greedy"]
    started(decoder, CONTEXT[:40])
    drafted(decoder.drafter, sampling, 20)  # and no more: its tree is never verified
    assert started(decoder, CONTEXT) >= 38
    same(drafted(decoder.drafter, sampling, 20), first_tree(pair, CONTEXT.tolist(), sampling, decoder))


@pytest.mark.parametrize("pair", READING, indirect=True)
def test_a_long_text_is_not_read_again_for_a_draft_that_lacks_it(pair: Pair) -> None:
    decoder, plain = pair.decoder(n_ctx=512), SAMPLINGS["greedy"]
    started(decoder, CONTEXT, speculate=False)
    assert started(decoder, CONTEXT) == len(CONTEXT) - 1
    assert len(drafted(decoder.drafter, plain, 20)) == 1
    # A short one is, and one of which as much is new.
    started(decoder, CONTEXT[:40], speculate=False)
    assert started(decoder, CONTEXT[:40]) == 0
    same(drafted(decoder.drafter, plain, 20), first_tree(pair, CONTEXT[:40].tolist(), plain, decoder))


@pytest.mark.parametrize("pair", READING, indirect=True)
def test_prompts_are_read_once_and_as_soon_as_without_a_draft(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft reads each piece of a prompt when the target has read it, so that no text waits for it."""
    prompts = [np.random.default_rng(seed).integers(3, VOCAB, 600, dtype=np.int32) for seed in (1, 2)]
    take = Read.take

    def counted(request: Read, found: Any) -> None:
        rows[request.session].append(request.num_rows)
        take(request, found)

    monkeypatch.setattr(Read, "take", counted)
    steps = {False: 0, True: 0}
    for speculate in (False, True):
        rows = defaultdict[Session, list[int]](list)
        decoders = [pair.decoder(n_ctx=1024) for _ in prompts]
        texts = []
        for decoder, prompt in zip(decoders, prompts, strict=True):
            texts.append(Text(decoder, prompt, SAMPLINGS["greedy"], 10, speculate=speculate))
        stepper = Stepper(None)
        while not all(text.steps for text in texts):
            step(stepper, texts)
            steps[speculate] += 1
        for decoder in decoders:
            pieces, read = (rows[session] for session in decoder.sessions)
            assert sum(pieces) == 599
            # The last row of what was read waits for the next piece.
            assert read[: len(pieces)] == ([pieces[0] - 1, *pieces[1:]] if speculate else [])
    assert steps[True] == steps[False]


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_whose_weights_overflow_ends_no_text(tmp_path: Path, kind: str) -> None:
    norm = f"{'blk.3.nextn.shared_head' if isinstance(DRAFTS[kind], RandomModel) else 'output'}_norm.weight"
    target, path = write_pair_of(DRAFTS[kind], tmp_path, **{norm: np.full(64, 3e38, np.float32)})
    with Engine(target, draft=None) as engine:
        expected = engine.generate(CONTEXT.tolist(), max_tokens=20, speculate=False).tokens
    decoder = Pair(*load_pair(target, path), target, path).decoder()
    assert continuation(decoder, CONTEXT, SAMPLINGS["greedy"], 20)[: len(expected)] == expected
    assert decoder.drafter.lag() == float("inf")


def test_texts_out_of_phase_share_the_targets_passes(pair: Pair) -> None:
    """The first text waits in its third step until there is a second one."""
    policy = ActingPolicy(lambda: wait_until(lambda: second.text.is_open), 3)
    with (
        Engine(pair.target_path, draft=pair.draft_path, n_ctx=512, policy=policy) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        first, second = (engine.stream(CONTEXT[:n].tolist(), max_tokens=60) for n in (40, 50))
        next(first)
        assert len(pool.submit(second.finish).result(600).tokens) == 60
        first.close()
        passes = engine.passes
    assert passes.steps > 1.3 * passes.passes


def test_engines_write_the_same_with_and_without_it(pair: Pair) -> None:
    """Many texts, forks, grammars and cancelled texts."""
    cases: list[dict[str, Any]] = [
        {"max_tokens": 30},
        {"max_tokens": 30, "temperature": 1.0, "seed": 3},
        {"max_tokens": 20, "temperature": 0.9, "top_p": 0.9, "repeat_penalty": 1.2, "seed": 4},
        {"max_tokens": 20, "temperature": 1.0, "seed": 5, "regex": "(one|two)[a-f]+;"},
    ]
    prompts = [[int(token) for token in CONTEXT[: 20 + 9 * i]] for i in range(4)]
    prompts.append(prompts[0][:1])
    with Engine(pair.target_path, draft=pair.draft_path, n_ctx=256) as engine:
        has_own = pair.draft_path == pair.target_path
        assert engine.draft_name == ("its own MTP layer" if has_own else "a random draft")
        for options in cases:
            expected = [engine.generate(prompt, speculate=False, **options).tokens for prompt in prompts]
            assert [engine.generate(prompt, **options).tokens for prompt in prompts] == expected
            # Six at once, of which one is cancelled.
            streams = [engine.stream(prompt, **options) for prompt in [*prompts, prompts[0]]]
            streams.pop().close()
            with ThreadPoolExecutor(5) as pool:
                assert list(pool.map(lambda stream: stream.finish().tokens, streams)) == expected
        several = engine.generate(prompts[1], n=4, max_tokens=12, temperature=1.0, seed=9)
        alone = engine.generate(prompts[1], n=4, max_tokens=12, temperature=1.0, seed=9, speculate=False)
        assert [each.tokens for each in several] == [each.tokens for each in alone]


NEARLY_GREEDY: dict[str, Any] = {"temperature": 0.2, "seed": 2}


@pytest.mark.parametrize("kind", [*KINDS, "mtp", "assistant"])
def test_a_draft_that_is_right_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each kind means the right place: the next one for an anchored block, its own for another one, and two behind the
    hidden states for EAGLE-3."""
    target, path = write_right(tmp_path, kind)
    of_target, of_draft = PassCost({1: 1.0, 32: 1.2}), PassCost({1: 0.01, 32: 0.01})
    monkeypatch.setattr(Costs, "of", lambda *_, like=None, **__: of_draft if like else of_target)
    with Engine(target, draft=path, recycle=False) as engine:
        result = engine.generate([5, 6, 7], max_tokens=60, **NEARLY_GREEDY)
        plain = engine.generate([5, 6, 7], max_tokens=60, **NEARLY_GREEDY, speculate=False)
    assert result.tokens == plain.tokens
    named = result.stats.stages["draft"].emitted + result.stats.stages["confirmed"].emitted
    assert named > (10 if kind == "eagle" else 30)


def test_a_draft_for_another_target_is_refused(tmp_path: Path) -> None:
    target, draft = write_pair_of(DRAFTS["eagle"], tmp_path)
    other = write(tmp_path / "wide.gguf", RandomModel("llama", width=96, layers=3, heads=6, kv_heads=3))
    with pytest.raises(ModelError, match="this one is 96 wide"):
        Engine(other, draft=draft)
    with pytest.raises(ValueError, match="pass this file as its draft"):
        Engine(draft)
    with pytest.raises(ValueError, match="device"):
        Engine(target, draft=draft, draft_device="ggml-cpu")
    with pytest.raises(ValueError, match="choose the device cpu"):
        Engine(target, draft=draft, device="ggml-cpu")
