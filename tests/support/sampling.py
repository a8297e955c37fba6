"""What samplings do to logits, written down slowly; and what llama.cpp's samplers do."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pystaged import SamplingConfig
from support.family_reference import log_softmax, softmax
from support.paths import table

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def samplings(kind: str) -> dict[str, dict[str, Any]]:
    """Options of a kind, by name; a bias may be for a token or a text."""
    return {
        name: options | ({"logit_bias": dict(options["logit_bias"])} if "logit_bias" in options else {})
        for of, name, options in table("samplings")
        if of == kind
    }


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
    result[order] = log_softmax(scaled[order])
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
