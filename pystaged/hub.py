"""From the name of a model to its file."""

from __future__ import annotations

from pathlib import Path

_HOUSE_TARGET = "target.Q8_0.gguf"
_HOUSE_DRAFT = "draft.Q8_0.gguf"
HOUSE_TABLE = "draft.ngram.npz"
HOUSE_PROMPTS = "humaneval_prompts.jsonl"


def resolve(model: str | Path) -> Path:
    """The GGUF file of a model: "house" for the one in the package, else a path.

    Raises:
        FileNotFoundError: no such file.
    """
    if model == "house":
        return house(_HOUSE_TARGET)
    path = Path(model).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no model file {path}; give the path of a GGUF file, or 'house'")
    return path


def resolve_draft(model: str | Path, draft: str | Path | None) -> Path | None:
    """The GGUF file of a draft: "house" for the one in the package, "auto" for that one if the model is "house" too.

    Raises:
        FileNotFoundError: no such file.
    """
    if draft == "house" or (draft == "auto" and model == "house"):
        return house(_HOUSE_DRAFT)
    return None if draft is None or draft == "auto" else resolve(draft)


def house(name: str) -> Path:
    """A file of the models in the package; in an editable install they are where the repository has them."""
    package = Path(__file__).parent
    installed = package / "models" / name
    return installed if installed.exists() else package.parent / "models" / name
