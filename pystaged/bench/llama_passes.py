"""The runner that times llama.cpp's passes through llama-cpp-python: the peer's half of `passes`."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Any

import llama_cpp
import numpy as np


class Runner:
    """Times `llama_decode`.

    Args:
        setup: path; rows to time; repeats of each; threads; context_tokens; extra_buffers: whether weights may be
            repacked.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup

    def run(self, _: dict[str, Any]) -> dict[int, float]:
        """Median milliseconds of one llama_decode over n rows of logits, by n."""
        setup = self._setup
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = setup["extra_buffers"]
        model = llama_cpp.llama_model_load_from_file(setup["path"].encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        # One row runs on n_threads, several on n_threads_batch.
        params.n_threads = params.n_threads_batch = setup["threads"]
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        memory = llama_cpp.llama_get_memory(context)
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        tokens = np.random.default_rng(0).integers(0, vocab_size, setup["context_tokens"])
        decode(context, tokens, 0)
        times: dict[int, list[float]] = {n: [] for n in setup["rows"]}
        for repeat in range(setup["repeats"] + 1):
            for n in setup["rows"]:
                start = time.perf_counter()
                decode(context, tokens[:n], len(tokens))
                elapsed = time.perf_counter() - start
                llama_cpp.llama_memory_seq_rm(memory, 0, len(tokens), -1)
                if repeat > 0:
                    times[n].append(elapsed)
        return {n: 1e3 * statistics.median(values) for n, values in times.items()}

    def close(self) -> None:
        pass


def decode(context: Any, tokens: Any, position: int) -> None:
    """One llama_decode of a chain of tokens from `position` on, with logits for all."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i] = int(token)
        batch.pos[i] = position + i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = 1
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama_decode returned {status}")
    # The logits are lazily computed where a device is asynchronous.
    ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.c_void_p)
