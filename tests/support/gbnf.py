"""What llama.cpp's own grammars allow."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import llama_cpp

from support.logits import llama_tokenize, llama_vocabulary
from support.paths import DATA

_open = ExitStack()  # as long as the process lasts


@cache
def _model() -> Any:
    llama_cpp.llama_backend_init()
    return _open.enter_context(llama_vocabulary(DATA / "ggml-vocab-gpt-2.gguf"))


def llama_cpp_accepts(grammar: str) -> Callable[[str], bool]:
    """A function that says whether llama.cpp allows a text by a grammar, which must be valid there."""
    model = _model()
    vocabulary = llama_cpp.llama_model_get_vocab(model)

    def accepts(text: str) -> bool:
        sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
        try:
            for token in (*llama_tokenize(model, text, False, False), llama_cpp.llama_vocab_eos(vocabulary)):
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
