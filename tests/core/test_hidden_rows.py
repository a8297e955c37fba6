"""Hidden states of all rows, and a model that reads another's beside tokens, with its embedding and head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.family_reference import FamilyReference
from support.random_models import Floats, RandomModel, write

from pystaged._core import Model, ModelError, Sampling, Session, Work, run

TARGET = RandomModel("llama", layers=3, head_dim=32, context=1024)
WIDTH, TAPS = TARGET.width, [1, 3]
TOKENS = np.random.default_rng(1).integers(0, 300, 700, dtype=np.int32)  # several passes
GREEDY = Sampling()


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hidden") / "target.gguf", TARGET)


def tapped(path: Path, layers: list[int]) -> Model:
    model = Model(path)
    model.tap(layers, all_rows=True)
    return model


def draft(path: Path, quantization: str = "F32", width: int = WIDTH) -> Path:
    """A layer that reads the hidden states of TAPS, without embedding and head."""

    def fuse(found: dict[str, Floats]) -> None:
        random = np.random.default_rng(5)
        read = width + len(TAPS) * WIDTH
        found |= {
            "nextn.eh_proj.weight": random.standard_normal((width, read)).astype(np.float32)
            / np.sqrt(np.float32(read)),
            "nextn.enorm.weight": 1 + random.standard_normal(width).astype(np.float32) / 10,
            "nextn.hnorm.weight": 1 + random.standard_normal(len(TAPS) * WIDTH).astype(np.float32) / 10,
        }
        del found["token_embd.weight"]

    return write(path, RandomModel("llama", width=width, layers=1, seed=9, quantization=quantization), fuse)


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


@pytest.mark.parametrize(("quantization", "tolerance"), [("F32", 1e-3), ("Q8_0", 0.1)])
def test_a_model_that_reads_hidden_states_is_the_twin(
    target_path: Path, tmp_path: Path, quantization: str, tolerance: float
) -> None:
    path = draft(tmp_path / "draft.gguf", quantization)
    target, session = tapped(target_path, TAPS), None
    reader = Model(path, lender=target)
    assert (reader.vocab_size, reader.weight_bytes > 0) == (300, True)
    session = Session(target)
    session.prefill(TOKENS[:40])
    hidden = session.hidden
    # Each token beside the hidden states of the one before; the last rows in a tree.
    run([Work.read(reading := Session(reader), TOKENS[1:33], hidden[:32])])
    run([Work.propose(reading, TOKENS[33:40], [-1, *range(6)], 7, 1, GREEDY, hidden=hidden[32:39])])

    twin, lender = FamilyReference(path), FamilyReference(target_path)
    embedding, weights = lender.weights["token_embd.weight"], twin.weights
    read = np.concatenate([
        normed(embedding[TOKENS[1:40]]) * weights["nextn.enorm.weight"],
        normed(hidden.numpy()[:39].astype(np.float64)) * weights["nextn.hnorm.weight"],
    ], axis=1)  # fmt: skip
    weights["token_embd.weight"] = read @ weights["nextn.eh_proj.weight"].T
    weights["output.weight"] = embedding
    expected = twin.logits(range(39))
    for row in range(7):
        np.testing.assert_allclose(reading.logits(row), expected[32 + row], atol=tolerance * expected.std())


def normed(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    return result


def test_a_row_has_the_same_bits_in_a_tree_and_alone(target_path: Path, tmp_path: Path) -> None:
    target = tapped(target_path, TAPS)
    reader = Model(draft(tmp_path / "draft.gguf", "Q8_0"), "", 2, lender=target)
    source = Session(target)
    source.prefill(TOKENS[:50])
    hidden = source.hidden
    several = [Session(reader) for _ in range(3)]
    run([Work.propose(each, TOKENS[:9], [-1, 0, 0, 1, 2, 2, -1, 6, 3], 9, 1, GREEDY, hidden=hidden[i : i + 9])
         for i, each in enumerate(several)])  # fmt: skip
    for i, each in enumerate(several):
        alone = Session(reader)
        for row in (0, 2, 5):
            run([Work.propose(alone, [TOKENS[row]], [-1], 1, 1, GREEDY, hidden=hidden[i + row : i + row + 1])])
            logits = alone.logits(0)
            alone.commit([0])
        np.testing.assert_array_equal(each.logits(5), logits)


def test_what_does_not_fit_is_refused(target_path: Path, tmp_path: Path) -> None:
    path = draft(tmp_path / "draft.gguf")
    target = tapped(target_path, TAPS)
    with pytest.raises(ModelError, match="token_embd"):
        Model(path)
    with pytest.raises(ModelError, match="96 wide"):
        Model(draft(tmp_path / "wide.gguf", width=96), lender=target)
    with pytest.raises(ValueError, match="own kernels"):
        Model(path, device="ggml-cpu", lender=target)
    reader, session = Session(Model(path, lender=target)), Session(target)
    session.prefill(TOKENS[:4])
    hidden = session.hidden
    for works in (
        [Work.read(reader, TOKENS[:4])],
        [Work.read(reader, TOKENS[:4], hidden[:3])],
        [Work.read(session, TOKENS[:4], hidden)],
    ):
        with pytest.raises(ValueError, match="hidden states"):
            run(works)
    with pytest.raises(ValueError, match="hidden states"):
        reader.prefill(TOKENS[:4])
    assert (len(reader.tokens), reader.num_pending) == (0, 0)
    judged = Model(target_path)
    judged.tap([1])
    plain = Session(judged)
    plain.evaluate([1, 2], [-1, 0], 1)
    with pytest.raises(ValueError, match="row 0"):
        plain.hidden_of([0, 1])
