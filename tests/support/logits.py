"""Logits of a file, by our engine and by llama.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pystaged import _core
from pystaged.bench.passes import decode
from support.steps import evaluate

Floats = npt.NDArray[np.float32]


def engine_logits(path: Path, tokens: list[int]) -> Floats:
    """Logits after each token, in one evaluation."""
    return model_logits(_core.Model(str(path)), tokens)


def model_logits(model: _core.Model, tokens: list[int]) -> Floats:
    """The same of a model that is loaded; in several, if its recurrent layers have no room for so many rows."""
    session, found = _core.Session(model), []
    for first in range(0, len(tokens), model.most_pending):
        piece = tokens[first : first + model.most_pending]
        evaluate(session, piece, range(-1, len(piece) - 1))
        found += [session.logits(row) for row in range(len(piece))]
        session.commit(range(len(piece)))
    return np.stack(found)


@contextmanager
def llama_context(
    path: Path,
    gpu_layers: int = 0,
    *,
    n_ctx: int = 256,
    rows: int = 256,
    num_threads: int = 0,
    exact: bool = False,
    ahead: bool = False,
    other: Any = None,
) -> Iterator[Any]:
    """A context of llama.cpp, without the repacked weights that crash on some CPUs.

    Args:
        rows: of a pass at most.
        num_threads: 0 for one per physical core.
        exact: whether keys and values are F32.
        ahead: of the model's MTP layer.
        other: the context of a draft's target.
    """
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False
    model_params.n_gpu_layers = gpu_layers
    model_params.load_mtp = ahead
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, path
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, rows, rows
    params.n_seq_max, params.kv_unified, params.swa_full = 8, True, True
    params.n_threads = params.n_threads_batch = num_threads or _core.choose_cores().few
    if exact:
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if ahead:
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
    params.ctx_other = other
    context = llama_cpp.llama_init_from_model(model, params)
    try:
        yield context
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


@contextmanager
def llama_vocabulary(path: Path) -> Iterator[Any]:
    """A model of llama.cpp without its weights."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model, path
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def llama_tokenize(model: Any, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
    """The tokens of a text by llama.cpp."""
    data, vocab = text.encode(), llama_cpp.llama_model_get_vocab(model)
    tokens = (llama_cpp.llama_token * (len(data) + 2))()
    count = llama_cpp.llama_tokenize(vocab, data, len(data), tokens, len(tokens), add_special, parse_special)
    return list(tokens[:count])


def llama_pass(context: Any, tokens: list[int], position: int) -> Floats:
    """Logits after each token of one pass of llama.cpp."""
    decode(context, tokens, position)
    return llama_output(context, len(tokens))


def llama_ahead(path: Path, states: Floats, tokens: list[int]) -> Floats:
    """Logits of a chain of rows of a model's MTP layer by llama.cpp: of tokens, and of what the head reads of the token
    before each, float32[n, width]."""
    with llama_context(path, exact=True, ahead=True) as context:
        return _joined_pass(context, states, tokens, 0)


def llama_assistant(target: Path, path: Path, text: list[int], states: Floats, tokens: list[int]) -> Floats:
    """Logits of rows of an assistant of Gemma 4 by llama.cpp, each alone behind a text of its target: of tokens, and of
    hidden states as llama_ahead() takes them, float32[n, target's width]."""
    with (
        llama_context(target, n_ctx=512, rows=512, exact=True) as of_target,
        llama_context(path, n_ctx=512, exact=True, ahead=True, other=of_target) as context,
    ):
        decode(of_target, text, 0)
        rows = [_joined_pass(context, states[i : i + 1], [token], len(text)) for i, token in enumerate(tokens)]
        return np.concatenate(rows)


def _joined_pass(context: Any, states: Floats, tokens: list[int], first: int) -> Floats:
    """Logits of rows of tokens and hidden states, float32[n, width], at positions from `first` on."""
    batch = llama_cpp.llama_batch_ext_init(context)
    for i, (state, token) in enumerate(zip(states, tokens, strict=True)):
        values = state.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        llama_cpp.llama_batch_ext_add_token(batch, 0, token)
        at = first + i
        assert llama_cpp.llama_batch_ext_set_embd_token(batch, i, llama_cpp.llama_embd(values, 1, len(state)))
        assert llama_cpp.llama_batch_ext_set_pos(batch, i, (ctypes.c_int32 * 4)(at, at, at, 0))
        assert llama_cpp.llama_batch_ext_set_output_logits(batch, i, True)
    assert llama_cpp.llama_process(context, llama_cpp.LLAMA_PROCESS_TYPE_DECODE, batch) == 0
    llama_cpp.llama_batch_ext_free(batch)
    return llama_output(context, len(tokens))


def llama_output(context: Any, num_rows: int) -> Floats:
    """The logits of llama.cpp's last pass."""
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context)))
    found: Floats = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (num_rows, vocab_size))
    return found.copy()


def llama_logits(path: Path, windows: list[list[int]]) -> list[Floats]:
    """Logits after each token of each window, by llama.cpp."""
    results = []
    with llama_context(path) as context:
        for tokens in windows:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            results.append(llama_pass(context, tokens, 0))
    return results
