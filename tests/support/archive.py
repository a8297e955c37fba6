"""Vocabularies and chat templates of llama.cpp's sources, which are tried where PYSTAGED_LLAMA_CPP names those."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MODELS = Path(os.environ.get("PYSTAGED_LLAMA_CPP", "")) / "models"
VOCABULARIES = sorted(MODELS.glob("ggml-vocab-*.gguf.out"))
TEMPLATES = sorted((MODELS / "templates").glob("*.jinja"))
needed = pytest.mark.skipif(not VOCABULARIES, reason="PYSTAGED_LLAMA_CPP names no sources of llama.cpp")
