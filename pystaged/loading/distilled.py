"""Drafts that `pystaged distill` made, in the user's cache folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pystaged._core import Tokenizer, metadata
from pystaged.files import cache_folder
from pystaged.loading.kept import KeptFiles
from pystaged.loading.metadata import first_with

VOCABULARY, DEPTH = "pystaged.vocabulary", "pystaged.target_depth"  # GGUF keys: of the target
_WIDTH = "dflash.target_hidden_size"
_NAME = "draft of "


class _Drafts(KeptFiles):
    def _model_of(self, path: Path) -> str:
        return metadata(path).get("general.name", "?").removeprefix(_NAME)


DISTILLED = _Drafts("drafts", "", "gguf")


def draft_name(target: str) -> str:
    """The name of a target's draft."""
    return _NAME + target


def work_folder(model: Path) -> Path:
    """The folder of a model's answers and checkpoint."""
    return cache_folder() / "distill" / DISTILLED.path(model).stem


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
    own = DISTILLED.path(model)
    paths = sorted((each.path for each in DISTILLED.all()), key=lambda path: path != own)
    return first_with(paths, wanted, report)
