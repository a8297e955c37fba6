"""Models for benchmarks: a file, or a model of a known shape, made once and kept among the cached models."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pystaged._core import Tokenizer
from pystaged.loading import cache, drafts, names
from pystaged.loading.progress import announced

GPT2_LARGE = {"width": 1280, "layers": 36, "heads": 20, "context": 1024, "vocab_size": 50257}
LLAMA_1B: dict[str, Any] = {  # Llama 3.2's
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
}
# SmolLM2 has more layers and fewer tokens than Llama 3.2 1B; this ffn_width gives it as many weights.
GROWN_SMOLLM2 = {"width": 2048, "layers": 30, "heads": 32, "kv_heads": 8, "ffn_width": 4352}
NOISE = 0.08  # of a draft that agrees with its target as often as a 1B model with its 8B one
# What is made, by which script of the models folder.
_SCRIPTS = {"grown-smollm2": "grow", "pair": "grow", "random": "random_weights", "llama1b": "random_weights"}
_ABOUT = {  # in reports
    "grown-smollm2": "grown from SmolLM2: the cost of a billion weights, the output of SmolLM2",
    "pair": "the 1B grown from SmolLM2, drafted by SmolLM2 with noise of {noise:g}",
    **dict.fromkeys(("random", "llama1b"), "random weights: costs are meaningful, acceptance is not"),
    "bundled": "the small target in the package",
}


def find(model: str, quantization: str, report: Callable[[str], None] = lambda _: None) -> Path:
    """The file of a model, made or downloaded if necessary.

    Args:
        model: a name of _SCRIPTS, else as in names.resolve. "random": a GPT-2 Large of random weights; "llama1b": a
            Llama of random weights; "grown-smollm2": 1.2 billion weights with SmolLM2's output, the target of "pair"
            and "pair:NOISE", too.
        quantization: type of a model to make: F32, F16, Q8_0, Q4_0, Q4_1 (of random weights also BF16, Q4_K, Q4_K_M).
        report: called with a line before a model is made, which takes minutes, or downloaded.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the model cannot be made in that type, or a pair with that noise.
    """
    model, _ = _parsed(model)
    if model not in _SCRIPTS:
        return names.resolve(model, announced(report))
    made = "grown-smollm2" if model == "pair" else model
    source = names.resolve("bundled" if made == "random" else "smollm2")
    name = "gpt2-large-random" if made == "random" else made
    return _once(name, quantization, source, lambda path: _make(made, source, path, quantization), report)


def check_type(model: str, quantization: str) -> None:
    """Raise ValueError for a type in which a model cannot be made, or a pair's noise that cannot be."""
    model, _ = _parsed(model)
    if model in _SCRIPTS and quantization not in (types := _script(_SCRIPTS[model]).TYPES):
        raise ValueError(f"{model} cannot be made in the type {quantization!r}: choose from {', '.join(types)}")


def find_draft(model: str, draft: str | Path | None, report: Callable[[str], None] = lambda _: None) -> Path | None:
    """The file of a draft, as in names.resolve_draft; "auto" is the bundled draft for the random model, too,
    SmolLM2 with noise for a pair, or a known draft in the cache."""
    progress = announced(report)
    model, noise = _parsed(model)
    if model == "pair" and draft == "auto":
        source, add_noise = names.resolve("smollm2"), _script("grow").add_noise
        options = {"noise": noise, "quantization": "Q8_0"}
        return _once(
            f"smollm2-noise-{noise:g}", "Q8_0", source, lambda path: add_noise(source, path, **options), report
        )
    found = names.resolve_draft("bundled" if model == "random" else model, draft, progress)
    if found or draft != "auto" or model == "llama1b":
        return found
    path = names.resolve("smollm2" if model == "grown-smollm2" else model, progress)
    return drafts.find_draft(Tokenizer(os.fsencode(path)), report)


def about(model: str) -> str:
    """What a report says about a model by name; "" if nothing."""
    model, noise = _parsed(model)
    return _ABOUT.get(model, "").format(noise=noise)


def _parsed(model: str) -> tuple[str, float]:
    """A model's name, and the noise of a pair's draft. Raises ValueError for one that is no number in 0 to 1."""
    name, _, given = model.partition(":")
    if name != "pair":
        return model, 0.0
    try:
        noise = float(given or NOISE)
    except ValueError:
        noise = -1.0
    if not 0 <= noise <= 1:
        raise ValueError(f"the noise of a pair's draft is a number from 0 to 1, as in pair:{NOISE}, not {given!r}")
    return name, noise


def _once(
    name: str, quantization: str, source: Path, make: Callable[[Path], None], report: Callable[[str], None]
) -> Path:
    """A file that is made if it is not there."""
    folder = cache.folder(f"bench/{name}")  # where `pystaged models` lists and removes it
    path = folder / f"{name}.{quantization}.gguf"
    # The cache may hold a model that an older version made from an older source.
    if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
        report(f"making {path}, once")
        folder.mkdir(parents=True, exist_ok=True)
        make(path)
    return path


def _make(model: str, source: Path, path: Path, quantization: str) -> None:
    script = _script(_SCRIPTS[model])
    if model == "grown-smollm2":
        script.grow_llama(source, path, **GROWN_SMOLLM2, quantization=quantization)
    else:
        architecture, shape = ("gpt2", GPT2_LARGE) if model == "random" else ("llama", LLAMA_1B)
        shape = shape | {"quantization": quantization, "add_vocabulary": partial(script.copy_tokenizer, source)}
        script.write_random(path, architecture, **shape)


def _script(name: str) -> ModuleType:
    """Import a script from the models folder, which is not on Python's path."""
    full_name = f"pystaged.models.{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    spec = spec_from_file_location(full_name, names.bundled_file(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {name}.py")
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module
