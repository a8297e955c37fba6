"""Find and load the draft head of a target."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pystaged._core import DraftHead, Model, Tokenizer, metadata
from pystaged.loading import names
from pystaged.loading.metadata import HEAD, depth_and_width, those_with


def load_head(path: Path, target: Model, tokenizer: Tokenizer) -> DraftHead:
    """Load a draft head; from then on its target also returns the hidden states that it reads.

    A target may be wider than the head, as a grown model is; the head then reads the first numbers of its states.

    Raises:
        ModelError: the file is damaged.
        ValueError: it was made for another target, or the target is not on the CPU.
    """
    found = metadata(path)
    if target.devices:
        raise ValueError(f"{path} is a draft head, which needs this package's kernels; choose the device cpu")
    if found.get(f"{HEAD}.vocabulary") != tokenizer.fingerprint:
        raise ValueError(f"{path} is a draft head for another vocabulary; choose one that was trained for this model")
    if found.get(f"{HEAD}.target_layers") != str(target.num_layers):
        raise ValueError(f"{path} is a draft head for models of another depth than {target.num_layers} layers")
    head = DraftHead(path, os.environ.get("PYSTAGED_KERNEL", ""))
    if head.width > target.width:
        raise ValueError(f"{path} is a draft head for models that are {head.width} wide, not {target.width}")
    target.tap(head.taps)
    head.check(target)
    return head


def find_head(tokenizer: Tokenizer, report: Callable[[str], None] = lambda _: None) -> Path | None:
    """The packaged head for a target's vocabulary, width and depth; None where there is none.

    Args:
        tokenizer: the target's, with its file's metadata.
        report: called with a line about a head that cannot be read.
    """
    depth, width = depth_and_width(tokenizer.metadata)
    wanted = {
        f"{HEAD}.vocabulary": tokenizer.fingerprint,
        f"{HEAD}.embedding_length": str(width),
        f"{HEAD}.target_layers": str(depth),
    }
    heads = (path for path in names.heads() if path.exists())
    return next((path for path, _ in those_with(heads, wanted, report)), None)
