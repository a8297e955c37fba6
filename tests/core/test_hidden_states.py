"""The hidden states that drafts read: a target hands out those of the rows that a call committed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from support.random_models import RandomModel, write
from support.steps import evaluate, prefill, verify

from pystaged._core import Model, Sampling, Session, Work, run
from pystaged.decoding.requests import MOST_ROWS, only

Floats = npt.NDArray[np.float32]

SHAPE = RandomModel("llama", layers=3, head_dim=32, context=1024)
TAPS = [1, 3]
TOKENS = np.random.default_rng(1).integers(0, 300, 700, dtype=np.int32)  # several passes
GREEDY = Sampling()


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("target") / "target.gguf", SHAPE)


def tensor(path: Path, name: str) -> Floats:
    return next(np.array(each.data) for each in GGUFReader(path).tensors if each.name == name)


def tapped(path: Path, layers: list[int], **how: bool) -> Model:
    """A model that keeps what its texts' rows have behind these layers; of readings all rows, or the last, or none."""
    model = Model(path)
    model.tap(layers, **how)
    return model


def test_states_are_those_that_a_shorter_model_ends_with(target_path: Path, tmp_path: Path) -> None:
    rows = ([5, 6, 7], [-1, 0, 1])
    session = Session(tapped(target_path, [1, 2, 3]))
    prefill(session, [1, 2, 3, 4])
    verify(session, *rows, GREEDY, masks=only(np.array([6, 7, 8])))
    states = session.hidden.numpy()
    assert states.shape == (3, 3 * SHAPE.width)

    def same_weights(found: dict[str, Floats]) -> None:
        found |= {name: tensor(target_path, name) for name in found}

    shorter = write(tmp_path / "shorter.gguf", RandomModel("llama", layers=2, head_dim=32, context=1024), same_weights)
    other = Session(tapped(shorter, [2]))
    prefill(other, [1, 2, 3, 4])
    verify(other, *rows, GREEDY, masks=only(np.array([6, 7, 8])))
    np.testing.assert_array_equal(other.hidden.numpy(), states[:, SHAPE.width : 2 * SHAPE.width])


def test_the_last_layers_state_makes_the_logits(target_path: Path) -> None:
    session = Session(tapped(target_path, [3]))
    verify(session, [5], [-1], GREEDY)
    state = session.hidden.numpy()[0].astype(np.float64)
    normed = state / np.sqrt((state * state).mean() + 1e-6) * tensor(target_path, "output_norm.weight")
    again = Session(session_model := Model(target_path))
    evaluate(again, [5], [-1])
    expected = tensor(target_path, "token_embd.weight").astype(np.float64) @ normed
    np.testing.assert_allclose(again.logits(0), expected, atol=1e-4)
    assert session_model.taps == []


def test_states_are_those_of_the_path_alone(target_path: Path) -> None:
    session, chain = (Session(tapped(target_path, [2, 3])) for _ in range(2))
    for each in (session, chain):
        prefill(each, [1, 2, 3])
    # A tree whose second branch is followed.
    path, tokens = verify(session, [4, 9, 5, 6], [-1, 0, 0, 2], GREEDY, masks=only(np.array([5, 0, 6, 7])))[:2]
    assert path.tolist() == [0, 2, 3]
    assert tokens.tolist() == [5, 6, 7]
    verify(chain, [4, 5, 6], [-1, 0, 1], GREEDY, masks=only(np.array([5, 6, 7])))
    np.testing.assert_array_equal(session.hidden.numpy(), chain.hidden.numpy())


def test_states_are_the_same_in_shared_passes_and_in_several(target_path: Path) -> None:
    model = tapped(target_path, [1, 3])
    sessions = [Session(model) for _ in range(3)]
    works = []
    for i, session in enumerate(sessions):
        prefill(session, list(range(1, 4 + i)))
        works.append(Work.verify(session, [4 + i, 5, 6], [-1, 0, 1], GREEDY, masks=only(np.array([5, 6, 7]))))
    run(works)
    for i, session in enumerate(sessions):
        alone = Session(model)
        prefill(alone, list(range(1, 4 + i)))
        verify(alone, [4 + i, 5, 6], [-1, 0, 1], GREEDY, masks=only(np.array([5, 6, 7])))
        np.testing.assert_array_equal(session.hidden.numpy(), alone.hidden.numpy())
    # A chain that takes two passes, beside the same one in two calls.
    tokens = [(7 * i) % 290 for i in range(MOST_ROWS + 40)]
    long, short = Session(model), Session(model)
    masks = only(np.array([*tokens[1:], 1]))
    verify(long, tokens, range(-1, len(tokens) - 1), GREEDY, masks=masks)
    verify(short, tokens[:50], range(-1, 49), GREEDY, masks=masks[:50])
    np.testing.assert_array_equal(long.hidden.numpy()[:50], short.hidden.numpy())
    verify(short, tokens[50:], range(-1, len(tokens) - 51), GREEDY, masks=masks[50:])
    np.testing.assert_array_equal(long.hidden.numpy()[50:], short.hidden.numpy())


def test_states_of_a_text_that_changed_otherwise_are_none(target_path: Path) -> None:
    session = Session(tapped(target_path, [1]))
    assert session.hidden.numpy().shape == (0, SHAPE.width)

    def verified() -> None:
        verify(session, [5], [-1], GREEDY)
        assert len(session.hidden) == 1

    verified()
    session.rewind(len(session.tokens))
    assert len(session.hidden) == 0
    verified()
    assert len(session.fork(1).hidden) == 0
    prefill(session, [3])
    assert len(session.hidden) == 0
    verified()
    evaluate(session, [4], [-1])
    session.commit([0])
    assert len(session.hidden) == 0
    verified()
    with pytest.raises(ValueError, match="parent"):
        verify(session, [5, 6], [-1, 7], GREEDY)
    assert len(session.hidden) == 1  # a call that failed left all as it was
    session.stretch(20)
    assert len(session.hidden) == 0
    assert Session(Model(target_path)).hidden.numpy().shape == (0, 0)


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
    assert session.hidden.numpy().shape == (0, 2 * SHAPE.width)
    session.close()
    model.tap([])


# ---- Of readings ----


def test_every_row_of_a_prompt_has_its_hidden_states(target_path: Path) -> None:
    model = tapped(target_path, TAPS, all_rows=True)
    whole, rows = Session(model), Session(model)
    prefill(whole, TOKENS)
    found = whole.hidden.numpy()
    assert found.shape == (700, len(TAPS) * SHAPE.width)
    verified = []
    for first in range(0, 700, 35):
        n = min(35, 700 - first)
        evaluate(rows, TOKENS[first : first + n], range(-1, n - 1), n // 2)
        rows.commit(range(n))
        verified.append(rows.hidden)
    joined = sum(verified[1:], verified[0])
    np.testing.assert_array_equal(joined.numpy(), found)
    np.testing.assert_array_equal(whole.hidden[2:700:3].numpy(), found[2::3])
    # The logits are those of a model that keeps nothing.
    plain = Session(Model(target_path))
    prefill(plain, TOKENS)
    for session in (whole, plain):
        evaluate(session, [1, 2], [-1, 0], 1)
    np.testing.assert_array_equal(whole.logits(1), plain.logits(1))
    pending = whole.hidden_of([0, 1]).numpy()
    whole.commit([0, 1])
    np.testing.assert_array_equal(whole.hidden.numpy(), pending)
    whole.rewind(5)
    assert len(whole.hidden) == 0


def test_a_reading_has_those_of_its_last_row(target_path: Path) -> None:
    every, last = tapped(target_path, TAPS, all_rows=True), tapped(target_path, TAPS, last_row=True)
    lengths = [700, 1, 40]
    expected = [Session(every) for _ in lengths]
    found = [Session(last) for _ in lengths]
    for sessions in (expected, found):
        run([Work.read(session, TOKENS[:n]) for session, n in zip(sessions, lengths, strict=True)])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.hidden.numpy(), other.hidden.numpy()[-1:])
        prefill(one, [])
        assert len(one.hidden) == 0
    *_, tokens = verify(found[2], [1], [-1], GREEDY)
    assert (len(found[2].hidden), len(tokens)) == (1, 1)


def test_rows_that_were_not_judged_have_none(target_path: Path) -> None:
    plain = Session(tapped(target_path, [1]))
    evaluate(plain, [1, 2], [-1, 0], 1)
    with pytest.raises(ValueError, match="row 0"):
        plain.hidden_of([0, 1])
