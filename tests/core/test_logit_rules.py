"""Penalties, DRY, bias, exclusions, typical, XTC, temperature last: against llama.cpp's samplers and a slow twin."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.family_reference import log_softmax
from support.logits import llama_context
from support.sampling import Doubles, Floats, kept, llama_chain, llama_dry, samplings
from support.steps import evaluate, path_to, prefill, rank, verify

from pystaged import SamplingConfig, _core
from pystaged.sampling.binding import _known, bind, sequences_of

VOCAB_SIZE = 300
TOLERANCE = 2e-4
RULES: dict[str, dict[str, Any]] = samplings("rules")
FILTERS: dict[str, dict[str, Any]] = samplings("filters")


class Text:
    """A context of some tokens, the last of them a pending row: its logits, and what a sampling makes of them."""

    def __init__(self, model: _core.Model, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.session = _core.Session(model)
        prefill(self.session, self.tokens[:-1])
        evaluate(self.session, self.tokens[-1:], [-1])
        self.logits: Floats = self.session.logits(0)

    def scores(self, sampling: _core.Sampling) -> Doubles:
        """log p of each token, with the noise if there is any; -inf for those that cannot be chosen."""
        tokens, scores = rank(self.session, [0], len(self.logits), sampling)
        found = np.full(len(self.logits), -np.inf)
        there = tokens[0] >= 0
        found[tokens[0][there]] = scores[0][there]
        return found

    def follow(self, sampling: _core.Sampling) -> int:
        return int(self.session.follow(sampling)[1][0])


@pytest.fixture(scope="module")
def path(random_gguf: Callable[..., Path]) -> Path:
    return random_gguf(vocab_size=VOCAB_SIZE, context=512)


@pytest.fixture(scope="module")
def model(path: Path) -> _core.Model:
    return _core.Model(str(path), "", 2)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> _core.Tokenizer:
    return _core.Tokenizer(str(path))


def random_tokens(seed: int, length: int = 60, alphabet: int = 4) -> list[int]:
    """A text that repeats itself, with a newline and a colon now and then."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, alphabet, length) + 40
    tokens[generator.random(length) < 0.04] = 10
    return [int(token) for token in tokens]


def check_equal(found: Doubles, expected: Doubles) -> None:
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    there = np.isfinite(expected)
    np.testing.assert_allclose(found[there], expected[there], rtol=1e-5, atol=TOLERANCE)


# ---- Rules ----


@pytest.mark.parametrize("missing", [0, 1])
def test_bias_and_excluded_ends(model: _core.Model, tokenizer: _core.Tokenizer, missing: int) -> None:
    """Ends are excluded for as long as a token of min_tokens is missing."""
    bias: dict[int | str, float] = {7: 2.5, 9: -3.0, 256: -math.inf, 298: 100.0}
    text = Text(model, random_tokens(1))
    sampling = bind(SamplingConfig(logit_bias=bias, min_tokens=5), tokenizer, len(text.tokens) - 5 + missing).native
    expected = text.logits.astype(np.float64)
    expected[[int(token) for token in bias]] += list(bias.values())
    if missing:
        expected[tokenizer.end_tokens] = -np.inf
    check_equal(text.scores(sampling), log_softmax(expected))
    assert text.follow(sampling) == expected.argmax() == 298


@pytest.fixture(scope="module")
def vocab(path: Path) -> Iterator[Any]:
    """llama.cpp's."""
    with llama_context(path) as context:
        yield llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context))


PENALTIES: dict[str, st.SearchStrategy[Any]] = {
    "repeat_penalty": st.floats(0.125, 5, width=32),
    "presence_penalty": st.floats(-3, 3, width=32),
    "frequency_penalty": st.floats(-2, 2, width=32),
    "repeat_last_n": st.integers(-1, 100),
    "dry_multiplier": st.sampled_from([0.0, 0.5, 4.0]),
    "dry_allowed_length": st.integers(0, 6),
    "dry_penalty_last_n": st.integers(-1, 100),
}


@settings(max_examples=60)
@given(st.integers(0, 100), st.integers(1, 90), st.integers(1, 6), st.fixed_dictionaries(PENALTIES))
def test_penalties_and_dry_are_llama_cpps(
    model: _core.Model, vocab: Any, tokenizer: _core.Tokenizer, seed: int, length: int, alphabet: int, options: Any
) -> None:
    tokens = random_tokens(seed, length, alphabet)
    if seed % 3 == 0:
        tokens = tokens[: length // 2] * 2 + tokens[:4]

    def window(most: int) -> int:
        return len(tokens) if most == -1 else min(most, len(tokens))

    breakers = ("\n", ":", "ab", "*", "+,")[: 1 + seed % 5]
    s = SamplingConfig(dry_base=1.1, dry_sequence_breakers=breakers, **options)
    text = Text(model, tokens)
    penalties = s.repeat_penalty, s.frequency_penalty, s.presence_penalty
    samplers = [llama_cpp.llama_sampler_init_penalties(VOCAB_SIZE, window(s.repeat_last_n), *penalties)]
    if s.dry_multiplier:
        samplers.append(llama_dry(vocab, replace(s, dry_penalty_last_n=window(s.dry_penalty_last_n))))
    expected, _ = llama_chain(text.logits, samplers, tokens)
    check_equal(text.scores(bind(s, tokenizer, 1).native), log_softmax(expected))


def test_breakers_reach_over_several_tokens(tokenizer: _core.Tokenizer) -> None:
    """Whatever stands before and after it, a breaker begins in one of its sequences."""
    for text in ("\n", "ab", "the", "then x", "\N{IDEOGRAPHIC FULL STOP}", "caf\xe9", "\N{ROBOT FACE}\N{ROBOT FACE}"):
        sequences = sequences_of(tokenizer, text)
        assert all(text in tokenizer.decode(sequence) for sequence in sequences)
        for around in ("{}", "x{}y", " {}.", "th{} there"):
            tokens = tokenizer.encode(around.format(text), add_special=False).tolist()
            starts = [tokens[i : i + len(each)] == each for each in sequences for i in range(len(tokens))]
            assert any(starts), (text, around)
    with pytest.raises(ValueError, match="empty"):
        sequences_of(tokenizer, "")


# ---- Filters ----


def coin(sampling: SamplingConfig, position: int) -> bool:
    """XTC's, from the noise of a token that no vocabulary has."""
    noise = _core.gumbel(sampling.seed, position, 2**31 - 1)
    return math.exp(-math.exp(-noise)) <= sampling.xtc_probability


@pytest.mark.parametrize("last", [False, True], ids=["temperature-first", "temperature-last"])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_filters_are_the_twins(filters: dict[str, Any], last: bool, model: _core.Model) -> None:
    for seed, temperature in enumerate([0.0, 0.3, 1.0, 2.5]):
        sampling = SamplingConfig(temperature, seed=seed, temperature_last=last, **filters)
        text = Text(model, random_tokens(seed))
        expected = kept(text.logits.astype(np.float64), sampling, coin=sampling.xtc_probability == 1)
        found = text.scores(sampling.native)
        noise = _core.gumbel(seed, len(text.tokens), np.arange(VOCAB_SIZE, dtype=np.int32))
        if temperature > 0:
            check_equal(found - noise, expected)
            expected = expected + noise
        assert text.follow(sampling.native) == expected.argmax() == found.argmax()


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_the_chain_is_llama_cpps(filters: dict[str, Any], model: _core.Model) -> None:
    for seed, temperature in enumerate([0.4, 1.0, 1.8]):
        s = SamplingConfig(temperature, temperature_last=True, seed=seed, **filters)
        text = Text(model, random_tokens(seed))
        samplers = [
            llama_cpp.llama_sampler_init_top_k(s.top_k),
            llama_cpp.llama_sampler_init_typical(s.typical_p, 0),
            llama_cpp.llama_sampler_init_top_p(s.top_p, 0),
            llama_cpp.llama_sampler_init_min_p(s.min_p, 0),
            llama_cpp.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, 0, 1),
            llama_cpp.llama_sampler_init_temp(s.temperature),
        ]
        _, p = llama_chain(text.logits, samplers)
        noise = _core.gumbel(seed, len(text.tokens), np.arange(VOCAB_SIZE, dtype=np.int32))
        found = np.exp(text.scores(s.native) - noise)
        assert ((found > 0) == (p > 0)).all()
        np.testing.assert_allclose(found, p, rtol=0, atol=1e-5)


def test_the_coin_is_fair_and_of_seed_and_position(model: _core.Model) -> None:
    session = _core.Session(model)
    evaluate(session, [7], [-1])
    logits = session.logits(0)
    thrown = []
    for seed in range(600):
        sampling = SamplingConfig(xtc_probability=0.3, xtc_threshold=0.001, temperature_last=True, seed=seed)
        token = int(session.follow(sampling.native)[1][0])
        thrown.append(token != logits.argmax())
        assert thrown[-1] == coin(sampling, 1)
    assert 0.24 < np.mean(thrown) < 0.36
    throws = [_core.gumbel(5, position, 2**31 - 1) <= -math.log(-math.log(0.3)) for position in range(600)]
    assert 0.24 < np.mean(throws) < 0.36


def test_extremes(model: _core.Model, tokenizer: _core.Tokenizer) -> None:
    """Whatever is asked for, a token that may be chosen is, and nothing is undefined."""
    text = Text(model, random_tokens(1))
    tiny = {"logit_bias": {token: -math.inf for token in range(VOCAB_SIZE) if token not in (17, 43)}}
    extremes: list[dict[str, Any]] = [
        {"repeat_penalty": 3e38},
        {"repeat_penalty": 1e-38},
        {"frequency_penalty": 3e38, "presence_penalty": 3e38},
        {"frequency_penalty": -3e38, "presence_penalty": -3e38, "repeat_penalty": 1e-30},
        {"dry_multiplier": 3e38, "dry_base": 3e38, "dry_allowed_length": 0},
        {"logit_bias": {5: 1e30, 6: -1e30}, "frequency_penalty": 1e30},
        tiny,
        tiny | {"frequency_penalty": 3e38, "dry_multiplier": 3e38},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0, **tiny},
        {"typical_p": 1e-30},
    ]
    for options in extremes:
        for temperature in (0.0, 1e-38, 1.0, 3e38):
            for last in (False, True):
                for more in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
                    s = SamplingConfig(temperature, seed=3, temperature_last=last, **(options | more))
                    native = bind(s, tokenizer, 1).native
                    scores = text.scores(native)
                    assert not np.isnan(scores).any()
                    chosen = text.follow(native)
                    assert chosen == scores.argmax()
                    if "logit_bias" in options and len(s.logit_bias) > 2:
                        assert chosen in (17, 43)
                        assert np.isfinite(scores).sum() <= 2


# ---- Where a row stands ----


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_rows_of_a_tree_have_their_own_text(
    rules: dict[str, Any], model: _core.Model, tokenizer: _core.Tokenizer, path: Path
) -> None:
    """Candidates of each row, and the token and its log-probabilities, are those of the text alone, bit for bit; on
    every kernel, with any number of threads, and in a fork."""
    prompt = random_tokens(3, 30)
    tokens, parents = [41, 42, 43, 40, 41, 10, 42, 41], [-1, 0, 0, 1, 1, 2, 4, 6]
    s = bind(SamplingConfig(0.8, seed=5, **rules), tokenizer, len(prompt) - 2, logprobs=3).native
    session = _core.Session(model)
    prefill(session, [*prompt, 7, 7])
    fork = session.fork(len(prompt))
    session.rewind(len(prompt))
    evaluate(session, tokens, parents)
    evaluate(fork, tokens, parents)
    rows = list(range(len(tokens)))
    found = rank(session, rows, 40, s)
    for one, other in zip(found, rank(fork, rows, 40, s), strict=True):
        np.testing.assert_array_equal(one, other)
    for row in rows:
        alone = _core.Session(model)
        prefill(alone, [*prompt, *(tokens[i] for i in path_to(parents[row], parents))])
        evaluate(alone, [tokens[row]], [-1])
        for one, other in zip(found, rank(alone, [0], 40, s), strict=True):
            np.testing.assert_array_equal(one[row], other[0])
    followed = session.follow(s)
    for kernel in _core.kernels():
        for num_threads in (1, 3):
            other_session = _core.Session(_core.Model(str(path), kernel, num_threads))
            prefill(other_session, prompt)
            evaluate(other_session, tokens, parents)
            for one, other in zip(found, rank(other_session, rows, 40, s), strict=True):
                np.testing.assert_array_equal(one, other)
            again = other_session.follow(s)
            for one, other in zip([*followed[:2], *followed[2]], [*again[:2], *again[2]], strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_row_may_be_asked_under_several_rules_at_once(model: _core.Model, tokenizer: _core.Tokenizer) -> None:
    text = Text(model, random_tokens(2))
    samplings = [bind(SamplingConfig(**rules), tokenizer, 1).native for rules in RULES.values()]
    together = rank(text.session, [0] * len(samplings), 50, samplings)
    for i, sampling in enumerate(samplings):
        for one, other in zip(together, rank(text.session, [0], 50, sampling), strict=True):
            np.testing.assert_array_equal(one[i], other[0])


# ---- Log-probabilities ----


@pytest.mark.parametrize("k", [0, 1, 5, VOCAB_SIZE])
def test_logprobs_are_the_models_own(k: int, model: _core.Model) -> None:
    """Whatever the sampling makes of them."""
    text = Text(model, random_tokens(4))
    expected = log_softmax(text.logits)
    for s in (SamplingConfig(), SamplingConfig(2.0, 5, seed=1, repeat_penalty=2.0, logit_bias={3: -math.inf})):
        native = s.native_sampling(s.native_rules(logit_bias=[(3, -math.inf)]), k)
        path, tokens, (own, best, of_best) = text.session.follow(native)
        assert path.tolist() == [0]
        assert own[0] == pytest.approx(expected[tokens[0]], abs=1e-5)
        assert best.shape == of_best.shape == (1, k)
        assert best[0].tolist() == np.argsort(-text.logits, kind="stable")[:k].tolist()
        np.testing.assert_allclose(of_best[0], expected[best[0]], rtol=0, atol=1e-5)


# ---- What is refused ----


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"repeat_penalty": 0.0}, ValueError, "repeat_penalty must be above 0"),
        ({"frequency_penalty": math.nan}, ValueError, "frequency_penalty"),
        ({"repeat_last_n": -2, "repeat_penalty": 2.0}, ValueError, "repeat_last_n must be at least -1, not -2"),
        ({"dry_sequence_breakers": ("",)}, ValueError, "dry_sequence_breakers must not be empty"),
        ({"dry_sequence_breakers": 5}, TypeError, "dry_sequence_breakers must be a string or a sequence of strings"),
        ({"dry_sequence_breakers": ["\n", "e" * 41]}, ValueError, "has a string of 41 characters; at most 40 are"),
        ({"dry_sequence_breakers": ["e" * 40] * 17}, ValueError, "dry_sequence_breakers has 680 characters in all"),
        ({"logit_bias": [5]}, TypeError, "logit_bias must be a mapping"),
        ({"logit_bias": {5: "x"}}, TypeError, "logit_bias of token 5 must be a number, not str"),
        ({"logit_bias": {" a": -1e31}}, ValueError, "logit_bias of token ' a' must be a number from -1e.30 to 1e.30"),
        ({"logit_bias": {5: 10**400}}, ValueError, "logit_bias of token 5 must be a number from"),
        ({"logit_bias": {5: math.inf}}, ValueError, "to 1e.30, or -inf to exclude it, not inf"),
        ({"logit_bias": {5.5: 1.0}}, TypeError, "a token of logit_bias must be an integer"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "logit_bias names token -1"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SamplingConfig(**options)


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({300: 1.0}, "logit_bias names token 300, but the vocabulary has 300"),
        ({"the tree": 1.0}, r"logit_bias names 'the tree', which is \d tokens"),
        ({"": 1.0}, "logit_bias names '', which is 0 tokens"),
        ({64: 1.0, "a": 2.0}, "names token 64 twice"),
        (dict.fromkeys(range(300), -math.inf), "exclude all tokens"),
    ],
    ids=["number", "several", "none", "twice", "all"],
)
def test_bias_for_a_token_that_is_not_there(bias: dict[Any, float], words: str, tokenizer: _core.Tokenizer) -> None:
    assert tokenizer.encode("a", add_special=False).tolist() == [64]
    with pytest.raises(ValueError, match=words):
        bind(SamplingConfig(logit_bias=bias), tokenizer, 1)


def test_excluding_all_but_the_end_of_text(tokenizer: _core.Tokenizer) -> None:
    ends = tokenizer.end_tokens.tolist()
    bias: dict[int | str, float] = {token: -math.inf for token in range(300) if token not in ends}
    bind(SamplingConfig(logit_bias=bias), tokenizer, 1)
    for options in ({"ignore_eos": True}, {"min_tokens": 1}):
        with pytest.raises(ValueError, match="exclude all tokens"):
            bind(SamplingConfig(logit_bias=bias, **options), tokenizer, 1)  # type: ignore[arg-type]


def test_rules_that_leave_nothing_fail_where_they_are_followed(model: _core.Model) -> None:
    rules = _core.LogitRules(logit_bias=[(token, -math.inf) for token in range(VOCAB_SIZE)])
    text = Text(model, [5, 6])
    assert (rank(text.session, [0], 3, _core.Sampling(rules=rules))[0] == -1).all()
    with pytest.raises(ValueError, match="exclude all tokens"):
        text.follow(_core.Sampling(rules=rules))
    text.session.discard()
    with pytest.raises(ValueError, match="exclude all tokens"):
        verify(text.session, [1, 2], [-1, 0], _core.Sampling(1.0, rules=rules))
    assert text.session.num_pending == 0
    assert text.session.tokens.tolist() == [5]


def test_breakers_are_kept_up_to_a_bound(tokenizer: _core.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pystaged.sampling.binding._MOST_KNOWN", 4, raising=False)
    texts = tuple("abcdefghij")
    for first in range(9):
        bind(SamplingConfig(dry_multiplier=1.0, dry_sequence_breakers=texts[first : first + 2]), tokenizer, 3)
    bind(SamplingConfig(dry_multiplier=1.0, dry_sequence_breakers=texts), tokenizer, 3)
    assert len(_known[tokenizer]) <= 4


def test_a_bias_is_checked_once_and_does_not_change(
    tokenizer: _core.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[int | str, float] = {5: 1.0, 7: -math.inf}
    sampling = SamplingConfig(logit_bias=given, min_tokens=2)
    monkeypatch.setattr("pystaged.options.config._biases", None)
    bound = bind(sampling, tokenizer, 3)
    copies = (pickle.loads(pickle.dumps(bound)), copy.deepcopy(bound), copy.copy(bound), sampling)
    given[5] = 9.0
    for each in (bound, *copies):
        assert each.logit_bias == asdict(each)["logit_bias"] == {5: 1.0, 7: -math.inf}
        with pytest.raises(TypeError, match="is immutable"):
            each.logit_bias[5] = 2.0  # type: ignore[index]
        with pytest.raises(TypeError, match="is immutable"):
            each.logit_bias.update({5: 2.0})  # type: ignore[attr-defined]


def test_tokens_that_no_vocabulary_has_are_no_rules() -> None:
    with pytest.raises(ValueError, match="end_tokens must be tokens"):
        _core.LogitRules(end_tokens=[3, -5], min_length=9)


def test_what_needs_a_text_must_be_bound_to_one(tokenizer: _core.Tokenizer) -> None:
    for options in ({"min_tokens": 1}, {"ignore_eos": True}, {"dry_multiplier": 1.0}, {"logit_bias": {"a": 1.0}}):
        sampling = SamplingConfig(**options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"pystaged\.sampling\.bind"):
            _ = sampling.native
        bound = bind(sampling, tokenizer, 3)
        assert bound == sampling
        assert hash(bound) == hash(sampling)
        assert isinstance(bound.native, _core.Sampling)
        with pytest.raises(ValueError, match="bind"):
            _ = replace(bound, seed=5).native
    plain = SamplingConfig(0.7, repeat_last_n=0, repeat_penalty=2.0)
    assert bind(plain, tokenizer, 3) is plain  # what is off costs nothing


def test_samplings_are_copied_whole(model: _core.Model, tokenizer: _core.Tokenizer) -> None:
    text = Text(model, random_tokens(5))
    filters = {"typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.01, "temperature_last": True}
    for rules in RULES.values():
        sampling = bind(SamplingConfig(0.9, seed=3, **filters, **rules), tokenizer, len(text.tokens), logprobs=2)
        for copied in (pickle.loads(pickle.dumps(sampling)), copy.deepcopy(sampling)):
            assert copied == sampling
            np.testing.assert_array_equal(text.scores(copied.native), text.scores(sampling.native))
            one, other = (text.session.follow(each.native) for each in (copied, sampling))
            assert one[1].tolist() == other[1].tolist()
            assert one[2][0].tolist() == other[2][0].tolist()


def test_a_device_brings_all_that_rules_need(path: Path) -> None:
    """Not only the largest logits of a row: those are excluded here."""
    device = _core.Model(str(path), device="ggml-cpu")
    tokens = random_tokens(6)
    logits = Text(device, tokens).logits
    best = np.argsort(-logits, kind="stable")
    bias: dict[int | str, float] = {int(token): -math.inf for token in best[:100]}
    assert Text(device, tokens).follow(SamplingConfig(logit_bias=bias).native) == best[100]
    _, chosen, (own, top, _) = Text(device, tokens).session.follow(SamplingConfig().native_sampling(None, logprobs=80))
    assert chosen[0] == best[0]
    assert top[0].tolist() == best[:80].tolist()
    assert own[0] == pytest.approx(log_softmax(logits)[best[0]], abs=1e-5)
    late = SamplingConfig(temperature_last=True, xtc_probability=1.0, xtc_threshold=0.0)
    assert Text(device, tokens).follow(late.native) == best[-1]
