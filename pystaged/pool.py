"""Makes the pool of contexts that an engine's texts share; its size comes from the free memory, or from llama.cpp's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pystaged._core import file_identity
from pystaged.backends.devices import devices, open_session, reserve
from pystaged.decoding.context import FREE_DIVISOR, SPARE_CELLS, ContextPool
from pystaged.decoding.origin import ARITHMETIC
from pystaged.decoding.policy import TreePolicy
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import ContextFactory
from pystaged.loading.prompt_cache import KeptPrompts

_USUAL_CONTEXT = 8192  # positions of a context, by default
_TEXTS = 4  # full contexts that llama.cpp has room for, by default
_MOST_CELLS = 2**30  # that can be reserved
_LONG_CONTEXTS = (32_768, 16_384)  # few, because receipts name the length


def context_pool(
    factory: ContextFactory, bundle: Bundle, policy: TreePolicy | None, report: Callable[[str], None]
) -> ContextPool:
    """The contexts of a bundle, by its options.

    Args:
        policy: as in Engine.
        report: called with a line about a context that the memory cannot hold, or a prompt on disk that cannot be used
            or written.

    Raises:
        As Engine.
    """
    options, n_ctx = bundle.options, bundle.options["n_ctx"]
    if options["long_context"] and n_ctx == 0:
        n_ctx = _long_context(bundle)
    free = bundle.free_memory()
    contexts = ContextPool(
        lambda source, length: factory.context(n_ctx, policy, source, length),
        _reserve(bundle, n_ctx, report) or options["kv_memory"],
        free=free,
    )
    if contexts.full_bytes > free and not any(model.devices for model in bundle.models):
        report(
            f"a full context of {contexts.n_ctx:,} tokens takes {contexts.full_bytes / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; a smaller n_ctx (--n-ctx) keeps a long text from filling the memory"
        )
    if options["prompt_cache"] is not None:
        contexts.prompts = _kept_prompts(bundle, options["prompt_cache"], contexts.n_ctx, report)
    return contexts


def _reserve(bundle: Bundle, n_ctx: int, report: Callable[[str], None]) -> int:
    """Let llama.cpp have room for the texts of an engine; returns the bytes that they may take, 0 without llama.cpp."""
    on_devices = [model for model in bundle.models if model.devices]
    if not on_devices:
        return 0
    token_bytes = sum(model.cell_bytes for model in bundle.models)
    context_bytes = (SPARE_CELLS + (n_ctx or min(bundle.target.max_context, _USUAL_CONTEXT))) * token_bytes
    gpus = {device.name: device.free_bytes for device in devices() if device.is_gpu}
    free = sum(gpus.get(name, 0) for name in on_devices[0].devices) or bundle.free_memory()
    memory = bundle.options["kv_memory"] or min(_TEXTS * context_bytes, free // FREE_DIVISOR)
    memory = max(memory, context_bytes)
    if memory > free and on_devices[0].devices == ["CPU"]:
        report(
            f"llama.cpp takes {memory / 1e9:.1f} GB at once for keys and values, and {free / 1e9:.1f} GB are free; "
            "a smaller n_ctx (--n-ctx) or kv_memory (--kv-memory) takes less"
        )
    for model in on_devices:
        reserve(model, min(memory // token_bytes, _MOST_CELLS) if token_bytes else 0)
    return memory + sum(model.state_bytes for model in bundle.models) * _TEXTS


def _long_context(bundle: Bundle) -> int:
    """Positions of the contexts of a bundle with the option long_context; 0 for the usual ones."""
    if any(model.devices for model in bundle.models):
        return 0
    sessions = [open_session(model, 1) for model in bundle.models]
    token_bytes = sum(session.cell_bytes - session.windowed_cell_bytes for session in sessions)
    memory = bundle.options["kv_memory"] or bundle.free_memory() // FREE_DIVISOR
    fitting = (length for length in _LONG_CONTEXTS if length * token_bytes <= memory)
    return min(next(fitting, 0), bundle.target.max_context)


def _kept_prompts(bundle: Bundle, folder: str | Path, n_ctx: int, report: Callable[[str], None]) -> KeptPrompts:
    """The texts of a bundle's models that are kept in a folder; arguments as in KeptPrompts.

    Raises:
        OSError, ValueError: as KeptPrompts; ValueError: a model is not on the CPU.
    """
    if any(model.devices for model in bundle.models):
        raise ValueError("prompts are kept on the cpu only; leave out prompt_cache (--prompt-cache) or the device")
    files = [bundle.path, *([bundle.draft_path] if bundle.draft_path else [])]
    metadata = bundle.tokenizer.metadata
    # Files with two sets of rotary factors use one of them up to this length.
    original = metadata.get(f"{metadata.get('general.architecture')}.rope.scaling.original_context_length", n_ctx)
    parts = [*(file_identity(os.fsencode(path)) for path in files), len(bundle.models), bundle.target.kv]
    parts += [ARITHMETIC, n_ctx > int(original), sys.byteorder]
    return KeptPrompts(folder, repr(parts), bundle.options["prompt_cache_size"], report)
