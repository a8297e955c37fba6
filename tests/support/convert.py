"""What tests share of convert."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader

from pystaged.loading.quantize import quantize_checkpoint
from support.logits import llama_tokenize, llama_vocabulary
from support.paths import DATA


def convert(folder: Path, out: Path, quantization: str = "F32", **options: Any) -> None:
    """A checkpoint as a GGUF file of floats."""
    quantize_checkpoint(folder, out, quantization, **options)


def llama_tokens(path: Path, text: str) -> list[int]:
    """The tokens of a text as llama-cpp-python sees them in a GGUF file."""
    with llama_vocabulary(path) as model:
        return llama_tokenize(model, text)


def write_bfloat16(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """A safetensors file by hand: numpy has no such type."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_json(name: str, **changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))

    return change


def needed_transformers() -> Any:
    """The module; a test without it, or without PyTorch, is skipped."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return pytest.importorskip("transformers", reason="transformers is not installed")


@cache
def gpt2_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of GPT-2."""
    fields = GGUFReader(DATA / "ggml-vocab-gpt-2.gguf").fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    return tokens, merges
