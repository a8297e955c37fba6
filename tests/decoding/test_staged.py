"""Staged decoding writes what plain decoding writes, whatever drafts and whatever goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding import Said, drafted, generate, started, stepped, table_of, text_of
from support.random_models import RandomModel, add_pairs, gguf_file, write
from support.steps import Heard

import pystaged
from pystaged._core import ContextFullError, Model, RecycledCandidates, Session, Tokenizer
from pystaged.bench.pairs import LyingDrafter, Reckoned, continuation, drafters
from pystaged.bench.prompts import load_questions
from pystaged.decoding import stepper
from pystaged.decoding.account import Meter
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import fulfil_all
from pystaged.decoding.policy import BatchLoad, FixedPolicy, GainPolicy, Growth, TreePolicy
from pystaged.decoding.requests import Clocks, Verify, fulfil
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import LOOKUP_SECONDS, ContextProposer, lookups
from pystaged.drafting.model import ModelProposer
from pystaged.drafting.proposer import Proposal, Proposer
from pystaged.loading import names
from pystaged.loading.drafts import substitutes
from pystaged.options.config import SamplingConfig
from pystaged.stats import GenerationStats

KEPT = RecycledCandidates.num_candidates

GREEDY = SamplingConfig()
SAMPLINGS = {
    "greedy": GREEDY,
    "top-k": SamplingConfig(temperature=1.0, top_k=50),
    "top-p": SamplingConfig(temperature=0.8, top_p=0.95, seed=1),
    "no-filter": SamplingConfig(temperature=1.0, seed=2),
}
TREE, CHAIN = FixedPolicy(4, 5, 12), FixedPolicy(1, 6, 6, 1)


@pytest.fixture(scope="module")
def target(bundled_target: Path) -> Model:
    return Model(str(bundled_target))


@pytest.fixture(scope="module")
def draft(bundled_draft: Path) -> Model:
    return Model(str(bundled_draft))


@pytest.fixture(scope="module")
def tokenizer(bundled_target: Path) -> Tokenizer:
    return Tokenizer(str(bundled_target))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[NDArray[np.int32]]:
    texts = [question.text for question in load_questions(names.bundled_file(names.BUNDLED_PROMPTS))[::16]]
    return [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["top-p"]], ids=["greedy", "top-p"])
def test_no_memory_changes_the_text_and_it_guesses_what_was_said_before(
    sampling: SamplingConfig, target: Model, prompts: list[NDArray[np.int32]]
) -> None:
    session, memory = Session(target), RecycledCandidates()
    plain = [continuation(Context(session), prompt, sampling, 24) for prompt in prompts[:2]]
    steps = []
    for _ in range(2):
        drafter = TreeDrafter(lookups(recycled=memory), FixedPolicy(1, 12, 12), target.vocab_size)
        decoder = Context(session, drafter)
        texts = [list(generate(decoder, prompt, sampling, 24)) for prompt in prompts[:2]]
        assert [[token for step in text for token in step.tokens] for text in texts] == plain
        steps.append(sum(map(len, texts)))
    assert steps[1] < steps[0]


def test_what_fails_or_is_plain_teaches_nothing(random_gguf: Callable[..., Path]) -> None:
    target, memory = Model(str(random_gguf("Q8_0"))), RecycledCandidates()
    drafter = TreeDrafter(lookups(recycled=memory), FixedPolicy(1, 4, 4), target.vocab_size)
    decoder = Context(Session(target), drafter)
    prompt = np.array([3, 5, 7, 3, 5, 7, 3, 5], np.int32)
    assert list(generate(decoder, prompt, GREEDY, 4, speculate=False))
    assert memory.num_learnt == 0
    text = text_of(prompt).begin(decoder)
    while not isinstance(text.request, Verify):
        if text.request:
            fulfil([text.request])
            text.take()
        text.ask()
    assert text.request.num_candidates == memory.num_candidates
    text.request.error = MemoryError()
    text.take()
    assert isinstance(text.error, MemoryError)
    text.end()
    assert memory.num_learnt == 0
    continuation(decoder, prompt, GREEDY, 4)
    assert memory.num_learnt > 0
    assert memory.chances(3, 5)[1] == 2


def test_a_vocabulary_may_be_smaller_than_what_is_remembered_of_a_token(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", RandomModel("llama", vocab_size=KEPT - 4, vocabulary=lambda *_: None))
    target, memory = Model(str(tmp_path / "m.gguf")), RecycledCandidates()
    drafter = TreeDrafter(lookups(recycled=memory), FixedPolicy(1, 4, 4), target.vocab_size)
    prompt = np.array([3, 5, 7, 3, 5], np.int32)
    plain = continuation(Context(Session(target)), prompt, GREEDY, 12)
    assert continuation(Context(Session(target), drafter), prompt, GREEDY, 12) == plain
    assert len(memory.chances(-1, 5)[0]) == target.vocab_size


def test_guesses_from_below_save_passes(
    target: Model, draft: Model, prompts: list[NDArray[np.int32]], tokenizer: Tokenizer
) -> None:
    ways = drafters(target, draft, table_of(prompts, tokenizer))
    work = {}
    for name in ("tree", "one tree"):
        stats = GenerationStats()
        for _ in generate(Context(Session(target), ways[name]), prompts[0], GREEDY, 40, stats=stats):
            pass
        work[name] = stats
    tree, staged = work["tree"], work["one tree"]
    assert tree.stages["confirmed"].drafted == 0 < staged.stages["confirmed"].accepted
    assert staged.drafters["draft"].passes < tree.drafters["draft"].passes
    assert staged.drafters["draft"].nodes > staged.drafters["draft"].passes  # whole paths of guesses in one


def test_draft_with_a_shorter_context_than_the_target(random_gguf: Callable[..., Path]) -> None:
    target, draft = random_gguf("F32", context=96), random_gguf("F32", context=24, seed=1)
    with pystaged.load(target, draft=draft, policy=TREE) as engine:
        for prompt in ("x" * 10, "y" * 60):
            staged = engine.generate(prompt, max_tokens=99)
            assert staged.tokens == engine.generate(prompt, max_tokens=99, speculate=False).tokens
            assert staged.finish_reason == "length"
            assert len(staged.tokens) + staged.stats.prompt_tokens == 97


def test_a_draft_that_vanishes_after_loading_is_still_there(random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(random_gguf("F32", seed=1).read_bytes())
    with pystaged.load(random_gguf("F32"), draft=draft, policy=TREE) as engine:
        before = engine.generate("abc", max_tokens=20).tokens
        draft.unlink()
        assert engine.generate("abc", max_tokens=20).tokens == before
    draft.write_bytes(random_gguf("F32", seed=1).read_bytes())
    with pystaged.load(random_gguf("F32"), draft=draft) as engine, engine.stream("abc", max_tokens=20) as stream:
        next(stream)
        draft.unlink()
        # In a context of its own.
        assert engine.generate("abc", max_tokens=20).tokens == before
    with pytest.raises(FileNotFoundError, match=r"draft\.gguf"):
        pystaged.load(random_gguf("F32"), draft=draft)


class Breaking(Heard):
    """A session of which the tenth such call fails before anything has been done."""

    def __init__(self, session: Session, call: str) -> None:
        super().__init__(session, self.count)
        self.call, self.left = call, 10

    def count(self, name: str, *_: object) -> None:
        self.left -= name == self.call
        if name == self.call and self.left == 0:
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        self.count(name)
        return super().__getattr__(name)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "call"), [("target", "verify"), ("draft", "propose"), ("draft", "commit")])
def test_an_interrupt_in_mid_step_leaves_both_contexts_usable(
    which: str, call: str, target: Model, draft: Model, prompts: list[NDArray[np.int32]]
) -> None:
    expected = continuation(Context(Session(target)), prompts[1], GREEDY, 30)
    sessions: dict[str, Any] = {"target": Session(target), "draft": Session(draft)}
    sessions[which] = Breaking(sessions[which], call)
    drafter = TreeDrafter([ModelProposer(sessions["draft"])], TREE, target.vocab_size)
    decoder = Context(sessions["target"], drafter)
    with pytest.raises(KeyboardInterrupt):
        continuation(decoder, prompts[1], GREEDY, 60)
    assert sessions["target"].num_pending == 0
    assert continuation(decoder, prompts[1], GREEDY, 30) == expected


def test_a_prompt_longer_than_the_context(target: Model) -> None:
    decoder = Context(Session(target, 16))
    with pytest.raises(ContextFullError, match="the context of 16 tokens is full"):
        continuation(decoder, np.zeros(17, np.int32), GREEDY, 1)


def test_other_vocabularies_are_refused(random_gguf: Callable[..., Path], bundled_draft: Path) -> None:
    small = random_gguf("F32")
    with pytest.raises(ValueError, match=r"vocabulary.*token \d+ is"):
        pystaged.load(small, draft=bundled_draft)
    padded = Tokenizer(str(random_gguf("F32", vocab_size=300)))
    assert substitutes(padded, Tokenizer(str(small))) == {}


def test_substitutes_where_no_line_can_end(tmp_path: Path) -> None:
    tokenizers = []
    for name in ("x", "y"):
        path = tmp_path / f"{name}.gguf"
        with gguf_file(path, "llama") as writer:
            add_pairs(writer, [name, *"abcdefghijklm"], merges=["a b"])
        tokenizers.append(Tokenizer(path))
    assert substitutes(*tokenizers) == {0: 1}


# What the target's tokens are that a draft of so many tokens has not, or has as something else.
FOREIGN = {300: {280, 281, *range(299, 310)}, 310: {280, 281}, 320: {280, 281, 309}}


@pytest.fixture(scope="module")
def kin(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Models of a family by their number of tokens; at 0 the target: of 310, and with two marks that no draft has."""
    folder = tmp_path_factory.mktemp("kin")
    drafts = {size: write(folder / f"{size}.gguf", RandomModel("llama", vocab_size=size)) for size in FOREIGN}
    marks = {280: "<|im_start|>", 281: "<|im_end|>"}
    return {0: write(folder / "target.gguf", RandomModel("llama", vocab_size=310, marks=marks))} | drafts


@pytest.mark.parametrize("size", FOREIGN)
def test_what_a_draft_reads_for_tokens_it_lacks(kin: dict[int, Path], size: int) -> None:
    target, draft = Tokenizer(str(kin[0])), Tokenizer(str(kin[size]))
    found = substitutes(target, draft)
    assert found.keys() == FOREIGN[size]
    (neutral,) = set(found.values())
    assert draft.token_bytes(neutral) == target.token_bytes(neutral) == b"\n"


@pytest.mark.slow
@pytest.mark.parametrize("size", FOREIGN)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_of_another_vocabulary_change_nothing(kin: dict[int, Path], size: int, sampling: SamplingConfig) -> None:
    target, draft = Model(str(kin[0])), Model(str(kin[size]))
    session = Session(target, 128)
    found = substitutes(Tokenizer(str(kin[0])), Tokenizer(str(kin[size])))
    prompts = [np.array(prompt, np.int32) for prompt in ([280, 65, 10, 281, 300, 309], [1, 2, 3, 1, 2, 3], [281])]
    expected = [continuation(Context(session), prompt, sampling, 40) for prompt in prompts]
    for name, drafter in drafters(target, draft, None, found).items():
        decoder = Context(session, drafter)
        assert [continuation(decoder, prompt, sampling, 40) for prompt in prompts] == expected, name


@pytest.mark.parametrize("size", FOREIGN)
def test_tokens_of_the_target_alone_are_not_proposed(kin: dict[int, Path], size: int) -> None:
    """Nor does one end the drafting: the draft goes on behind what it read in its place."""
    target, draft = Model(str(kin[0])), Model(str(kin[size]))
    found = substitutes(Tokenizer(str(kin[0])), Tokenizer(str(kin[size])))
    session = Session(draft, 256)
    drafter = TreeDrafter([ModelProposer(session, substitutes=found)], FixedPolicy(8, 2, 31, 8), target.vocab_size)
    sampling = SamplingConfig(temperature=1.5, seed=3)
    prompt = np.array([280, 65, 309, 281], np.int32)
    text, after = prompt.tolist(), 0
    for step in generate(Context(Session(target, 256), drafter), prompt, sampling, 150):
        assert not found.keys() & set(step.tree.tokens[1:].tolist())
        assert len(step.tree.tokens) > 1 or step.finish_reason
        after += text[-1] in found
        text += step.tokens
    assert after > 0
    read = session.tokens.tolist()
    assert len(read) > 100
    assert read == [found.get(token, token) for token in text][: len(read)]


def test_a_draft_agrees_where_vocabularies_do(kin: dict[int, Path]) -> None:
    """With the same weights all it proposes is right, unless the target writes one of the two tokens it lacks."""
    target, draft = Model(str(kin[0])), Model(str(kin[310]))
    found = substitutes(Tokenizer(str(kin[0])), Tokenizer(str(kin[310])))
    drafter = TreeDrafter([ModelProposer(Session(draft, 256), substitutes=found)], CHAIN, 310)
    sampling, stats = SamplingConfig(temperature=1.0, seed=1), GenerationStats()
    prompt = np.array([65, 66, 67], np.int32)
    text = continuation(Context(Session(target, 256)), prompt, sampling, 30)
    steps = generate(Context(Session(target, 256), drafter), prompt, sampling, 30, stats=stats)
    assert [token for step in steps for token in step.tokens] == text
    assert stats.accepted > 0
    assert found.keys() & set(text) or stats.accepted == stats.drafted


def test_own_policy_is_asked() -> None:
    class Recorder:
        children = 2

        def __init__(self) -> None:
            self.seen: list[pystaged.Growth] = []

        def expand(self, growth: pystaged.Growth) -> int:
            self.seen.append(growth)
            return sum(score > 0.5 for score in growth.leaves) if growth.passes < 3 else 0

        def keep(self, growth: pystaged.Growth) -> int:
            return min(3, len(growth.scores))

    policy = Recorder()
    with pystaged.load("bundled", policy=policy) as engine:
        result = engine.generate("import os\n", max_tokens=20)
        assert result.tokens == engine.generate("import os\n", max_tokens=20, speculate=False).tokens
    assert policy.seen
    assert all(list(growth.scores) == sorted(growth.scores, reverse=True) for growth in policy.seen)
    assert result.stats.drafted <= 3 * result.stats.steps


def test_a_drafter_that_was_interrupted_once_is_used_again(target: Model, prompts: list[NDArray[np.int32]]) -> None:
    class Interrupted(LyingDrafter):
        late = iter((0.0, 50.0, 0.0))

        def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> None:
            now[0] += next(self.late)
            super().draft(sampling, max_depth, seconds)

    now = [0.0]
    decoder = Context(
        Session(target), Interrupted(target.vocab_size), cost=PassCost({1: 1.0, 32: 1.0}), meter=Meter(lambda: now[0])
    )
    sizes = []
    for prompt in (*prompts[:2], prompts[0]):
        started(decoder, prompt)
        sizes.append(len(stepped(decoder, GREEDY, 50).tree))
    # Of a tree that came so late only the first guess is verified.
    assert sizes[1] == 2 < sizes[2] == sizes[0]
    decoder.close()


def test_progress_and_an_interrupt_of_a_prompt(draft: Model) -> None:
    prompt = (np.arange(600) * 7 % 250).astype(np.int32)
    expected = continuation(Context(Session(draft)), prompt, GREEDY, 8)
    decoder, calls = Context(Session(draft)), list[tuple[int, int]]()

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        started(decoder, prompt, progress=progress)
    assert calls == [(0, 599), (256, 599), (512, 599)]
    # What was read is not read again.
    assert decoder.target.tokens.tolist() == prompt[:512].tolist()
    stats = GenerationStats()
    text = text_of(prompt, GREEDY, 8, stats=stats, progress=progress, queue=Said()).begin(decoder)
    while not text.finish:
        stepper.Stepper(None).step([text])
    assert text.tokens == expected
    assert calls[3:] == [(0, 87), (87, 87)]
    assert stats.reused_tokens == 512


class SlowSession(Heard):
    """A session of which each pass takes a second of a simulated clock, and a token of a prompt a tenth."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, self.wait)
        self.now, self.clocks = 0.0, Clocks(lambda: self.now, lambda: self.now)

    def wait(self, kind: str, tokens: Sequence[int], *_: object) -> None:
        self.now += 0.1 * len(tokens) if kind == "read" else 1.0


def slow(draft: Model, cost: PassCost, policy: TreePolicy = CHAIN) -> tuple[SlowSession, TreeDrafter]:
    """Such a session of a draft, and a drafter that believes these costs."""
    session: Any = SlowSession(Session(draft))
    meter = Meter(session.clocks.processor)
    return session, TreeDrafter([ModelProposer(session, cost)], policy, draft.vocab_size, meter=meter)


@pytest.mark.parametrize("seconds", [0.5, 1.0, 3.5, 100.0])
def test_a_draft_stops_where_the_next_pass_would_not_fit(draft: Model, seconds: float) -> None:
    session, drafter = slow(draft, PassCost({1: 1.0, 32: 1.0}))
    drafter.start(np.arange(5, dtype=np.int32))
    assert drafter.price() == 1.0
    tree = drafted(drafter, GREEDY, 20, seconds, clocks=session.clocks)
    assert session.now <= max(seconds, 1.0)
    assert drafter.work()["draft"].passes == len(tree) - 1 == min(max(int(seconds), 1), 6)
    # What was not read is read with the next pass.
    drafter.advance([7])
    assert len(drafted(drafter, GREEDY, 20)) == 7


@pytest.mark.parametrize("shares", [True, False])
def test_a_batch_pays_a_text_its_part_of_the_passes_that_all_share(draft: Model, shares: bool) -> None:
    seen: list[Growth] = []

    class Seen(GainPolicy):
        def keep(self, growth: Growth) -> int:
            seen.append(growth)
            return super().keep(growth)

    cost, policy = PassCost({1: 1.0, 32: 2.0}), Seen(PassCost({1: 90.0, 32: 90.0}), batch=BatchLoad(8, 7, 7.0))
    session: Any = Session(draft) if shares else SlowSession(Session(draft))  # which makes its passes, as RPC does
    drafter = TreeDrafter([ModelProposer(session, cost)], policy, draft.vocab_size)
    drafter.start(np.arange(5, dtype=np.int32))
    drafter.catch_up()
    fulfil_all(drafter)
    drafted(drafter, GREEDY, 20)
    passes = drafter.work()["draft"].passes
    assert passes >= 2
    assert passes * cost(1) / 8 < seen[-1].seconds
    assert (seen[-1].seconds < passes) == shares


def test_a_chain_is_drafted_by_lookups_where_the_draft_does_not_pay(draft: Model) -> None:
    proposers: list[Proposer] = [*lookups(), ModelProposer(Session(draft), PassCost({1: 99.0, 32: 99.0}))]
    policy = GainPolicy(PassCost({1: 1.0, 32: 1.0}))
    drafter = TreeDrafter(proposers, policy, draft.vocab_size, chains=True)
    drafter.start(np.array([1, 2, 3] * 5, np.int32))
    assert drafted(drafter, GREEDY, 6).tokens.tolist() == [3, 1, 2, 3, 1, 2, 3]
    assert drafter.work()["draft"].passes == 0


def test_a_prompt_is_read_as_far_as_the_seconds_reach(draft: Model) -> None:
    session, drafter = slow(draft, PassCost({1: 1.0, 32: 32.0}))  # reading is believed to take a second for a token
    text = (np.arange(201) % 50).astype(np.int32)
    drafter.start(text)
    assert drafter.lag() == 200.0
    drafter.catch_up(7.0)
    fulfil_all(drafter, session.clocks)
    assert (session.now, len(session.session.tokens)) == (0.0, 0)
    # It takes a tenth of that, so there is time for more and more.
    drafter.catch_up(33.0)
    fulfil_all(drafter, session.clocks)
    assert session.now == pytest.approx(20.0)
    assert session.session.tokens.tolist() == text[:-1].tolist()
    drafter.start(text + 1)
    # Drafting reads the text too, or gives up.
    assert len(drafted(drafter, GREEDY, 20, 5.0, clocks=session.clocks)) == 1
    assert session.now <= 20.0 + 5.0


def test_drafters_tell_how_long_the_text_is_and_price_what_it_costs_there(draft: Model) -> None:
    seen: list[int] = []
    learnt: list[float] = []

    class Fixed(PassCost):
        def observe(self, num_rows: int, cells: float, seconds: float, share: float = 1.0) -> None:
            del num_rows, seconds, share
            learnt.append(cells)

    class Watching(FixedPolicy):
        def expand(self, growth: Growth) -> int:
            seen.append(growth.cells)
            return super().expand(growth)

    policy = Watching(width=1, depth=2, budget=2, children=1)
    session, model = slow(draft, Fixed({1: 1.0, 32: 32.0}, {1: 2.0, 32: 64.0}), policy)
    for length in (31, 501):
        text = (np.arange(length) % 10).astype(np.int32)
        for drafter in (model, TreeDrafter(lookups(), policy, draft.vocab_size)):
            seen.clear()
            drafter.start(text)
            drafter.catch_up()
            fulfil_all(drafter, session.clocks)
            drafted(drafter, GREEDY, 20, clocks=session.clocks)
            assert set(seen) == {length - 1}
        assert learnt == [length - 1] * 2
        learnt.clear()
        model.start(text)
        assert model.price() == pytest.approx(1 + 2 * (length - 1) / 1000)
        # Three tokens that it has not read yet ride along with the root.
        model.advance([1, 2, 3])
        assert model.lag() == pytest.approx(3 * model.price())
    # A longer text is dearer to read.
    model.start(text[::-1].copy())
    whole = model.lag()
    model.start(text[::-1][:251].copy())
    assert 2 * model.lag() < whole


@pytest.mark.parametrize("number", [0, 1, 3])
def test_lookups_stop_where_the_next_one_would_not_fit(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pystaged.drafting.lookups, "READ_SECONDS", 0.01)
    now = [0.0]

    class Ticking(ContextProposer):
        def after(self, tail: list[int]) -> Proposal:
            now[0] += 1.0
            return super().after(tail)

    meter = Meter(lambda: now[0])
    proposer = Ticking()
    policy = GainPolicy(PassCost({1: 1000.0, 32: 1000.0}), children=1)
    drafter = TreeDrafter([proposer], policy, 300, cost=PassCost({1: 1.0}), meter=meter)
    drafter.start(np.array([1, 2, 3] * 20, np.int32))
    assert (drafter.lag(), drafter.price()) == (pytest.approx(0.6), 1.0)
    tree = drafted(drafter, GREEDY, 20, 0.7 + number)
    assert drafter.work()["ngram"].passes == now[0] == len(tree) - 1 == number


def test_lookups_of_a_tree_are_paid_for() -> None:
    """However much they may gain, they stop where the seconds end."""
    drafter = TreeDrafter(lookups(), GainPolicy(PassCost({1: 1.0, 32: 1.0})), 300, cost=Reckoned(1.0, 1.0))
    for seconds in (1.5, 4.5, 40.5):
        drafter.start(np.array([*range(20, 60)] * 3, np.int32))
        before = drafter.work()["ngram"].passes
        tree = drafted(drafter, GREEDY, 40, seconds)
        assert drafter.work()["ngram"].passes - before == min(int(seconds), 32)  # what is worth it is reckoned for four
        assert len(tree) - 1 == min(int(seconds), 31)


def test_costs_of_lookups_are_refined_where_they_are_made() -> None:
    cost = PassCost({1: LOOKUP_SECONDS})
    drafter = TreeDrafter(lookups(), CHAIN, 300, cost=cost)
    drafter.start(np.array([1, 2, 3] * 40, np.int32))
    drafted(drafter, GREEDY, 20)
    assert cost(1) != LOOKUP_SECONDS
