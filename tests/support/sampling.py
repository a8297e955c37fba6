"""What samplings do to logits, written down slowly; and what llama.cpp's samplers do."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pystaged import SamplingConfig
from support.family_reference import softmax

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


# ---- Rules ----


def ruled(
    logits: Floats,
    s: SamplingConfig,
    prefix: Sequence[int],
    *,
    prompt_length: int = 0,
    ends: Sequence[int] = (),
    breakers: Sequence[Sequence[int]] = (),
) -> Doubles:
    """Logits after bias, exclusions, penalties and DRY."""
    x = logits.astype(np.float64)
    for token, bias in s.logit_bias.items():
        assert isinstance(token, int)
        x[token] += bias
    if s.ignore_eos or len(prefix) < prompt_length + s.min_tokens:
        x[list(ends)] = -np.inf
    window = last(prefix, s.repeat_last_n)
    for token, count in Counter(window).items():
        x[token] = x[token] * s.repeat_penalty if x[token] <= 0 else x[token] / s.repeat_penalty
        x[token] -= count * s.frequency_penalty + s.presence_penalty
    if s.dry_multiplier:
        single = {breaker[0] for breaker in breakers if len(breaker) == 1}
        for token, length in repetitions(last(prefix, s.dry_penalty_last_n), breakers).items():
            if length >= s.dry_allowed_length and token not in single:
                x[token] -= s.dry_multiplier * s.dry_base ** (length - s.dry_allowed_length)
    return x


def last(tokens: Sequence[int], n: int) -> list[int]:
    return list(tokens) if n == -1 else list(tokens)[len(tokens) - min(n, len(tokens)) :]


def repetitions(window: list[int], breakers: Sequence[Sequence[int]]) -> dict[int, int]:
    """The tokens that would continue a repetition of the window's end, and how long that is before them."""
    limit = len(window)
    for start in reversed(range(len(window))):
        found = [len(breaker) for breaker in breakers if window[start : start + len(breaker)] == list(breaker)]
        if found:
            limit = len(window) - start - max(found)
            break
    lengths: dict[int, int] = {}
    for end in range(len(window) - 1):  # of the earlier one; the token after it would continue both
        same = 0
        while same <= end and window[end - same] == window[-1 - same]:
            same += 1
        token = window[end + 1]
        lengths[token] = max(lengths.get(token, 0), min(same, limit))
    return lengths


# ---- Filters ----


def kept(logits: Doubles, s: SamplingConfig, *, coin: bool) -> Doubles:
    """log p of every token after temperature and filters, -inf for those that are filtered out.

    Args:
        coin: whether XTC excludes anything here.
    """
    temperature = float(np.float32(s.temperature))
    order = [int(i) for i in np.argsort(-logits, kind="stable") if logits[i] > -np.inf]
    scaled = logits / (1 if s.temperature_last or temperature == 0 else temperature)
    if temperature == 0 and not s.temperature_last:
        order = order[:1]
    if s.top_k:
        order = order[: s.top_k]
    if s.typical_p < 1:
        p = softmax(scaled[order])
        surprise = -np.log(p)
        nearest = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        count = int(np.searchsorted(np.cumsum(p[nearest]), np.float32(s.typical_p), side="right")) + 1
        order = [order[i] for i in sorted(nearest[:count].tolist())]
    if s.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(softmax(scaled[order])), np.float32(s.top_p))) + 1]
    if s.min_p > 0:
        p = softmax(scaled[order])
        order = [token for token, each in zip(order, p, strict=True) if each >= np.float32(s.min_p) * p[0]]
    if coin and s.xtc_threshold <= 0.5:
        above = int((softmax(scaled[order]) >= np.float32(s.xtc_threshold)).sum())
        order = order[max(above - 1, 0) :]
    if s.temperature_last:
        if temperature == 0:
            order = order[:1]
        else:
            scaled = scaled / temperature
    result = np.full(len(logits), -np.inf)
    largest = scaled[order].max()
    result[order] = scaled[order] - largest - np.log(np.exp(scaled[order] - largest).sum())
    return result


# ---- llama.cpp ----


def llama_chain(logits: Floats, samplers: Sequence[Any], prefix: Sequence[int] = ()) -> tuple[Floats, Floats]:
    """Logits and probabilities after samplers of llama.cpp, which have accepted a prefix; -inf and 0 for tokens that
    they dropped. Frees the samplers."""
    array = (llama_cpp.llama_token_data * len(logits))(*((i, float(x), 0.0) for i, x in enumerate(logits)))
    data = llama_cpp.llama_token_data_array(array, len(logits), -1, False)
    for sampler in samplers:
        assert sampler
        for token in prefix:
            llama_cpp.llama_sampler_accept(sampler, token)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(data))
        llama_cpp.llama_sampler_free(sampler)
    values, probabilities = np.full(len(logits), -np.inf, np.float32), np.zeros(len(logits), np.float32)
    for i in range(data.size):
        values[data.data[i].id] = data.data[i].logit
    left = values > -np.inf
    probabilities[left] = softmax(values[left].astype(np.float64))
    return values, probabilities


def llama_dry(vocab: Any, s: SamplingConfig) -> Any:
    """llama.cpp's DRY; a window of all must be given as a number."""
    texts = [text.encode() for text in s.dry_sequence_breakers]
    return llama_cpp.llama_sampler_init_dry(
        vocab,
        s.dry_multiplier,
        s.dry_base,
        s.dry_allowed_length,
        s.dry_penalty_last_n,
        (ctypes.c_char_p * len(texts))(*texts),
        len(texts),
    )
