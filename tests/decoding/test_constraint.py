"""A constrained text is the same however it is drafted, and what must come is guessed with certainty."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding import drafted, generate, text_of
from support.steps import evaluate, prefill, verify

from pystaged import Stage
from pystaged._core import Model, Session
from pystaged.bench.pairs import drafters
from pystaged.decoding import stepper
from pystaged.decoding.context import Context
from pystaged.decoding.policy import FixedPolicy
from pystaged.decoding.requests import only
from pystaged.decoding.tree import TreeBuilder, constrained
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import lookups
from pystaged.options.config import SamplingConfig
from pystaged.sampling.constraint import Constraint, allows
from pystaged.stats import GenerationStats

END, LENGTH = 0, 24
PROMPT = np.array([5, 17, 256, 9], np.int32)


def follows(text: tuple[int, ...]) -> list[int]:
    """A language: two tokens of three are one of seven, which those before decide; the third is decided by them."""
    if len(text) == LENGTH:
        return [END]
    rng = random.Random(hash((len(text), *text[-2:])))
    some = sorted(rng.sample(range(1, 300), 1 if len(text) % 3 == 2 else 7))
    return [END, *some] if len(text) == LENGTH - 2 else some


class Language:
    """That language as a constraint."""

    def __init__(self, follows: Callable[[tuple[int, ...]], list[int]] = follows) -> None:
        self._follows = follows
        self.text: tuple[int, ...] = ()

    @property
    def is_complete(self) -> bool:
        return self._follows(self.text) == [END]

    def forced(self) -> list[int]:
        text = self.text
        while len(found := self._follows(text)) == 1 and found != [END]:
            text += (found[0],)
        return list(text[len(self.text) :])

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32] | None:
        text = self.text
        for token in path:
            if token == END or token not in self._follows(text):
                return None
            text += (token,)
        mask = np.zeros(10, np.uint32)
        for token in self._follows(text):
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def advance(self, tokens: Sequence[int]) -> None:
        assert self.mask(tokens) is not None
        self.text += tuple(tokens)


@pytest.fixture(scope="module")
def target(random_gguf: Callable[..., Path]) -> Model:
    return Model(str(random_gguf()), "", 1)


@pytest.fixture(scope="module")
def draft(random_gguf: Callable[..., Path]) -> Model:
    return Model(str(random_gguf(seed=1)), "", 1)


def written(
    decoder: Context,
    sampling: SamplingConfig,
    constraint: Constraint,
    max_tokens: int = 99,
    *,
    speculate: bool = True,
    stats: GenerationStats | None = None,
) -> tuple[list[int], str | None]:
    """A text's tokens, and why it ended."""
    text = text_of(
        PROMPT,
        sampling,
        max_tokens,
        is_end=lambda token: token == END,
        speculate=speculate,
        stats=stats or GenerationStats(),
        constraint=constraint,
    )
    for step in stepper.generate(decoder, text):
        assert len(step.tree) == 1 or speculate
    return text.tokens, text.finish


def greedy_text(target: Model) -> list[int]:
    """The likeliest allowed token, one by one."""
    session, tokens = Session(target), []
    prefill(session, PROMPT[:-1])
    row = int(PROMPT[-1])
    while True:
        evaluate(session, [row], [-1])
        allowed = follows(tuple(tokens))
        row = max(allowed, key=lambda token: session.logits(0)[token])
        session.commit([0])
        if row == END:
            return tokens
        tokens.append(row)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_drafter_changes_a_constrained_text(target: Model, draft: Model, temperature: float) -> None:
    for seed in range(3):
        sampling = SamplingConfig(temperature, seed=seed)
        stats = GenerationStats()
        plain = written(Context(Session(target)), sampling, Language(), speculate=False, stats=stats)
        assert plain[1] == "stop"
        assert stats.stages["grammar"].drafted == 0
        assert stats.steps >= len(plain[0])
        if temperature == 0:
            assert plain[0] == greedy_text(target)
        for name, drafter in ({"none": None} | drafters(target, draft, None)).items():
            with_it = Context(Session(target), *([drafter] if drafter else []))
            for _ in range(2):  # the second time n-grams and calibration know the text
                stats = GenerationStats()
                assert written(with_it, sampling, Language(), stats=stats) == plain, name
                # What must come is in each tree, and always accepted.
                certain = stats.stages["grammar"]
                assert certain.drafted == certain.accepted == certain.emitted, name
                assert stats.steps <= len(plain[0]) * 2 // 3 + 2, name
            with_it.close()


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [False, True])
def test_nobody_holds_a_constraint_after_its_text(target: Model, draft: Model, speculate: bool) -> None:
    for drafter in drafters(target, draft, None).values():
        decoder = Context(Session(target), drafter)
        constraint = Language()
        held = weakref.ref(constraint)
        written(decoder, SamplingConfig(), constraint, speculate=speculate)
        del constraint
        gc.collect()
        assert held() is None


@pytest.mark.parametrize("speculate", [False, True])
def test_a_text_that_is_complete_stops_and_one_that_is_cut_does_not(target: Model, speculate: bool) -> None:
    whole, _ = written(Context(Session(target)), SamplingConfig(), Language(), speculate=speculate)
    for max_tokens in range(1, len(whole) + 3):
        found = written(Context(Session(target)), SamplingConfig(), Language(), max_tokens, speculate=speculate)
        done = max_tokens >= len(whole) and (len(whole) == LENGTH or max_tokens > len(whole))
        assert found == (whole[:max_tokens], "stop" if done else "length")


def test_the_empty_text(target: Model, draft: Model) -> None:
    for drafter in drafters(target, draft, None).values():
        decoder = Context(Session(target), drafter)
        assert written(decoder, SamplingConfig(), Language(lambda _: [END])) == ([], "stop")


def test_guesses_below_what_must_come(target: Model) -> None:
    """A drafter of the target itself goes on behind the forced tokens, and everything is accepted."""
    way = drafters(target, target, None)["chain"]
    decoder, stats = Context(Session(target), way), GenerationStats()
    steps = list(generate(decoder, PROMPT, SamplingConfig(), 20, stats=stats, constraint=Language()))
    both = [step for step in steps if {Stage.GRAMMAR, Stage.DRAFT} <= set(step.stages)]
    assert both
    assert stats.accepted == stats.drafted
    assert any(step.stages.index(Stage.GRAMMAR) < step.stages.index(Stage.DRAFT) for step in both)


def test_what_a_constraint_leaves_of_a_tree() -> None:
    language = Language(lambda text: [[1, 2, 3], [4, END], [5], [6, END], [7, 8]][len(text)])
    builder = TreeBuilder(99)
    for parent, token in ((0, 1), (1, 9), (2, 7), (1, END), (1, 4), (0, 3)):  # 9 is forbidden, and what follows it
        builder.add(parent, token, 0.5 + token / 1000, Stage.DRAFT)
    left, masks = constrained(builder.build(range(1, 7)), language)
    assert left.tokens.tolist() == [99, 1, 4, 3]
    assert left.parents.tolist() == [-1, 0, 1, 0]
    assert left.stages.tolist() == [Stage.TARGET] + [Stage.DRAFT] * 3
    np.testing.assert_array_equal(left.scores, np.array([1, 0.501, 0.504, 0.503], np.float32))
    allowed = [[token for token in range(300) if allows(mask, token)] for mask in masks]
    assert allowed == [[1, 2, 3], [END, 4], [5], [END, 4]]
    language.mask = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="forbids the tokens"):
        constrained(builder.build(), language)


class Fragile(Language):
    """The language, which cannot follow some guesses."""

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32] | None:
        return None if len(path) == 2 and path[-1] % 2 else super().mask(path)

    def advance(self, tokens: Sequence[int]) -> None:
        self.text += tuple(tokens)


@pytest.mark.parametrize("way", ["one tree", "chain", "tree with n-grams"])
def test_a_guess_that_cannot_be_followed_changes_no_text(target: Model, way: str) -> None:
    decoder, greedy = Context(Session(target), drafters(target, target, None)[way]), SamplingConfig()
    assert written(decoder, greedy, Fragile()) == written(decoder, greedy, Language(), speculate=False)


@pytest.mark.parametrize("drafts", [False, True])
def test_what_a_grammar_forces_is_verified_whatever_the_policy_keeps(target: Model, drafts: bool) -> None:
    drafter = TreeDrafter([*lookups()], FixedPolicy(1, 0, 0), target.vocab_size) if drafts else None
    language = Language(lambda text: [[1], [4], [5], [6, 7]][min(len(text), 3)])
    steps = list(generate(Context(Session(target), drafter), PROMPT, SamplingConfig(), 4, constraint=language))
    assert steps[0].tree.tokens.tolist()[1:] == [1, 4, 5]
    assert set(steps[0].tree.stages.tolist()[1:]) == {Stage.GRAMMAR}
    assert steps[0].path == (0, 1, 2, 3)


@pytest.mark.parametrize("way", ["n-grams of the context alone", "tree", "wide tree", "tree with n-grams", "one tree"])
def test_drafters_propose_what_may_follow(target: Model, draft: Model, way: str) -> None:
    drafter, language = drafters(target, draft, None)[way], Language()
    text: list[int] = []
    drafter.start(PROMPT, constraint=language)
    for _ in range(8):
        tree = drafted(drafter, SamplingConfig(1.0), 8)
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
            paths.append([*paths[parent], token])
            assert token == END or language.mask(paths[-1]) is not None
        step = language.forced() or [follows(tuple(text))[-1]]
        drafter.advance(step)
        language.advance(step)
        text += step


@pytest.mark.parametrize("vocab_size", [260, 320])
def test_a_draft_with_fewer_or_more_tokens(target: Model, random_gguf: Callable[..., Path], vocab_size: int) -> None:
    draft = Model(str(random_gguf(vocab_size=vocab_size, seed=1)), "", 1)
    lacking = dict.fromkeys(range(vocab_size, target.vocab_size), 7)
    for sampling in (SamplingConfig(), SamplingConfig(1.0)):
        plain = written(Context(Session(target)), sampling, Language(), speculate=False)
        drafter = drafters(target, draft, None, lacking)["tree"]
        assert written(Context(Session(target), drafter), sampling, Language()) == plain


def test_on_devices_all_logits_are_looked_at(random_gguf: Callable[..., Path]) -> None:
    """A pass there brings back the 64 largest, of which a mask may allow none."""
    session = Session(Model(str(random_gguf()), "", 1, device="ggml-cpu"))
    evaluate(session, [5], [-1])
    logits = session.logits(0)
    session.discard()
    worst = np.argsort(logits)[:3]
    mask = np.bitwise_or.reduce(only(worst), keepdims=True)
    for sampling in (SamplingConfig(), SamplingConfig(1.0, top_k=2)):
        _, tokens = verify(session, [5], [-1], sampling.native, masks=mask)
        session.rewind(0)
        assert tokens[0] in worst
    _, tokens = verify(session, [5], [-1], SamplingConfig().native, masks=mask)
    assert tokens[0] == worst[logits[worst].argmax()]
