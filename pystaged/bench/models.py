"""Models for benchmarks: a file, or a model of a known shape, made once and kept in the cache folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from pystaged._core import Tokenizer
from pystaged.files import cache_folder
from pystaged.loading import drafts, names
from pystaged.loading.file_types import FILE_TYPES
from pystaged.loading.heads import find_head
from pystaged.loading.progress import announced
from pystaged.loading.quantize import quantize

WIDTH, LAYERS, HEADS, CONTEXT = 1280, 36, 20, 1024  # GPT-2 Large's
LLAMAS: dict[str, dict[str, Any]] = {  # Llama 3.2 1B and 3.1 8B
    "llama1b": {
        "width": 2048,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "ffn_width": 8192,
        "vocab_size": 128256,
        "context": 131072,
        "rope_base": 5e5,
        "tie": True,
    },
    "llama8b": {
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn_width": 14336,
        "vocab_size": 128256,
        "context": 131072,
        "rope_base": 5e5,
        "tie": False,
    },
}
# SmolLM2 has more layers and fewer tokens than Llama 3.2 1B; this ffn_width gives it as many weights.
GROWN_SMOLLM2 = {"width": 2048, "layers": 30, "heads": 32, "kv_heads": 8, "ffn_width": 4352}
# As of gpt-oss-20b: 4 of 32 experts, whose weights are 49% of what one token reads.
MIXED_SMOLLM2 = {"experts": 32, "used": 4, "width": 576}
FROM_SMOLLM2 = ("grown-smollm2", "mixed-smollm2")
MADE = ("grown", *FROM_SMOLLM2, "random", *LLAMAS)


def find(model: str, quantization: str, report: Callable[[str], None] = lambda _: None) -> Path:
    """The file of a model, made or downloaded if necessary.

    Args:
        model: a name from MADE, else as in names.resolve. "random": a GPT-2 Large of random weights; "grown": its shape
            with the bundled target's output; "llama1b", "llama8b": Llamas of random weights; "grown-smollm2": 1.2
            billion weights with SmolLM2's output; "mixed-smollm2": a mixture with its output, 4 of 32 experts for each
            token, in SmolLM2's own types.
        quantization: type of a model to make: F32, F16, Q8_0, Q4_0 (random also BF16; Llamas also Q4_K and Q4_K_M).
        report: called with a line before a model is made, which takes minutes, or downloaded.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the model cannot be made in that type.
    """
    if model not in MADE:
        return names.resolve(model, announced(report))
    source = names.resolve("smollm2" if model in (*LLAMAS, *FROM_SMOLLM2) else "bundled")
    folder = cache_folder() / "bench"
    name = f"gpt2-large-{model}" if model in ("grown", "random") else model
    path = folder / (f"{name}.gguf" if model == "mixed-smollm2" else f"{name}.{quantization}.gguf")
    # The cache may hold a model that an older version grew from an older source.
    if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
        report(f"making {path}, once")
        folder.mkdir(parents=True, exist_ok=True)
        _make(model, source, path, quantization)
    return path


def check_type(model: str, quantization: str) -> None:
    """Raise ValueError for a type in which a model cannot be made."""
    if model not in MADE or model == "mixed-smollm2":
        return
    types: tuple[str, ...] = _recipe("random_weights" if model in ("random", *LLAMAS) else "grow").TYPES
    if model in LLAMAS:
        types = _recipe("random_weights").LLAMA_TYPES
    elif model == "grown-smollm2":
        types = (*types, *(name.upper() for name in FILE_TYPES if name.upper() not in types))
    if quantization not in types:
        raise ValueError(f"{model} cannot be made in the type {quantization!r}: choose from {', '.join(types)}")


def find_draft(model: str, draft: str | Path | None, report: Callable[[str], None] = lambda _: None) -> Path | None:
    """The file of a draft, as in names.resolve_draft; "auto" is the bundled draft for all models with its output, the
    draft head that fits, or a known draft in the cache."""
    progress = announced(report)
    found = names.resolve_draft("bundled" if model in ("grown", "random") else model, draft, progress)
    if found or draft != "auto" or model in LLAMAS:
        return found
    path = names.resolve("smollm2" if model in FROM_SMOLLM2 else model, progress)
    tokenizer = Tokenizer(os.fsencode(path))
    return find_head(tokenizer) or drafts.find_draft(tokenizer, report)


def _make(model: str, source: Path, path: Path, quantization: str) -> None:
    random, growing = "random_weights", "grow"
    shape = {"width": WIDTH, "layers": LAYERS, "quantization": quantization}
    if model == "grown":
        _recipe(growing).grow(source, path, **shape)
    elif model == "random":
        others = {"heads": HEADS, "context": CONTEXT, "vocab_size": 50257, "vocabulary": source}
        _recipe(random).write_random_gpt2(path, **shape, **others)
    elif model in LLAMAS:
        _recipe(random).write_random_llama(path, **LLAMAS[model], quantization=quantization, vocabulary=source)
    elif model == "mixed-smollm2":
        _recipe(growing).mix_llama(source, path, **MIXED_SMOLLM2)
    elif quantization in _recipe(growing).TYPES:
        _recipe(growing).grow_llama(source, path, **GROWN_SMOLLM2, quantization=quantization)
    else:
        with TemporaryDirectory(dir=path.parent) as unfinished:
            floats = Path(unfinished) / "floats.gguf"
            _recipe(growing).grow_llama(source, floats, **GROWN_SMOLLM2, quantization="F16")
            quantize(floats, path, quantization)


def _recipe(name: str) -> ModuleType:
    """Import a recipe from the models folder, which is not on Python's path."""
    full_name = f"pystaged.models.{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    spec = spec_from_file_location(full_name, names.bundled_file(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {name}.py")
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module
