"""What a GGUF file says about itself."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_metadata(path: Path) -> dict[str, str]:
    """Single values of a GGUF file's metadata, as text; empty where it cannot be read."""
    import llama_cpp  # noqa: PLC0415

    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    logger = logging.getLogger("llama-cpp-python")  # prints what libllama says, unless its level is high
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    logger.setLevel(level)
    if not model:
        return {}
    try:
        return {
            _text(llama_cpp.llama_model_meta_key_by_index, model, index): _text(
                llama_cpp.llama_model_meta_val_str_by_index, model, index
            )
            for index in range(llama_cpp.llama_model_meta_count(model))
        }
    finally:
        llama_cpp.llama_model_free(model)


def _text(get: Callable[..., Any], model: object, index: int) -> str:
    size = get(model, index, ctypes.create_string_buffer(1), 1) + 1  # as of snprintf
    buffer = ctypes.create_string_buffer(size)
    get(model, index, buffer, size)
    return buffer.value.decode("utf-8", "replace")
