"""What files say of themselves: as libllama reads it, and never by ending the process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest
from support.families import CASES
from support.gguf_parts import ARRAY, STRING, array, changed, drop, put, text
from support.logits import llama_vocabulary
from support.random_models import write

from pystaged.loading import cache
from pystaged.loading.metadata import read_metadata


def libllama_says(path: Path) -> dict[str, str]:
    def said(get: Callable[..., int], index: int) -> str:
        buffer = ctypes.create_string_buffer(1 << 16)
        assert get(model, index, buffer, len(buffer)) < len(buffer)
        return buffer.value.decode()

    with llama_vocabulary(path) as model:
        return {
            said(llama_cpp.llama_model_meta_key_by_index, i): said(llama_cpp.llama_model_meta_val_str_by_index, i)
            for i in range(llama_cpp.llama_model_meta_count(model))
        }


@pytest.mark.parametrize("case", ["gpt2", "llama-yarn", "granite-no-rope", "gemma3"])
def test_as_libllama_reads_it(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / "model.gguf", CASES[case])
    found = read_metadata(path)
    assert found["general.architecture"] == CASES[case].family
    assert found == libllama_says(path)


def test_nothing_of_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF, but no more")
    assert read_metadata(tmp_path / "model.gguf") == read_metadata(tmp_path / "none.gguf") == {}


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", CASES["llama"])


def test_a_vocabulary_that_ends_libllama(cached: Path) -> None:
    """A token stands there twice, for which libllama aborts."""
    twice = put("tokenizer.ggml.tokens", ARRAY, array(STRING, [text("a")] * 300))
    changed(cached.read_bytes(), cached, twice)
    assert cache.about(cached)[:2] == ("?", "2 x 64, 4 heads")


def test_what_terminals_would_obey_is_not_shown(cached: Path) -> None:
    changed(cached.read_bytes(), cached, put("llama.block_count", STRING, text("\x1b[2J")))
    assert cache.about(cached)[1] == "?[2J x 64, 4 heads"
    changed(cached.read_bytes(), cached, drop("general.architecture"))
    assert cache.about(cached)[1] == "? x ?, ? heads"
