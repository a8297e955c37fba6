"""Models to measure on: a file, or a GPT-2 Large that is made once and kept in the cache folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from pystaged.files import cache_folder
from pystaged.loading import names

WIDTH, LAYERS, HEADS, CONTEXT = 1280, 36, 20, 1024  # of GPT-2 Large


def find(model: str, quantization: str, report: Callable[[str], None] = lambda _: None) -> Path:
    """The file of a model.

    Args:
        model: "random" for a GPT-2 Large of random weights, "grown" for one that says what the house target says
            (see models/grow.py), else as in names.resolve.
        quantization: type of a model to be made; the recipe says which it can make.
        report: told before one is made, which takes minutes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a type that cannot be made.
    """
    if model not in ("random", "grown"):
        return names.resolve(model)
    folder = cache_folder() / "bench"
    path = folder / f"gpt2-large-{model}.{quantization}.gguf"
    house = names.resolve("house")
    # A model grown from an older house target would not be that of this version.
    if not path.exists() or path.stat().st_mtime < house.stat().st_mtime:
        report(f"making {path}, once")
        folder.mkdir(parents=True, exist_ok=True)
        shape = {"width": WIDTH, "layers": LAYERS, "quantization": quantization}
        if model == "grown":
            _recipe("grow").grow(house, path, **shape)
        else:
            others = {"heads": HEADS, "context": CONTEXT, "vocab_size": 50257, "vocabulary": house}
            _recipe("random_gpt2").write_random_gpt2(path, **shape, **others)
    return path


def _recipe(name: str) -> ModuleType:
    """A recipe of the models folder, which is not on Python's path."""
    spec = spec_from_file_location(f"pystaged.models.{name}", names.house(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {name}.py")
    module = sys.modules[spec.name] = module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
