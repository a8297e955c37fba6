"""The sampler against a slow twin: filters in their order, the Gumbel-max rule, and its distribution. The noise's twin
is in tests/native/kernel_tests.cpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import table
from support.sampling import kept, samplings
from support.steps import evaluate, prefill, rank, verify

from pystaged import SamplingConfig, _core

Doubles = npt.NDArray[np.float64]

RUN = 64  # tokens
TOLERANCE = 1e-4
SIGNIFICANCE = 3.719  # one-sided normal quantile of 1e-4
FILTERS: list[dict[str, Any]] = [*samplings("plain filters").values()]


# ---- The twin ----


def log_probabilities(logits: npt.NDArray[np.float32], sampling: SamplingConfig) -> Doubles:
    """log p of every token after the filters, of which a greedy choice has none; -inf for those that are left out."""
    filtered = sampling if sampling.temperature > 0 else SamplingConfig(1.0)
    return kept(logits.astype(np.float64), filtered, coin=False)


# ---- Rows of logits to sample from ----


def native(s: SamplingConfig) -> _core.Sampling:
    return _core.Sampling(s.temperature, s.top_k, s.top_p, s.min_p, s.seed)


@dataclass(frozen=True)
class Row:
    """A session with one pending row, its logits, and the position of the token after it."""

    session: _core.Session
    logits: npt.NDArray[np.float32]
    position: int

    @property
    def judged(self) -> npt.NDArray[np.float32]:
        """What the twin makes scores of."""
        return self.logits

    @property
    def masks(self) -> Any:
        return None

    def scores(self, sampling: SamplingConfig) -> Doubles:
        scores = log_probabilities(self.judged, sampling)
        if sampling.temperature > 0:
            scores += _core.gumbel(sampling.seed, self.position, np.arange(len(scores), dtype=np.int32))
        return scores

    def candidates(self, sampling: SamplingConfig, k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        tokens, scores = rank(self.session, [0], k, native(sampling), self.masks)
        return tokens[0], scores[0]

    def follow(self, sampling: SamplingConfig) -> int:
        return int(self.session.follow(native(sampling))[1][0])

    def check(self, sampling: SamplingConfig, k: int) -> None:
        """Candidates and token are the twin's, up to scores closer than rounding can tell apart."""
        expected = self.scores(sampling)
        tokens, scores = self.candidates(sampling, k)
        count = min(k, int(np.isfinite(expected).sum()))
        assert (tokens[count:] == -1).all()
        assert (scores[count:] == -np.inf).all()
        tokens, scores = tokens[:count], scores[:count]
        assert len(set(tokens.tolist())) == count
        assert (np.diff(scores) <= 0).all()
        np.testing.assert_allclose(scores, expected[tokens], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(scores, np.sort(expected)[::-1][:count], rtol=0, atol=TOLERANCE)
        assert expected[self.follow(sampling)] >= expected.max() - TOLERANCE
        assert self.follow(sampling) == tokens[0]


def row_of(path: Path, tokens: list[int]) -> Row:
    session = _core.Session(_core.Model(str(path), "", 2))
    prefill(session, tokens[:-1])
    evaluate(session, tokens[-1:], [-1])
    return Row(session, session.logits(0), len(tokens))


@pytest.fixture(scope="module")
def small(random_gguf: Callable[..., Path]) -> Row:
    return row_of(random_gguf(), [5, 17, 256, 0])


@pytest.fixture(scope="module")
def bundled(bundled_target: Path) -> Row:
    return row_of(bundled_target, [4299, 277, 571, 261, 44456, 7, 77, 2599, 198])


@pytest.fixture(params=["small", "bundled"])
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.getfixturevalue(request.param)
    return found


def test_noise_of_tokens_in_a_run_is_independent() -> None:
    """Then the first arrivals of a run are exponential with their number as rate, whichever tokens are looked at."""
    noise = _core.gumbel(3, 2**33, np.arange(64 * 4000, dtype=np.int32))
    times = np.exp(-noise.astype(np.float64)).reshape(-1, RUN)
    for some in (slice(None), slice(0, 2), slice(5, 37), slice(0, RUN, 9)):
        first = times[:, some].min(axis=1) * times[:, some].shape[1]
        for quantile in (0.01, 0.1, 0.5, 0.9, 0.99):
            assert (first < -np.log1p(-quantile)).mean() == pytest.approx(quantile, abs=0.03)
    gains = -np.log(times)
    assert gains.sum(axis=1).var() == pytest.approx(RUN * np.pi**2 / 6, rel=0.1)
    counts = np.bincount(times.argmin(axis=1), minlength=RUN).astype(np.float64)
    check_drawn(counts, np.full(RUN, 1 / RUN))


# ---- Tokens and scores ----


def test_greedy(row: Row) -> None:
    sampling = SamplingConfig(seed=3)
    row.check(sampling, 40)
    assert row.follow(sampling) == np.argmax(row.logits)
    assert row.candidates(sampling, 40)[0].tolist() == np.argsort(-row.logits, kind="stable")[:40].tolist()


@settings(max_examples=300)
@given(
    sampling=st.builds(
        SamplingConfig,
        temperature=st.floats(0.015625, 20, width=32),
        top_k=st.integers(0, 310),
        top_p=st.just(1.0) | st.floats(0.015625, 1, width=32),
        min_p=st.just(0.0) | st.floats(0, 0.875, width=32),
        seed=st.integers(0, 2**64 - 1),
    ),
    k=st.integers(1, 300),
)
def test_any_sampling(small: Row, sampling: SamplingConfig, k: int) -> None:
    small.check(sampling, k)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.2, 0.8, 1.0, 1.5, 10.0, 1000.0])
def test_pruning_never_loses_a_token(bundled: Row, temperature: float) -> None:
    for seed in range(25):
        for k in (1, 8, 40):
            bundled.check(SamplingConfig(temperature, seed=2**40 + seed), k)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}], ids=str)
@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-10, 1e30, 3e38])
def test_extreme_temperatures(row: Row, temperature: float, filters: dict[str, Any]) -> None:
    sampling = SamplingConfig(temperature, seed=1, **filters)
    expected = row.scores(sampling)
    tokens, scores = row.candidates(sampling, 1)
    assert tokens[0] == row.follow(sampling) == expected.argmax()
    assert scores[0] == pytest.approx(expected.max(), abs=TOLERANCE)


# ---- Ties ----


@pytest.fixture(scope="module")
def tied(random_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Row:
    """A model whose tokens 3, 100, 250 and 299 have the same, largest logit."""
    path = tmp_path_factory.mktemp("tied") / "tied.gguf"
    path.write_bytes(random_gguf(seed=5, tie=False).read_bytes())
    (head,) = [tensor for tensor in GGUFReader(path).tensors if tensor.name == "output.weight"]
    start, logits = head.data_offset, row_of(path, [1, 2]).logits
    rows = np.frombuffer(path.read_bytes(), np.float32, head.n_elements, start).reshape(300, -1).copy()
    rows[[3, 100, 250, 299]] = rows[np.argmax(logits)]
    data = bytearray(path.read_bytes())
    data[start : start + rows.nbytes] = rows.tobytes()
    path.write_bytes(data)
    return row_of(path, [1, 2])


def test_ties_go_to_the_lowest_id(tied: Row) -> None:
    best = np.flatnonzero(tied.logits == tied.logits.max()).tolist()
    assert best[0] == 3
    assert len(best) in (4, 5)
    assert tied.follow(SamplingConfig()) == 3
    assert tied.candidates(SamplingConfig(), len(best))[0].tolist() == best
    for k in range(1, len(best) + 1):
        for seed in range(20):
            tokens, _ = tied.candidates(SamplingConfig(1.0, top_k=k, seed=seed), 300)
            assert sorted(tokens[tokens >= 0].tolist()) == best[:k]
    tokens, _ = tied.candidates(SamplingConfig(1e-3, top_p=0.3), 300)
    assert set(tokens[tokens >= 0].tolist()) <= set(best[:2])
    assert 3 in tokens


# ---- The distribution ----


DRAWS = 20_000
SEVERAL = [f for f in FILTERS if f not in ({"top_k": 1}, {"top_p": 1e-6})]  # filters that leave several tokens


def check_drawn(counts: Doubles, p: Doubles) -> None:
    """Pearson's chi-square test of draws against probabilities."""
    expected = counts.sum() * p
    assert not counts[expected == 0].any()
    # Rare tokens are counted together.
    common = expected >= 5
    counts, expected = (np.append(x[common], x[~common].sum()) for x in (counts, expected))
    kept = expected > 0
    statistic = (np.square(counts - expected)[kept] / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert freedom > 0
    # The critical value by Wilson and Hilferty's cube.
    limit = freedom * (1 - 2 / (9 * freedom) + SIGNIFICANCE * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.slow
@pytest.mark.parametrize("filters", SEVERAL, ids=str)
def test_tokens_are_drawn_by_their_probability(random_gguf: Callable[..., Path], filters: dict[str, Any]) -> None:
    row = row_of(random_gguf(vocab_size=257, width=32, layers=1), [7, 7])
    temperature = 0.05
    counts = np.zeros(257)
    for seed in range(DRAWS):
        counts[row.session.follow(_core.Sampling(temperature, seed=seed, **filters))[1][0]] += 1
    check_drawn(counts, np.exp(log_probabilities(row.logits, SamplingConfig(temperature, **filters))))


# ---- Options ----


@pytest.mark.parametrize(("options", "message"), table("samplings_refused"), ids=str)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    for kind in (SamplingConfig, _core.Sampling):
        with pytest.raises(ValueError, match=message):
            kind(**options)


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p", "seed"])
def test_values_of_a_wrong_type(field: str) -> None:
    values: list[Any] = ["1", True, [0.5]]
    values += [] if field == "seed" else [None]  # which draws one
    values += [1.5] if field in ("top_k", "seed") else []
    for value in values:
        with pytest.raises(TypeError, match=f"^{field} must be"):
            SamplingConfig(**{field: value})


# ---- Masks ----


@dataclass(frozen=True)
class MaskedRow(Row):
    """The same where only some tokens may follow: to the twin, the logits of the others are -inf."""

    allowed: npt.NDArray[np.bool_]
    words: int  # of the mask; the tokens beyond are forbidden

    @property
    def masks(self) -> npt.NDArray[np.uint32]:
        bits = np.zeros(32 * self.words, np.bool_)
        count = min(len(bits), len(self.allowed))
        bits[:count] = self.allowed[:count]
        return np.packbits(bits, bitorder="little").view(np.uint32)[None]

    @property
    def judged(self) -> npt.NDArray[np.float32]:
        allowed = self.allowed & (np.arange(len(self.allowed)) < 32 * self.words)
        return np.where(allowed, self.logits, np.float32(-np.inf))

    def follow(self, sampling: SamplingConfig) -> int:
        fork = self.session.fork(len(self.session.tokens))
        return int(verify(fork, [LAST], [-1], native(sampling), masks=self.masks)[1][0])


LAST = 198  # the bundled row's last token


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_mask_forbids_does_not_exist(bundled: Row, temperature: float, filters: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    size = len(bundled.logits)
    some = np.zeros(size, np.bool_)
    some[rng.choice(size, 9, replace=False)] = True
    runs = np.repeat(rng.random(-(-size // RUN)) < 0.5, RUN)[:size]
    words = -(-size // 32)
    for allowed, many in ((some, words), (rng.random(size) < 0.5, words), (runs, words // 2), (~some, words + 3)):
        for seed in range(2):
            MaskedRow(bundled.session, bundled.logits, bundled.position, allowed, many).check(
                SamplingConfig(temperature, seed=seed, **filters), 12
            )


def test_a_mask_of_one_token_decides_whatever_the_logits_are(bundled: Row) -> None:
    size = len(bundled.logits)
    for token in (0, 31, 32, 63, 64, size - 1, int(bundled.logits.argmin())):
        row = MaskedRow(bundled.session, bundled.logits, bundled.position, np.arange(size) == token, -(-size // 32))
        for sampling in (SamplingConfig(), SamplingConfig(1.0, seed=3), SamplingConfig(0.7, top_p=0.5)):
            assert row.follow(sampling) == token
            tokens, scores = row.candidates(sampling, 3)
            assert tokens.tolist() == [token, -1, -1]
            noise = _core.gumbel(sampling.seed, row.position, token) if sampling.temperature else 0.0
            assert scores[0] == pytest.approx(noise, abs=TOLERANCE)


def test_masks_that_are_none(random_gguf: Callable[..., Path]) -> None:
    session = _core.Session(_core.Model(str(random_gguf()), "", 1))
    greedy, size = _core.Sampling(), session.vocab_size
    words = -(-size // 32)
    beyond = np.zeros((1, words + 1), np.uint32)
    beyond[0, size // 32 :] = np.uint32(0xFFFFFFFF) << np.uint32(size % 32)
    for masks in (np.zeros((1, words), np.uint32), beyond):
        with pytest.raises(ValueError, match="the mask of row 0 allows no token"):
            verify(session, [1], [-1], greedy, masks=masks)
        with pytest.raises(ValueError, match="the mask of row 0 allows no token"):
            _core.run([_core.Work.propose(session, [1], [-1], 1, 2, greedy, masks)])
    for rows in (0, 1, 3):
        with pytest.raises(ValueError, match="one for each of the 2 rows"):
            verify(session, [1, 2], [-1, 0], greedy, masks=np.ones((rows, words), np.uint32))
    with pytest.raises(ValueError, match="two-dimensional"):
        verify(session, [1], [-1], greedy, masks=np.ones(words, np.uint32))
    assert (session.num_pending, len(session.tokens)) == (0, 0)
