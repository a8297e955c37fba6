"""Whose libraries pystaged runs: llama-cpp-python's, or a wheel's own (packaging/build_wheel.py)."""

from __future__ import annotations

import pytest

from pystaged import _llama

of_llama_cpp = pytest.mark.skipif(_llama.IS_INSIDE, reason="this wheel has its own libraries")
# How far logits on ggml may be from llama.cpp's in the same passes. Two builds of ggml, for other CPUs, round products
# as differently as ggml and our kernels do.
LLAMA_TOLERANCE = 0.2 if _llama.IS_INSIDE else 1e-3
