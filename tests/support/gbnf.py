"""What llama.cpp's own grammars allow."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp

_VOCABULARY = Path(__file__).parents[1] / "data" / "ggml-vocab-gpt-2.gguf"


@cache
def _vocabulary() -> Any:
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(_VOCABULARY).encode(), params)
    assert model is not None
    return llama_cpp.llama_model_get_vocab(model)


def llama_cpp_accepts(grammar: str) -> Callable[[str], bool]:
    """A function that says whether llama.cpp allows a text by a grammar, which must be valid there."""
    vocabulary = _vocabulary()

    def tokens(text: str) -> list[int]:
        data, found = text.encode(), (llama_cpp.llama_token * 200)()
        count = llama_cpp.llama_tokenize(vocabulary, data, len(data), found, 200, False, False)
        return list(found[:count])

    def accepts(text: str) -> bool:
        sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
        try:
            for token in (*tokens(text), llama_cpp.llama_vocab_eos(vocabulary)):
                candidates = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(token, 0.0, 0.0))
                array = llama_cpp.llama_token_data_array(candidates, 1, -1, False)
                llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
                if candidates[0].logit < -1e30:
                    return False
                if token != llama_cpp.llama_vocab_eos(vocabulary):
                    llama_cpp.llama_sampler_accept(sampler, token)
            return True
        finally:
            llama_cpp.llama_sampler_free(sampler)

    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
    assert sampler, f"llama.cpp does not accept {grammar}"
    llama_cpp.llama_sampler_free(sampler)
    return accepts
