"""Runner for llama-cpp-python: plain, or with its LlamaPromptLookupDecoding."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from numpy.typing import NDArray

from pystaged.bench.worker import Measurement
from pystaged.options.config import SamplingConfig

_LOOKUP_TOKENS = 2  # as its documentation advises for CPUs


class _Counting(LlamaPromptLookupDecoding):
    """Prompt lookup that counts its calls: one after each pass."""

    calls = 0

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        self.calls += 1
        return super().__call__(input_ids, **kwargs)


class Runner:
    """Decodes with `Llama.generate`.

    Args:
        setup: model, threads, n_ctx; lookup: whether to use prompt lookup; extra_buffers: whether to repack weights.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        if not setup["extra_buffers"]:
            _without_extra_buffers()
        self._lookup = _Counting(num_pred_tokens=_LOOKUP_TOKENS) if setup["lookup"] else None
        self._llama: Any = llama_cpp.Llama(
            setup["model"],
            n_ctx=setup["n_ctx"],
            n_threads=setup["threads"],
            n_threads_batch=setup["threads"],
            draft_model=self._lookup,
            logits_all=self._lookup is not None,  # with a draft, longer prompts than a batch fail otherwise
            flash_attn=True,
            verbose=False,
        )
        self._vocab = llama_cpp.llama_model_get_vocab(self._llama.model)

    def run(self, job: dict[str, Any]) -> Measurement:
        sampling: SamplingConfig = job["sampling"]
        self._llama.reset()
        self._llama.set_seed(sampling.seed)
        calls = self._lookup.calls if self._lookup else 0
        begin = time.perf_counter()
        tokens, first = list[int](), 0.0
        for token in self._llama.generate(
            job["prompt"],
            temp=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repeat_penalty=1.0,
        ):
            first = first or time.perf_counter() - begin
            tokens.append(int(token))
            if len(tokens) == job["max_tokens"] or llama_cpp.llama_vocab_is_eog(self._vocab, token):
                break
        seconds = time.perf_counter() - begin - first
        counted = len(tokens) - 1  # the first token comes from prefill
        steps = counted if self._lookup is None else self._lookup.calls - calls
        return Measurement(counted, seconds, first, tokens, steps)

    def close(self) -> None:
        self._llama.close()


def _without_extra_buffers() -> None:
    # `Llama` has no argument for it.
    defaults = llama_cpp.llama_model_default_params

    def plain() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_model_default_params = plain
    llama_cpp.llama_cpp.llama_model_default_params = plain
