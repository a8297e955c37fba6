"""Recycled candidates: what the target found likeliest after a token, and after a pair of tokens, in earlier passes.

Every row of a verified tree says what the target would go on with, the rejected ones too; "Turning Trash into Treasure"
(Luo et al. 2024, arXiv 2408.08696) drafts from that. Here candidates keep their chances, to be mixed with those of
n-grams and ranked under the shared noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KEPT = 16  # candidates of a token or a pair
_SLOTS = 1 << 16  # for pairs; half as many for tokens
_NEW_WEIGHT = 0.35  # weight of what is seen beside what was known
_PAIR_WEIGHT = 0.7  # weight of a pair's candidates beside its last token's
_KEY_OFFSET = 2  # added to a pair's first token, -1 for none: the keys of pairs are above all tokens
_FIBONACCI = 0x9E3779B97F4A7C15  # Fibonacci hashing: the slot of a pair is the product's upper bits


class RecycledCandidates:
    """The target's likeliest next tokens after a token and after a pair, with probabilities; one for all texts of a
    model, which take turns.

    Two direct-mapped tables, in which the newer of two keys has a slot: 13 MB, taken at once, because memory that comes
    little by little looks like a leak.

    Args:
        slots: for pairs, a power of two; half as many for tokens.
    """

    num_candidates = KEPT  # that each row is asked for

    def __init__(self, slots: int = _SLOTS) -> None:
        self._num_token_slots, self._shift = slots // 2, 65 - slots.bit_length()
        self.num_learnt = 0  # rows
        # Those of tokens first, then those of pairs; key -1 for a free slot.
        self._keys = np.full(3 * slots // 2, -1, np.int64)
        self._tokens = np.full((3 * slots // 2, KEPT), -1, np.int32)
        self._chances = np.full((3 * slots // 2, KEPT), 0, np.float32)

    def learn(
        self,
        before: NDArray[np.int32],
        tokens: NDArray[np.int32],
        candidates: NDArray[np.int32],
        logits: NDArray[np.float32],
    ) -> None:
        """Take in verified rows; of two with the same key the earlier counts.

        Args:
            before: int32[n], the token before each row's, -1 for none; tokens: int32[n], each row's own.
            candidates: int32[n, k], the tokens of the largest logits after each row, best first, k at most KEPT;
            logits: float32[n, k], natural log up to a constant of the row.
        """
        if len(tokens) == 0:
            return
        # Twice, by token and by pair; backwards, because of equal slots numpy keeps the last.
        rows = np.tile(np.arange(len(tokens))[::-1], 2)
        last = tokens[rows].astype(np.int64)
        keys = last + (before[rows].astype(np.int64) + _KEY_OFFSET << 32)
        keys[: len(tokens)] = last[: len(tokens)]
        chances = np.exp(logits - logits[:, :1])
        self._blend(keys, candidates[rows], (chances / chances.sum(1, keepdims=True))[rows])
        self.num_learnt += len(tokens)

    def chances(self, before: int, token: int) -> tuple[dict[int, float], int]:
        """The probability of each candidate after these two tokens (`before` is -1 for none), 0 candidates if nothing
        is known; and after how many tokens it is known."""
        found = self._find(token, token & (self._num_token_slots - 1))
        key = (before + _KEY_OFFSET) << 32 | token
        pair = self._find(key, self._num_token_slots + (key * _FIBONACCI % 2**64 >> self._shift))
        if pair is None:
            return (found, 1) if found else ({}, 0)
        if found is None:
            return pair, 2
        mixed = {candidate: (1 - _PAIR_WEIGHT) * chance for candidate, chance in found.items()}
        for candidate, chance in pair.items():
            mixed[candidate] = mixed.get(candidate, 0.0) + _PAIR_WEIGHT * chance
        return mixed, 2

    def become(self, other: RecycledCandidates) -> None:
        """Know what another one of as many slots knows, and no more."""
        self._keys[:], self._tokens[:], self._chances[:] = other._keys, other._tokens, other._chances

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """All that is known: keys int64[n], candidates int32[n, KEPT], -1 for none, and their chances float32[n, KEPT];
        those of tokens first."""
        used = np.nonzero(self._keys >= 0)[0]
        found = self._keys[used], self._tokens[used], self._chances[used]
        whole = found[2].sum(1) > 0  # others are being written by another thread
        return found[0][whole], found[1][whole], found[2][whole]

    def restore(self, keys: NDArray[np.int64], candidates: NDArray[np.int32], chances: NDArray[np.float32]) -> None:
        """Take in what `entries` gave."""
        slots = self._slots_of(keys)
        # Chances that were too small for how they were kept are 0.
        self._keys[slots], self._tokens[slots] = keys, np.where(chances > 0, candidates, -1)
        self._chances[slots] = chances / chances.sum(1, keepdims=True)

    def _blend(self, keys: NDArray[np.int64], ids: NDArray[np.int32], chances: NDArray[np.float32]) -> None:
        """Blend candidates, [n, k] with k <= KEPT, into what is known of their keys."""
        slots = self._slots_of(keys)
        known = (self._keys[slots] == keys) * np.float32(1 - _NEW_WEIGHT)
        old_ids, old = self._tokens[slots], self._chances[slots] * known[:, None]
        same = ids[:, :, None] == old_ids[:, None, :]
        chances = np.float32(_NEW_WEIGHT) * chances + (same * old[:, None, :]).sum(2)
        old[same.any(1)] = 0
        ids, chances = np.concatenate([ids, old_ids], axis=1), np.concatenate([chances, old], axis=1)
        best = (np.arange(len(keys))[:, None], np.argsort(-chances, axis=1, kind="stable")[:, :KEPT])
        ids, chances = ids[best], chances[best]
        ids[chances == 0] = -1
        self._keys[slots], self._tokens[slots] = keys, ids
        self._chances[slots] = chances / chances.sum(1, keepdims=True)

    def _slots_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        spread = (keys.astype(np.uint64) * np.uint64(_FIBONACCI)) >> np.uint64(self._shift)
        return np.where(
            keys < 1 << 32, keys & (self._num_token_slots - 1), self._num_token_slots + spread.astype(np.int64)
        )

    def _find(self, key: int, slot: int) -> dict[int, float] | None:
        if self._keys[slot] != key:
            return None
        ids, chances = self._tokens[slot].tolist(), self._chances[slot].tolist()
        return {token: chance for token, chance in zip(ids, chances, strict=True) if token >= 0} or None
