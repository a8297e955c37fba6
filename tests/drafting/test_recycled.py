"""Recycled candidates against a slow twin of dictionaries, and what the n-gram drafter makes of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from support.decoding import drafted

from pystaged._core import RecycledCandidates, gumbel
from pystaged.decoding.policy import FixedPolicy
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import lookups
from pystaged.options.config import SamplingConfig

KEPT = RecycledCandidates.num_candidates
NEW_WEIGHT, PAIR_WEIGHT = 0.35, 0.7  # of what is seen beside what was known, of a pair beside its last token

VOCAB = 40
Rows = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]


def rows(n: int, seed: int, k: int = KEPT, vocab: int = VOCAB) -> Rows:
    """Rows as a pass could bring them."""
    random = np.random.default_rng(seed)
    candidates = np.stack([random.permutation(vocab)[:k] for _ in range(n)]).astype(np.int32)
    logits = -np.sort(-random.normal(0, 3, (n, k)), axis=1).astype(np.float32)
    before, tokens = random.integers(-1, 5, n), random.integers(0, 5, n)
    return before.astype(np.int32), tokens.astype(np.int32), candidates, logits


class Twin:
    """One dictionary, a row at a time."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], dict[int, float]] = {}

    def learn(self, before: object, tokens: object, candidates: object, logits: object) -> None:
        was = dict(self.known)
        taken: set[tuple[int, ...]] = set()
        for each in zip(*(part.tolist() for part in (before, tokens, candidates, logits)), strict=True):  # type: ignore[attr-defined]
            last, token, ids, scores = each
            powers = [math.exp(score - scores[0]) for score in scores]
            chances = {i: power / sum(powers) for i, power in zip(ids, powers, strict=True)}
            for key in {(token,), (last, token)} - taken:
                taken.add(key)
                mixed = {i: NEW_WEIGHT * chance for i, chance in chances.items()}
                for i, chance in was.get(key, {}).items():
                    mixed[i] = mixed.get(i, 0.0) + (1 - NEW_WEIGHT) * chance
                kept = dict(sorted(mixed.items(), key=lambda item: -item[1])[:KEPT])
                self.known[key] = {i: chance / sum(kept.values()) for i, chance in kept.items()}

    def chances(self, before: int, token: int) -> tuple[dict[int, float], int]:
        single, pair = self.known.get((token,), {}), self.known.get((before, token))
        if pair is None:
            return single, int(bool(single))
        weights = ((1 - PAIR_WEIGHT, single), (PAIR_WEIGHT, pair))
        return {i: sum(w * each.get(i, 0.0) for w, each in weights) for i in single | pair}, 2


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 13), st.integers(0, 99), st.sampled_from([1, 3, KEPT])), max_size=6))
def test_what_was_learnt_is_found(batches: list[tuple[int, int, int]]) -> None:
    memory, twin = RecycledCandidates(), Twin()
    for n, seed, k in batches:
        memory.learn(*rows(n, seed, k))
        twin.learn(*rows(n, seed, k))
    assert memory.num_learnt == sum(n for n, _, _ in batches)
    for before in range(-1, 6):
        for token in range(6):
            chances, known = memory.chances(before, token)
            expected, expected_known = twin.chances(before, token)
            assert known == expected_known
            assert chances == pytest.approx(expected, abs=1e-6)
            if known:
                assert sum(chances.values()) == pytest.approx(1, abs=1e-5)


def test_what_is_restored_is_what_was_known() -> None:
    memory, other = RecycledCandidates(), RecycledCandidates()
    for seed in range(5):
        memory.learn(*rows(13, seed, 5))
    other.restore(memory.entries())
    for field in ("key", "tokens", "chances"):
        np.testing.assert_allclose(memory.entries()[field], other.entries()[field], rtol=1e-6)
    assert other.num_learnt == 0


def test_the_newer_of_two_keys_has_a_slot() -> None:
    memory = RecycledCandidates(slots=8)
    one = np.array([1], np.int32)
    ids, logits = np.arange(KEPT, dtype=np.int32)[None], np.zeros((1, KEPT), np.float32)
    memory.learn(one, one, ids, logits)
    memory.learn(one, one + 4, ids + 10, logits)
    assert memory.chances(7, 5)[0].keys() == set(range(10, 10 + KEPT))
    assert memory.chances(7, 1) == ({}, 0)
    # However much is learnt, it takes no more room.
    for seed in range(50):
        memory.learn(*rows(13, seed))
    keys = memory.entries()["key"]
    assert len(keys) <= 4 + 8
    assert len(set(keys.tolist())) == len(keys)


def guessed(memory: RecycledCandidates | None, context: list[int], sampling: SamplingConfig) -> list[int]:
    drafter = TreeDrafter(lookups(recycled=memory), FixedPolicy(1, 1, KEPT, KEPT), VOCAB)
    drafter.start(np.array(context, np.int32))
    return drafted(drafter, sampling, 1).tokens.tolist()[1:]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_the_drafter_ranks_them_under_the_shared_noise(temperature: float) -> None:
    memory, sampling = RecycledCandidates(), SamplingConfig(temperature=temperature, seed=3)
    before, tokens, candidates, logits = rows(1, 4)
    memory.learn(before, tokens, candidates, logits)
    context = [9, int(before[0]), int(tokens[0])]
    scores = logits[0].astype(np.float64)
    if temperature:
        scores = scores / temperature + gumbel(3, len(context), candidates[0])
    assert guessed(memory, context, sampling) == candidates[0][np.argsort(-scores, kind="stable")].tolist()


def test_what_the_text_said_itself_counts_more() -> None:
    memory, greedy = RecycledCandidates(), SamplingConfig()
    ids = np.arange(10, 10 + KEPT, dtype=np.int32)[None]
    memory.learn(np.array([1], np.int32), np.array([2], np.int32), ids, -np.arange(KEPT, dtype=np.float32)[None])
    context = [1, 2, 7, 1, 2]
    assert guessed(None, context, greedy) == [7]
    assert guessed(memory, context, greedy) == [7, *ids[0, :-1].tolist()]
    assert guessed(memory, [5, 2], greedy) == ids[0].tolist()
    assert guessed(memory, [2, 5], greedy) == []


def test_tokens_beyond_the_vocabulary_are_not_proposed() -> None:
    memory = RecycledCandidates()
    before, tokens, candidates, logits = rows(1, 4)
    memory.learn(before, tokens, candidates + VOCAB - 3, logits)
    assert all(token < VOCAB for token in guessed(memory, [int(before[0]), int(tokens[0])], SamplingConfig()))


def test_chances_that_were_too_small_to_keep_are_none() -> None:
    memory = RecycledCandidates()
    memory.restore(entries([2, 5], np.arange(10, 10 + KEPT), np.arange(KEPT) == 3))
    assert memory.chances(-1, 2) == ({13: 1.0}, 1)
    assert guessed(memory, [5, 2], SamplingConfig()) == [13]


def entries(keys: list[int], tokens: ArrayLike, chances: ArrayLike) -> NDArray[np.void]:
    found = np.empty(len(keys), RecycledCandidates().entries().dtype)
    found["key"], found["tokens"], found["chances"] = keys, tokens, chances
    return found


def refused(memory: RecycledCandidates, call: str, *args: object) -> None:
    before = memory.entries()
    with pytest.raises((ValueError, TypeError)):
        getattr(memory, call)(*args)
    np.testing.assert_array_equal(before, memory.entries())


def test_what_cannot_be_is_refused() -> None:
    memory = RecycledCandidates(slots=8)
    before, tokens, candidates, logits = rows(4, 0, 5)
    memory.learn(before, tokens, candidates, logits)
    refused(memory, "learn", before[:3], tokens, candidates, logits)
    refused(memory, "learn", before, tokens, candidates, logits[:, :4])
    refused(memory, "learn", before, tokens, candidates[:, :0], logits[:, :0])
    refused(memory, "learn", before, tokens, np.zeros((4, KEPT + 1), np.int32), np.zeros((4, KEPT + 1), np.float32))
    refused(memory, "learn", before, tokens - 100, candidates, logits)
    refused(memory, "learn", before - 100, tokens, candidates, logits)
    refused(memory, "learn", before, tokens / 2, candidates, logits)
    refused(memory, "restore", entries([-1], 0, 1))
    refused(memory, "restore", entries([3], 0, 0))
    refused(memory, "restore", entries([3], 0, np.inf))
    refused(memory, "restore", entries([3], 0, np.where(np.arange(KEPT) == 0, -1, 1)))
    refused(memory, "restore", entries([3], -1, 1))
    refused(memory, "restore", entries([3, -1], 0, 1))
    refused(memory, "learn", np.full_like(before, 2**31 - 1), tokens, candidates, logits)
    for nothing in ((-2, 1), (-(2**31), 1), (1, -1)):
        assert memory.chances(*nothing) == ({}, 0)
    for other in (np.array([3]), np.array([0.5]), entries([3], 0, 1)[["key", "tokens"]], "text", None):
        refused(memory, "restore", other)
    for slots in (0, 1, 3, 2**40):
        with pytest.raises(ValueError, match="power of two"):
            RecycledCandidates(slots)


def test_rows_of_a_target_that_overflows_say_nothing() -> None:
    memory = RecycledCandidates(slots=8)
    before, tokens, candidates, logits = rows(3, 0, 5)
    memory.learn(before, tokens, candidates, np.full_like(logits, np.nan))
    memory.learn(before, tokens, candidates, np.full_like(logits, np.inf))
    assert len(memory.entries()) == 0
