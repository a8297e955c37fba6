"""Draft heads beside a numpy twin; the hidden states that they read; and texts, which no head changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from support.draft_heads import RandomHead, SlowHead, write
from support.kernels import KERNELS
from support.random_models import RandomModel
from support.random_models import write as write_model

import pystaged
from pystaged import Engine, ModelError, Stage
from pystaged._core import DraftHead, Model, Sampling, Session, Tokenizer, Work, run
from pystaged.config import SamplingConfig
from pystaged.decoding.cost import PassCost
from pystaged.decoding.decoder import Decoder
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import FixedPolicy
from pystaged.decoding.requests import MOST_ROWS, finish
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.head import HeadProposer
from pystaged.drafting.lookups import NgramCost, lookups
from pystaged.loading import heads, names
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import DecoderFactory
from pystaged.loading.metadata import is_head

Floats = npt.NDArray[np.float32]

SHAPE = RandomModel("llama", layers=3, head_dim=32)
GREEDY = Sampling()
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-k": {"temperature": 1.0, "top_k": 50, "seed": 3},
    "top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 4},
}
TOKENS = list(range(1, 300, 2))


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "target.gguf", SHAPE)


@pytest.fixture(scope="module")
def vocabulary(target_path: Path) -> str:
    return Tokenizer(target_path).fingerprint


@pytest.fixture(scope="module")
def head_path(target_path: Path, vocabulary: str) -> Path:
    return write(target_path.with_name("head.gguf"), random_head(vocabulary))


def random_head(vocabulary: str, **changes: Any) -> RandomHead:
    return RandomHead(vocabulary, **{"tokens": TOKENS, "taps": [1, 3], "target_layers": 3} | changes)


def tensor(path: Path, name: str) -> Floats:
    return next(np.array(each.data) for each in GGUFReader(path).tensors if each.name == name)


def tapped(path: Path, layers: list[int], **options: Any) -> Session:
    model = Model(path, **options)
    model.tap(layers)
    return Session(model)


# --- hidden states ---


def test_states_are_those_that_a_shorter_model_ends_with(target_path: Path, tmp_path: Path) -> None:
    rows = ([5, 6, 7], [-1, 0, 1])
    session = tapped(target_path, [1, 2, 3])
    session.prefill([1, 2, 3, 4])
    session.verify(*rows, GREEDY, masks=only([6, 7, 8]))
    states = session.states
    assert states.shape == (3, 3, SHAPE.width)

    def same_weights(found: dict[str, Floats]) -> None:
        found |= {name: tensor(target_path, name) for name in found}

    shorter = write_model(tmp_path / "shorter.gguf", RandomModel("llama", layers=2, head_dim=32), same_weights)
    other = tapped(shorter, [2])
    other.prefill([1, 2, 3, 4])
    other.verify(*rows, GREEDY, masks=only([6, 7, 8]))
    np.testing.assert_array_equal(other.states[:, 0], states[:, 1])


def only(tokens: list[int]) -> npt.NDArray[np.uint32]:
    """Masks that allow one token each."""
    masks = np.zeros((len(tokens), max(tokens) // 32 + 1), np.uint32)
    for row, token in enumerate(tokens):
        masks[row, token // 32] = 1 << token % 32
    return masks


def test_the_last_layers_state_makes_the_logits(target_path: Path) -> None:
    session = tapped(target_path, [3])
    session.verify([5], [-1], GREEDY)
    state = session.states[0, 0].astype(np.float64)
    normed = state / np.sqrt((state * state).mean() + 1e-6) * tensor(target_path, "output_norm.weight")
    again = Session(session_model := Model(target_path))
    again.evaluate([5], [-1])
    expected = tensor(target_path, "token_embd.weight").astype(np.float64) @ normed
    np.testing.assert_allclose(again.logits(0), expected, atol=1e-4)
    assert session_model.taps == []


def test_states_are_those_of_the_path_alone(target_path: Path) -> None:
    session, chain = tapped(target_path, [2, 3]), tapped(target_path, [2, 3])
    for each in (session, chain):
        each.prefill([1, 2, 3])
    # A tree whose second branch is followed.
    path, tokens = session.verify([4, 9, 5, 6], [-1, 0, 0, 2], GREEDY, masks=only([5, 0, 6, 7]))[:2]
    assert path.tolist() == [0, 2, 3]
    assert tokens.tolist() == [5, 6, 7]
    chain.verify([4, 5, 6], [-1, 0, 1], GREEDY, masks=only([5, 6, 7]))
    np.testing.assert_array_equal(session.states, chain.states)


def test_states_are_the_same_in_shared_passes_and_in_several(target_path: Path) -> None:
    model = Model(target_path)
    model.tap([1, 3])
    sessions = [Session(model) for _ in range(3)]
    works = []
    for i, session in enumerate(sessions):
        session.prefill(list(range(1, 4 + i)))
        works.append(Work.verify(session, [4 + i, 5, 6], [-1, 0, 1], GREEDY, masks=only([5, 6, 7])))
    run(works)
    for i, session in enumerate(sessions):
        alone = Session(model)
        alone.prefill(list(range(1, 4 + i)))
        alone.verify([4 + i, 5, 6], [-1, 0, 1], GREEDY, masks=only([5, 6, 7]))
        np.testing.assert_array_equal(session.states, alone.states)
    # A chain that takes two passes, beside the same one in two calls.
    tokens = [(7 * i) % 290 for i in range(MOST_ROWS + 40)]
    long, short = Session(model), Session(model)
    masks = only([*tokens[1:], 1])
    long.verify(tokens, range(-1, len(tokens) - 1), GREEDY, masks=masks)
    short.verify(tokens[:50], range(-1, 49), GREEDY, masks=masks[:50])
    np.testing.assert_array_equal(long.states[:50], short.states)
    short.verify(tokens[50:], range(-1, len(tokens) - 51), GREEDY, masks=masks[50:])
    np.testing.assert_array_equal(long.states[50:], short.states)


def test_states_of_a_text_that_changed_otherwise_are_none(target_path: Path) -> None:
    session = tapped(target_path, [1])
    assert session.states.shape == (0, 1, SHAPE.width)

    def verified() -> None:
        session.verify([5], [-1], GREEDY)
        assert len(session.states) == 1

    verified()
    session.rewind(len(session.tokens))
    assert len(session.states) == 0
    verified()
    assert len(session.fork(1).states) == 0
    session.prefill([3])
    assert len(session.states) == 0
    verified()
    session.evaluate([4], [-1])
    session.commit([0])
    assert len(session.states) == 0
    verified()
    with pytest.raises(ValueError, match="parent"):
        session.verify([5, 6], [-1, 7], GREEDY)
    assert len(session.states) == 1  # a call that failed left all as it was
    session.stretch(20)
    assert len(session.states) == 0
    assert Session(Model(target_path)).states.shape == (0, 0, SHAPE.width)


def test_what_cannot_be_tapped(target_path: Path) -> None:
    model = Model(target_path)
    for layers in ([0], [4], [2, 2], [3, 1], [-1]):
        with pytest.raises(ValueError, match="from 1 to the model's 3"):
            model.tap(layers)
    with pytest.raises(ValueError, match="CPU's own kernels"):
        Model(target_path, device="ggml-cpu").tap([1])
    model.tap([1, 2])
    session = Session(model)
    with pytest.raises(ValueError, match="has sessions"):
        model.tap([1])
    assert session.states.shape == (0, 2, SHAPE.width)
    session.close()
    model.tap([])


# --- the head's arithmetic ---


@pytest.mark.parametrize(("quantization", "tolerance"), [("F32", 2e-5), ("F16", 2e-5), ("Q8_0", 0.06), ("Q4_0", 0.06)])
def test_steps_are_the_twins(
    quantization: str, tolerance: float, target_path: Path, vocabulary: str, tmp_path: Path
) -> None:
    head = random_head(vocabulary, quantization=quantization)
    native = DraftHead(write(tmp_path / "head.gguf", head))
    slow = SlowHead(head, tensor(target_path, "token_embd.weight"))
    assert (native.name, native.taps, native.width) == ("a random head", [1, 3], 64)
    assert native.tokens.tolist() == TOKENS
    session = tapped(target_path, native.taps)
    session.verify([5], [-1], GREEDY)
    model = session_model(target_path, native)
    state, expected = native.begin(model, session.states[-1]), slow.begin(session.states[-1])
    np.testing.assert_allclose(state, expected, atol=tolerance)
    for token in (7, 250, 0):
        after, candidates, logprobs = native.step(model, state[None], [token], len(TOKENS))
        expected, chances = slow.step(state.astype(np.float64), token)
        np.testing.assert_allclose(after[0], expected, atol=2 * tolerance)
        by_token = dict(zip(TOKENS, chances.tolist(), strict=True))
        np.testing.assert_allclose(logprobs[0], [by_token[each] for each in candidates[0].tolist()], atol=3 * tolerance)
        assert sorted(candidates[0].tolist()) == TOKENS
        assert (np.diff(logprobs[0]) <= 0).all()
        state = after[0]


def session_model(path: Path, head: DraftHead, kernel: str = "") -> Model:
    model = Model(path, kernel)
    model.tap(head.taps)
    return model


def test_a_row_is_the_same_beside_others_and_on_every_kernel(
    target_path: Path, vocabulary: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "head.gguf", random_head(vocabulary, quantization="Q8_0"))
    states = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    tokens = list(range(20, 29))
    found = []
    for kernel in KERNELS:
        head = DraftHead(path, kernel)
        model = session_model(target_path, head, kernel)
        together = head.step(model, states, tokens, 8)
        for i, token in enumerate(tokens):
            for part, whole in zip(head.step(model, states[i : i + 1], [token], 8), together, strict=True):
                np.testing.assert_array_equal(part[0], whole[i])
        found.append(together)
    for other in found[1:]:
        for part, whole in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(part, whole)


def test_what_a_step_refuses(target_path: Path, head_path: Path) -> None:
    head = DraftHead(head_path)
    model = session_model(target_path, head)
    state = np.zeros((1, 64), np.float32)
    for states, tokens, k, what in [
        (state, [300], 1, "outside the vocabulary"),
        (state, [-1], 1, "outside the vocabulary"),
        (state, [1, 2], 1, "shape"),
        (state[:, :32], [1], 1, "shape"),
        (state, [1], -1, "k must be"),
        (state, [1], len(TOKENS) + 1, "k must be"),
    ]:
        with pytest.raises(ValueError, match=what):
            head.step(model, states, tokens, k)
    with pytest.raises(ValueError, match="one row"):
        head.begin(model, np.zeros((1, 64), np.float32))
    with pytest.raises(ValueError, match="another model"):
        head.step(Model(target_path), state, [1], 1)
    assert head.step(model, state[:0], [], 1)[0].shape == (0, 64)
    silent, said = head.step(model, state, [1], 0), head.step(model, state, [1], 1)
    np.testing.assert_array_equal(silent[0], said[0])
    assert silent[1].shape == (1, 0)


# --- files ---


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"width": 60}, "multiples of 32"),
        ({"metadata": {"taps": []}}, "taps"),
        ({"metadata": {"taps": None}}, "taps"),
        ({"metadata": {"taps": [3, 1]}}, "out of range or order"),
        ({"metadata": {"tokens": list(reversed(TOKENS))}}, "out of range or order"),
        ({"metadata": {"tokens": [-1, *TOKENS[1:]]}}, "out of range or order"),
        ({"metadata": {"tokens": TOKENS[1:]}}, "output.weight"),
        ({"metadata": {"block_count": 3}}, "blk.2"),
        ({"metadata": {"block_count": 1 << 30}}, "block_count"),
        ({"metadata": {"embedding_length": 128}}, "state_norm.weight"),
        ({"metadata": {"embedding_length": None}}, "embedding_length"),
        ({"metadata": {"attention.layer_norm_rms_epsilon": -1.0}}, "epsilon"),
    ],
)
def test_damaged_heads_are_refused(changes: dict[str, Any], what: str, vocabulary: str, tmp_path: Path) -> None:
    path = write(tmp_path / "head.gguf", random_head(vocabulary, **changes))
    with pytest.raises(ModelError, match=what):
        DraftHead(path)


def test_weights_that_are_not_finite(target_path: Path, vocabulary: str, tmp_path: Path) -> None:
    head = random_head(vocabulary)
    broken = {"output_norm.weight": np.full(64, np.inf, np.float32)}
    with pytest.raises(ModelError, match="finite"):
        DraftHead(write(tmp_path / "infinite.gguf", head, broken))
    huge = {name: values * np.float32(1e30) for name, values in head.tensors().items() if "weight" in name}
    native = DraftHead(write(tmp_path / "huge.gguf", head, huge))
    with pytest.raises(ModelError, match="finite"):
        native.step(session_model(target_path, native), np.ones((1, 64), np.float32), [1], 1)


def test_a_model_is_no_head(target_path: Path, head_path: Path) -> None:
    with pytest.raises(ModelError, match="no draft head"):
        DraftHead(target_path)
    with pytest.raises(ModelError, match="draft-head"):
        Model(head_path)
    assert is_head(head_path)
    assert not is_head(target_path)
    with pytest.raises(ValueError, match="is a draft, not a model"):
        pystaged.load(head_path)


def test_heads_of_other_targets_are_refused(
    target_path: Path, head_path: Path, vocabulary: str, tmp_path: Path
) -> None:
    other = write(tmp_path / "vocabulary.gguf", random_head("another"))
    with pytest.raises(ValueError, match="another vocabulary"):
        pystaged.load(target_path, draft=other, recycle=False)
    deeper = write(tmp_path / "deeper.gguf", random_head(vocabulary, taps=[4]))
    with pytest.raises(ValueError, match="from 1 to the model's 3"):
        pystaged.load(target_path, draft=deeper, recycle=False)
    other_depth = write(tmp_path / "depth.gguf", random_head(vocabulary, target_layers=4))
    with pytest.raises(ValueError, match="another depth than 3 layers"):
        pystaged.load(target_path, draft=other_depth, recycle=False)
    wider = write(tmp_path / "wider.gguf", random_head(vocabulary, width=96))
    with pytest.raises(ValueError, match="96 wide, not 64"):
        pystaged.load(target_path, draft=wider, recycle=False)
    with pytest.raises(ValueError, match="choose the device cpu"):
        pystaged.load(target_path, draft=head_path, device="ggml-cpu", recycle=False)


# --- drafting ---


@pytest.fixture(scope="module")
def engine(target_path: Path, head_path: Path) -> Engine:
    return pystaged.load(target_path, draft=head_path, recycle=True, policy=FixedPolicy(3, 4, 12))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_texts_are_those_without_a_head(sampling: dict[str, Any], engine: Engine) -> None:
    plain = engine.generate("a text", max_tokens=60, speculate=False, **sampling)
    drafted = engine.generate("a text", max_tokens=60, **sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafters["draft"].passes > 0
    several = engine.generate(["a text", "another one"], n=2, max_tokens=30, **sampling)
    seed = sampling.get("seed", 0)
    alone = [
        engine.generate(prompt, max_tokens=30, speculate=False, **sampling | {"seed": seed + i})
        for prompt in ("a text", "another one")
        for i in range(2)
    ]
    assert [each.tokens for each in several] == [each.tokens for each in alone]


def test_texts_of_a_given_form(engine: Engine) -> None:
    forms = {"regex": r"(ab|cd)(, (ab|cd)){2,4}\."}
    plain = engine.generate("a", max_tokens=40, speculate=False, **forms)
    assert engine.generate("a", max_tokens=40, **forms).tokens == plain.tokens


def test_what_the_head_says_becomes_the_tree(target_path: Path, head_path: Path, vocabulary: str) -> None:
    model = Model(target_path)
    head = heads.load_head(head_path, model, Tokenizer(target_path))
    session = Session(model)
    drafter = TreeDrafter([*lookups(), HeadProposer(head, model, session)], FixedPolicy(1, 3, 3, 1), model.vocab_size)
    decoder = Decoder(session, drafter)
    slow = SlowHead(random_head(vocabulary), tensor(target_path, "token_embd.weight"))
    seen, before = 0, np.zeros((2, 64), np.float32)
    for first in range(12):
        text = [first, 100 + first, 200 + first]
        for number, step in enumerate(decoder.generate(np.array(text, np.int32), SamplingConfig(), 6)):
            if number == 0:
                assert len(step.tree) == 1  # no state is known yet, and no n-grams
            elif len(step.tree) == 4 and len(set(text)) == len(text):
                # Where the text does not repeat itself, the head alone speaks.
                expected, token, state = [], text[-1], slow.begin(before)
                for _ in range(3):
                    state, chances = slow.step(state, token)
                    token = TOKENS[int(chances.argmax())]
                    expected.append(token)
                assert step.tree.tokens[1:].tolist() == expected
                assert set(step.tree.stages[1:].tolist()) == {Stage.DRAFT}
                seen += 1
            text += step.tokens
            before = session.states[-1]
    assert seen > 6


class Forced:
    """A text that must begin with some tokens, after which anything goes."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def forced(self) -> list[int]:
        return self._tokens

    def mask(self, path: list[int]) -> npt.NDArray[np.uint32] | None:
        del path
        return np.full(10, 0xFFFFFFFF, np.uint32)


def test_forced_tokens_are_taken_in_and_cost_no_lookups(target_path: Path, head_path: Path, vocabulary: str) -> None:
    model = Model(target_path)
    head = heads.load_head(head_path, model, Tokenizer(target_path))
    session = Session(model)
    session.prefill([3, 4])
    session.verify([5], [-1], GREEDY, masks=only([6]))
    now = [0.0]

    class Slow:
        """The head, each of whose steps takes a second."""

        width, tokens, weight_bytes = head.width, head.tokens, head.weight_bytes
        check, begin = head.check, head.begin

        def step(self, *given: Any) -> Any:
            now[0] += 1.0
            return head.step(*given)

    cost = NgramCost(PassCost({1: 1.0, 2: 1.0}), PassCost({1: 1e-9}))
    slow_head: Any = Slow()
    drafter = TreeDrafter(
        [*lookups(cost=cost), HeadProposer(slow_head, model, session)],
        FixedPolicy(1, 2, 6, 1),
        model.vocab_size,
        cost=cost.lookup,
        meter=Meter(lambda: now[0]),
    )
    drafter.start(np.array([3, 4, 5, 6], np.int32))
    constraint: Any = Forced([10, 11, 12])
    drafter.constrain(constraint)
    tree = finish(drafter.draft(SamplingConfig(), 8))
    slow = SlowHead(random_head(vocabulary), tensor(target_path, "token_embd.weight"))
    state = slow.begin(session.states[-1])
    for token in (6, 10, 11, 12):
        state, chances = slow.step(state, token)
    guess = TOKENS[int(chances.argmax())]
    assert tree.tokens[:5].tolist() == [6, 10, 11, 12, guess]
    assert tree.stages[1:5].tolist() == [Stage.GRAMMAR] * 3 + [Stage.DRAFT]
    assert cost.lookup(1) == pytest.approx(1.0, rel=0.01)
    # With seconds for two steps alone, n-grams are left, which know nothing.
    now[0] = 0.0
    drafter.start(np.array([3, 4, 5, 6], np.int32))
    assert finish(drafter.draft(SamplingConfig(), 8, 1.5)).tokens.tolist() == [6, 10, 11, 12]
    assert now[0] <= 3


def test_heads_of_few_tokens_and_heads_that_overflow_draft_all_the_same(
    target_path: Path, vocabulary: str, tmp_path: Path
) -> None:
    few = write(tmp_path / "few.gguf", random_head(vocabulary, tokens=[5, 9, 200]))
    head = random_head(vocabulary)
    huge = {name: values * np.float32(1e30) for name, values in head.tensors().items()}
    overflowing = write(tmp_path / "overflowing.gguf", head, huge)
    plain = pystaged.load(target_path, draft=None, recycle=False).generate("a text", max_tokens=30)
    with pystaged.load(target_path, draft=few, recycle=False, policy=FixedPolicy(2, 3, 6)) as engine:
        assert engine.generate("a text", max_tokens=30).tokens == plain.tokens
    model = Model(target_path)
    broken = heads.load_head(overflowing, model, Tokenizer(target_path))
    session = Session(model)
    proposers = [*lookups(), HeadProposer(broken, model, session)]
    decoder = Decoder(session, TreeDrafter(proposers, FixedPolicy(2, 3, 6), model.vocab_size))
    prompt = Tokenizer(target_path).encode("a text")
    assert [token for step in decoder.generate(prompt, SamplingConfig(), 30) for token in step.tokens] == plain.tokens


def test_a_head_learns_nothing_of_a_text_that_was_closed(target_path: Path, head_path: Path) -> None:
    with pystaged.load(target_path, draft=head_path, recycle=False, policy=FixedPolicy(2, 3, 6)) as engine:
        with engine.stream("a text", max_tokens=40) as stream:
            next(stream)
        again = engine.generate("a text and more", max_tokens=30)
        assert again.tokens == engine.generate("a text and more", max_tokens=30, speculate=False).tokens


def test_which_head_is_found(target_path: Path, head_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "heads", lambda: [target_path.with_name("missing.gguf"), head_path])
    found = Bundle(target_path, "auto", 1, lambda _: None)
    assert found.head is not None
    assert found.target.taps == [1, 3]
    assert DecoderFactory(found).head_cost is not None
    assert Bundle(target_path, None, 1, lambda _: None).head is None
    assert Bundle(target_path, "auto", 1, lambda _: None, device="ggml-cpu").head is None
    assert Bundle("bundled", "none", 1, lambda _: None).head is None
    told: list[str] = []
    damaged = target_path.with_name("damaged.gguf")
    damaged.write_bytes(head_path.read_bytes()[:-3000])
    monkeypatch.setattr(names, "heads", lambda: [damaged])
    assert Bundle(target_path, "auto", 1, told.append).head is None
    assert any("passed over" in line and "damaged.gguf" in line for line in told)
    monkeypatch.setattr(names, "heads", lambda: [head_path])
    engine = pystaged.load(target_path, recycle=False)
    assert engine.draft is None
    assert engine.draft_name == "a random head"
    kept = pystaged.load(target_path, recycle=False, weight_cache=True, kv="q8_0")
    assert kept.generate("a", max_tokens=20).tokens == kept.generate("a", max_tokens=20, speculate=False).tokens


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    with pytest.raises(ModelError, match=re.escape(str(path))):
        DraftHead(path)
