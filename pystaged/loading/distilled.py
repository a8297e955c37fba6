"""Drafts that `pystaged distill` made, in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from pystaged._core import Tokenizer, metadata
from pystaged.files import cache_folder

VOCABULARY, DEPTH = "pystaged.vocabulary", "pystaged.target_depth"  # GGUF keys: of the target
_WIDTH = "dflash.target_hidden_size"


def folder() -> Path:
    """The folder of these drafts."""
    return cache_folder() / "drafts"


def distilled_path(model: Path) -> Path:
    """Where the draft of a model's file is written."""
    return folder() / f"{_name(model)}.gguf"


def work_folder(model: Path) -> Path:
    """Where answers and checkpoints for it are kept."""
    return cache_folder() / "distill" / _name(model)


def find_distilled(model: Path, tokenizer: Tokenizer, report: Callable[[str], None] = lambda _: None) -> Path | None:
    """The draft that was distilled for a model's file, else one for a model of the same vocabulary, width and depth,
    such as another quantization; None where there is none.

    Args:
        tokenizer: the model's, with its file's metadata.
        report: called with a line about a draft that cannot be read.
    """
    found = tokenizer.metadata
    family = found.get("general.architecture", "")
    wanted = {
        VOCABULARY: tokenizer.fingerprint,
        _WIDTH: found.get(f"{family}.embedding_length"),
        DEPTH: found.get(f"{family}.block_count"),
    }
    own = distilled_path(model)
    others = sorted(folder().glob("*.gguf"), key=lambda path: (path != own, path.name))
    for path in others:
        try:
            about = metadata(path)
            if all(about.get(key) == value for key, value in wanted.items()):
                return path
        except OSError as error:
            report(f"passed over: {error}")
    return None


def _name(model: Path) -> str:
    key = hashlib.sha256(os.fsencode(model.absolute())).hexdigest()[:16]
    return f"{model.stem[:40]}.{key}"
