"""Drafts that `pystaged distill` made, in the user's cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from pystaged._core import Tokenizer, metadata
from pystaged.loading.families import DFLASH
from pystaged.loading.kept import KeptFiles
from pystaged.loading.metadata import depth_and_width
from pystaged.platform.files import cache_folder

# GGUF keys: the target's vocabulary and depth, and the identity of its file.
VOCABULARY, DEPTH, TARGET = "pystaged.vocabulary", "pystaged.target_depth", "pystaged.target"
_WIDTH = f"{DFLASH}.target_hidden_size"
_PART = 1 << 20  # bytes


DISTILLED = KeptFiles("drafts", "gguf")


def work_folder(model: Path) -> Path:
    """The folder of a model's answers and checkpoint."""
    return cache_folder() / "distill" / DISTILLED.path(model).stem


def identity(path: Path) -> str:
    """Identifies a file by its size and parts of its content; a model's first part may be its vocabulary alone."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for place in (0, size // 2, max(0, size - _PART)):
            file.seek(place)
            digest.update(file.read(_PART))
    return f"{size}-{digest.hexdigest()[:16]}"


def find_distilled(model: Path, tokenizer: Tokenizer, report: Callable[[str], None] = lambda _: None) -> Path | None:
    """The draft that was distilled for a model's file, else one for a model of the same vocabulary, width and depth,
    such as another quantization or a fine-tune; None where there is none. tokenizer: the model's, with its file's
    metadata; report: called with a line about a draft that cannot be read, or that was distilled for another file."""
    depth, width = depth_and_width(tokenizer.metadata)
    wanted = {VOCABULARY: tokenizer.fingerprint, _WIDTH: str(width), DEPTH: str(depth)}
    own = DISTILLED.path(model)
    fitting: dict[Path, dict[str, str]] = {}
    for path in sorted(DISTILLED.all(), key=lambda path: path != own):
        try:
            if (found := metadata(path)).items() >= wanted.items():
                fitting[path] = found
        except OSError as error:
            report(f"passed over: {error}")
    if not fitting:
        return None
    made_for = identity(model)
    draft = next((path for path, found in fitting.items() if found.get(TARGET) == made_for), next(iter(fitting)))
    if fitting[draft].get(TARGET, made_for) != made_for:
        report(
            f"the draft {draft.name} was distilled for another file than {model.name}; "
            f"`pystaged info` shows how often it is right here, `pystaged distill` makes a new one"
        )
    return draft
