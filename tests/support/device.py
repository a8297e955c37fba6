"""The device on which the portable path is tested: $PYSTAGED_TEST_DEVICE, by default ggml's CPU backend."""

from __future__ import annotations

import os

DEVICE = os.environ.get("PYSTAGED_TEST_DEVICE", "ggml-cpu")
GPU_LAYERS = 0 if DEVICE == "ggml-cpu" else 99  # of llama.cpp
