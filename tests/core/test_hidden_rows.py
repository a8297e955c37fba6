"""Hidden states of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.random_models import RandomModel, write

from pystaged._core import Model, Sampling, Session, Work, run

TARGET = RandomModel("llama", layers=3, head_dim=32, context=1024)
WIDTH, TAPS = TARGET.width, [1, 3]
TOKENS = np.random.default_rng(1).integers(0, 300, 700, dtype=np.int32)  # several passes


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hidden") / "target.gguf", TARGET)


def tapped(path: Path, layers: list[int]) -> Model:
    model = Model(path)
    model.tap(layers, all_rows=True)
    return model


def test_every_row_of_a_prompt_has_its_hidden_states(target_path: Path) -> None:
    model = tapped(target_path, TAPS)
    whole, rows = Session(model), Session(model)
    whole.prefill(TOKENS)
    found = whole.hidden.numpy()
    assert found.shape == (700, len(TAPS) * WIDTH)
    verified = []
    for first in range(0, 700, 35):
        n = min(35, 700 - first)
        rows.evaluate(TOKENS[first : first + n], range(-1, n - 1), n // 2)
        rows.commit(range(n))
        verified.append(rows.hidden)
    joined = sum(verified[1:], verified[0])
    np.testing.assert_array_equal(joined.numpy(), found)
    np.testing.assert_array_equal(whole.hidden[2:700:3].numpy(), found[2::3])
    # The logits are those of a model that keeps nothing.
    plain = Session(Model(target_path))
    plain.prefill(TOKENS)
    for session in (whole, plain):
        session.evaluate([1, 2], [-1, 0], 1)
    np.testing.assert_array_equal(whole.logits(1), plain.logits(1))
    pending = whole.hidden_of([0, 1]).numpy()
    whole.commit([0, 1])
    np.testing.assert_array_equal(whole.hidden.numpy(), pending)
    whole.rewind(5)
    assert len(whole.hidden) == 0


def test_a_reading_has_those_of_its_last_row(target_path: Path) -> None:
    every, last = tapped(target_path, TAPS), Model(target_path)
    last.tap(TAPS, last_row=True)
    lengths = [700, 1, 40]
    expected = [Session(every) for _ in lengths]
    found = [Session(last) for _ in lengths]
    for sessions in (expected, found):
        run([Work.read(session, TOKENS[:n]) for session, n in zip(sessions, lengths, strict=True)])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.hidden.numpy(), other.hidden.numpy()[-1:])
        one.prefill([])
        assert len(one.hidden) == 0
    *_, tokens = found[2].verify([1], [-1], Sampling())
    assert (len(found[2].hidden), len(tokens)) == (1, 1)


def test_rows_that_were_not_judged_have_none(target_path: Path) -> None:
    judged = Model(target_path)
    judged.tap([1])
    plain = Session(judged)
    plain.evaluate([1, 2], [-1, 0], 1)
    with pytest.raises(ValueError, match="row 0"):
        plain.hidden_of([0, 1])
