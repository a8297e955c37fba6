"""Draft models of a target: those that are known on Hugging Face's hub, and what differs between the vocabularies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pystaged._core import Tokenizer
from pystaged.loading import cache
from pystaged.loading.metadata import mask_token

_LEAST_SHARED = 0.9  # share of the target's token ids that must mean the same in the draft


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


def cached_draft(tokenizer: Tokenizer, report: Callable[[str], None] = lambda _: None) -> Path | None:
    """The file of that draft in the cache, which is not opened; None where there is none.

    Args:
        tokenizer: the target's, with its file's metadata.
        report: called with a line about a draft that cannot be used.
    """
    name = known_draft(tokenizer.metadata)
    try:
        return cache.find(name) if name else None
    except ValueError as error:  # there are several
        report(f"passed over: the draft {name}: {error}")
        return None


def find_draft(tokenizer: Tokenizer, report: Callable[[str], None] = lambda _: None) -> Path | None:
    """The same, opened to check that it fits the target; None where it does not."""
    found = cached_draft(tokenizer, report)
    try:
        if found:
            draft = Tokenizer(os.fsencode(found))
            substitutes(tokenizer, draft)
            mask_token(draft.metadata, draft.num_tokens)
    except (OSError, ValueError) as error:
        report(f"passed over: {found}: {error}")
        return None
    return found


def substitutes(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Map target tokens that the draft lacks or numbers differently to the draft token read instead, a line end.

    Models of a family differ in a few tokens, such as chat markers, and in padding.

    Raises:
        ValueError: more than a tenth of the ids that both have differ; the message names the first.
    """
    shared = target.shared_with(draft)
    both = min(target.num_tokens, draft.num_tokens)
    if shared[:both].mean() < _LEAST_SHARED:
        token = int(np.argmin(shared[:both]))
        meanings = [
            "the end of text" if tokenizer.is_end(token) else repr(tokenizer.token_bytes(token, True))
            for tokenizer in (target, draft)
        ]
        raise ValueError(
            f"the draft's vocabulary is not the target's: token {token} is {meanings[0]} in the target and "
            f"{meanings[1]} in the draft; choose a draft trained with the target's tokenizer"
        )
    try:
        neutral = int(draft.encode("\n", add_special=False)[-1])
    except (ValueError, IndexError):  # the vocabulary has no line end
        neutral = int(np.argmax(shared))
    return dict.fromkeys(np.nonzero(~shared)[0].tolist(), neutral)
