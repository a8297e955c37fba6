"""Draft models on Hugging Face's hub for families of targets that people run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pystaged.loading import cache


class KnownDraft(NamedTuple):
    """A draft for the targets of an architecture and a pre-tokenizer (`tokenizer.ggml.pre`) that are wider than it."""

    architecture: str
    pre_tokenizer: str
    width: int
    name: str  # on the hub


# Parallel drafts (PARD), each trained for all targets of its family.
KNOWN = (
    KnownDraft("llama", "llama-bpe", 2048, "amd/PARD-Llama-3.2-1B"),
    KnownDraft("qwen2", "qwen2", 896, "amd/PARD-Qwen2.5-0.5B"),
    KnownDraft("qwen2", "deepseek-r1-qwen", 1536, "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B"),
    KnownDraft("qwen3", "qwen2", 1024, "amd/PARD-Qwen3-0.6B"),
)


def known_draft(metadata: Mapping[str, str]) -> str | None:
    """The name on the hub of a draft for a target, given the metadata of its file; None where none is known."""
    architecture = metadata.get("general.architecture", "")
    family = architecture, metadata.get("tokenizer.ggml.pre")
    width = metadata.get(f"{architecture}.embedding_length", "")
    for draft in KNOWN:
        if family == (draft.architecture, draft.pre_tokenizer) and width.isdecimal() and int(width) > draft.width:
            return draft.name
    return None


def cached_draft(metadata: Mapping[str, str]) -> Path | None:
    """The file of that draft, if one was downloaded."""
    name = known_draft(metadata)
    with suppress(ValueError):  # of several types
        return cache.find(name) if name else None
    return None
