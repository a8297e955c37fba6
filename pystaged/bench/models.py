"""Models to measure on: a file, or a GPT-2 Large that is made once and kept in the cache folder."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from pystaged.bench.grow import grow
from pystaged.bench.random_model import write_random_gpt2
from pystaged.loading import names

WIDTH, LAYERS, HEADS, CONTEXT = 1280, 36, 20, 1024  # of GPT-2 Large


def find(model: str, quantization: str) -> Path:
    """The file of a model.

    Args:
        model: "random" for a GPT-2 Large of random weights, "grown" for one that says what the house target says
            (see grow.py), else as in names.resolve.
        quantization: type of a model to be made: F32, F16, Q8_0, Q4_0 (random also BF16).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a type that cannot be made.
    """
    if model not in ("random", "grown"):
        return names.resolve(model)
    folder = Path(platformdirs.user_cache_dir("pystaged")) / "bench"
    path = folder / f"gpt2-large-{model}.{quantization}.gguf"
    house = names.resolve("house")
    # A model grown from an older house target would not be that of this version.
    if not path.exists() or path.stat().st_mtime < house.stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        if model == "random":
            write_random_gpt2(
                path,
                width=WIDTH,
                layers=LAYERS,
                heads=HEADS,
                vocab_size=50257,
                context=CONTEXT,
                quantization=quantization,
                vocabulary=house,
            )
        else:
            grow(house, path, width=WIDTH, layers=LAYERS, quantization=quantization)
    return path
