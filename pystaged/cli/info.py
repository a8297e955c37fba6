"""`pystaged info`: properties of the build, the machine and a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import typer

import pystaged
from pystaged import _core, _llama
from pystaged._core import Model, Tokenizer
from pystaged.cli.console import model_name, report, size_words
from pystaged.cli.options import MODEL_ARGUMENT, KeysAndValues, KvMemory
from pystaged.decoding.policy import FixedPolicy
from pystaged.loading import names
from pystaged.loading.distilled import find_distilled
from pystaged.loading.drafts import find_draft, known_drafts, own_layer
from pystaged.loading.features import describe, known_form
from pystaged.loading.metadata import reads_target


def info(model: str | None = MODEL_ARGUMENT, kv: KeysAndValues = "f16", kv_memory: KvMemory = None) -> None:
    """Show this build, this machine's devices, and a model's properties.

    Example: pystaged info path/to/model.gguf
    """
    named = model_name(model)
    path = names.resolve(named)
    with pystaged.load(
        path, draft=None, kv=kv, kv_memory=kv_memory, recycle=False, policy=FixedPolicy(1, 0, 0), report=report
    ) as engine:
        loaded = engine.model
        is_ours = not loaded.devices  # else it runs by llama.cpp
        draft = (
            names.resolve_draft(named, "auto")
            or find_distilled(path, engine.tokenizer, report)
            or own_layer(path, engine.tokenizer)
            or find_draft(engine.tokenizer, report)
        )
        count, contexts = engine.kv_memory // engine.context_bytes, f"{engine.n_ctx:,} tokens"
        fitting = f"{count:,} text{'' if count == 1 else 's'} of {contexts}" if count else f"less than {contexts}"
        rows = {
            "pystaged": pystaged.__version__,
            "llama.cpp": f"of llama-cpp-python {_llama.VERSION}{', inside this package' if _llama.IS_INSIDE else ''}",
            "kernel": f"{loaded.kernel} (of {', '.join(_core.kernels())})" if is_ours else "llama.cpp's on ggml-cpu",
            "threads": _threads(_core.choose_cores(), is_ours),
            "model": str(path),
            "name": loaded.name,
            "draft": _draft(draft, path, loaded, engine.tokenizer),
            "shape": f"{loaded.architecture}, {loaded.num_layers} layers, {loaded.width} wide, {loaded.num_heads} heads"
            f" ({loaded.num_kv_heads} of keys) of {loaded.head_dim}{_experts(engine.tokenizer.metadata)}",
            "context": f"{engine.n_ctx} tokens by default, trained for {loaded.max_context}",
            "vocabulary": f"{loaded.vocab_size} tokens",
            "weights": f"{_shares(loaded.weight_types)}, {loaded.file_bytes / 1e6:.1f} MB file, "
            f"{loaded.weight_bytes / 1e6:.1f} MB read per pass",
            "memory": f"{loaded.matrix_bytes / 1e6:.1f} MB of weights, "
            f"{loaded.buffer_bytes / 1e6:.1f} MB more while loading",
            "keys and values": f"{_of_text(loaded)}; {engine.kv_memory / 1e9:.2g} GB for them, enough for {fitting}",
        }
        if draft:
            rows["draft's memory"] = _memory(draft, loaded, engine.tokenizer)
    exact = "byte for byte exact" if is_ours else "not for this model"
    said = [*rows.items(), ("device", f"cpu: this package's kernels, {exact}")]
    for device in pystaged.devices():
        free, total = size_words(device.free_bytes), size_words(device.total_bytes)
        said.append(("device", f"{device.name}: {device.description}, {free} of {total} free"))
    for name, value in said:
        typer.echo(f"{name:<18}{value}")


def _threads(cores: _core.Cores, is_ours: bool) -> str:
    """How many threads compute, and the cores that they were chosen for, in words."""
    most = cores.many if is_ours else cores.few
    threads = f"{most}" if most == cores.few else f"{most}, in passes of fewer than 16 rows {cores.few}"
    apart = f", {cores.apart} of them left out as they lack the others' cache" if cores.apart else ""
    quota = f", a limit of {cores.quota} CPU{'s' if cores.quota > 1 else ''}" if cores.quota else ""
    return f"{threads} ({cores.found} core{'s' if cores.found > 1 else ''}{apart}{quota})"


def _experts(metadata: Mapping[str, str]) -> str:
    """How many experts a token uses, in words; "" for a dense model."""
    count, used = (metadata.get(f"{metadata['general.architecture']}.expert_{key}") for key in ("count", "used_count"))
    return f", {used} of {count} experts" if count not in (None, "0") else ""


def _draft(draft: Path | None, target_path: Path, target: Model, tokenizer: Tokenizer) -> str:
    """A draft's file, and how often it was right when it was tried; or how to get one that is known for the target."""
    if draft == target_path:
        return "its own MTP layer"
    if draft:
        form = known_form(draft, target, target_path)
        return f"{draft}, {describe(form)}" if form else str(draft)
    if not (known := known_drafts(tokenizer.metadata)):
        return "none of its own: n-grams draft, until one is named with --draft"
    first, *others = known
    more = f"; so {'is' if len(others) == 1 else 'are'} {', '.join(others)}" if others else ""
    return f"none here, so n-grams draft; {first} is made for it: pystaged pull {first} --type q8_0{more}"


def _memory(draft: Path, target: Model, tokenizer: Tokenizer) -> str:
    """Memory that a draft takes beside its target, in words."""
    lender = target if reads_target(draft, tokenizer.metadata) else None
    try:
        model = Model(os.fsencode(draft), target.kernel, target.num_threads, kv=target.kv, target=lender)
    except (OSError, ValueError) as error:
        return f"unknown: {error}"
    return f"{model.matrix_bytes / 1e6:.1f} MB of weights, {_of_text(model, ' of keys and values')}"


def _shares(types: dict[str, int]) -> str:
    """A model's weight types, with each one's share of the bytes if there are several."""
    if len(types) == 1:
        return next(iter(types))
    return " ".join(f"{kind} {size / sum(types.values()):.1%}" for kind, size in types.items())


def _of_text(model: Model, of: str = "") -> str:
    """Memory of a text in words: keys and values, also of tokens that are outside all attention windows, and the states
    of recurrent layers."""
    words = f"{model.cell_bytes / 1e3:.1f} MB{of} per 1,000 tokens"
    if model.windowed_cell_bytes:
        words += f", {(model.cell_bytes - model.windowed_cell_bytes) / 1e3:.1f} MB outside attention windows"
    if model.state_bytes:
        kept = f"{model.kept_state_bytes / 1e6:.1f} MB for each earlier state kept"
        words += f", {model.state_bytes / 1e6:.1f} MB of states for each text, {kept}"
    return words
