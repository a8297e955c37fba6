"""Models kept in the user's cache folder, by the names they have on the hub."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import platformdirs
from gguf import LlamaFileType

from pystaged.files import whole_file
from pystaged.loading.quantize import DEFAULT_TYPE

_SOURCE = "source.json"


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache.

    Args:
        name: by which commands find it.
        type: of its weights; "damaged" where the file cannot be read.
        shape: "36 x 1280, 20 heads".
        license: as its repository says, "" where unknown.
    """

    name: str
    path: Path
    bytes: int
    type: str
    shape: str
    license: str


def folder() -> Path:
    """Where models are kept: OWNER/NAME/FILE.gguf; a file that is in Hugging Face's cache is linked."""
    return Path(platformdirs.user_cache_dir("pystaged")) / "models"


def repository_folder(repository: str) -> Path:
    """Where the files of a repository are kept."""
    return folder() / repository


def find(name: str) -> Path | None:
    """The file of a cached model, None where there is none.

    Args:
        name: "owner/name" or "name", either with ":TYPE" or ":FILE.gguf".

    Raises:
        ValueError: the name fits several models.
    """
    repository, _, wanted = name.partition(":")
    paths = [
        path
        for path in _paths()
        if repository in (_repository(path), path.parent.name) and (not wanted or _fits(path.name, wanted))
    ]
    names = {_name(path): path for path in paths}
    chosen = choose(sorted(names), "")
    if paths and chosen is None:
        raise ValueError(f"{name!r} may be any of {', '.join(names)}; name one of them")
    return names[chosen] if chosen else None


def choose(files: Sequence[str], wanted: str) -> str | None:
    """The file of a wanted type or name, the only one or the one of the default type if nothing is wanted.

    None where no file or several fit.
    """
    fitting = [file for file in files if not wanted or _fits(file, wanted)]
    if len(fitting) > 1 and not wanted:
        fitting = [file for file in fitting if _fits(file, DEFAULT_TYPE)]
    return fitting[0] if len(fitting) == 1 else None


def models() -> list[CachedModel]:
    """All models in the cache, by name."""
    return sorted((_describe(path) for path in _paths()), key=lambda model: model.name)


def remove(name: str) -> int:
    """Remove a model, and where it is a link into Hugging Face's cache the file there; returns the bytes freed.

    Raises:
        FileNotFoundError: no such model.
        ValueError: the name fits several.
    """
    path = find(name)
    if path is None:
        raise FileNotFoundError(f"there is no model {name!r} in the cache; `pystaged models` lists them")
    freed = path.stat().st_size
    if path.is_symlink():
        snapshot = path.readlink()
        snapshot.resolve().unlink()
        snapshot.unlink(missing_ok=True)
    path.unlink()
    parent = path.parent
    if not list(parent.glob("*.gguf")):
        (parent / _SOURCE).unlink(missing_ok=True)
        for empty in (parent, parent.parent):
            if not any(empty.iterdir()):
                empty.rmdir()
    return freed


def save_source(path: Path, revision: str, license_name: str) -> None:
    """Keep the commit that a model in the cache is from, and its license."""
    files = _source(path).get("files")
    files = (files if isinstance(files, dict) else {}) | {path.name: revision}
    with whole_file(path.with_name(_SOURCE)) as part:
        part.write_text(json.dumps({"license": license_name, "files": files}))


def is_current(path: Path, revision: str) -> bool:
    """Whether a model is in the cache and from that commit."""
    files = _source(path).get("files")
    return path.is_file() and isinstance(files, dict) and files.get(path.name) == revision


def save_link(repository: str, file: Path) -> Path:
    """Enter a file that lies elsewhere; returns its place in the cache."""
    path = repository_folder(repository) / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        part.symlink_to(file)
    return path


def _paths() -> list[Path]:
    """Files of all cached models; a link whose file is gone is none."""
    return [path for path in sorted(folder().glob("*/*/*.gguf")) if path.is_file()]


def _repository(path: Path) -> str:
    return f"{path.parent.parent.name}/{path.parent.name}"


def _name(path: Path) -> str:
    """As short as names one file only."""
    kind = re.search(r"[.-]([A-Za-z0-9]+(?:_[A-Za-z0-9]+)*)\.gguf$", path.name)
    siblings = [other.name for other in path.parent.glob("*.gguf")]
    if kind and choose(siblings, kind[1]):
        return f"{_repository(path)}:{kind[1].lower()}"
    return f"{_repository(path)}:{path.name}"


def _fits(file: str, wanted: str) -> bool:
    """Whether a file is the wanted one, or of the wanted type as its name says."""
    file, wanted = file.lower(), wanted.lower()
    name = file.rpartition("/")[2]
    return wanted in (file, name) or bool(re.search(rf"[.:_-]{re.escape(wanted)}(\.gguf)?$", name))


def _describe(path: Path) -> CachedModel:
    """What a file says about itself, read by libllama without its weights."""
    metadata = _metadata(path)
    kind, shape = "damaged", ""
    if metadata:
        architecture = metadata["general.architecture"]
        heads = metadata.get(f"{architecture}.attention.head_count", "?")
        layers, width = (metadata.get(f"{architecture}.{key}", "?") for key in ("block_count", "embedding_length"))
        kind, shape = _type_name(metadata.get("general.file_type", "")), f"{layers} x {width}, {heads} heads"
    return CachedModel(_name(path), path, path.stat().st_size, kind, shape, str(_source(path).get("license", "")))


def _source(path: Path) -> dict[str, Any]:
    """What is known about where a model came from."""
    try:
        found = json.loads(path.with_name(_SOURCE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _type_name(file_type: str) -> str:
    try:
        return LlamaFileType(int(file_type)).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "?"


def _metadata(path: Path) -> dict[str, str]:
    """Single values of a GGUF file's metadata, as text; empty where it cannot be read."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode("utf-8", "surrogateescape"), params)
    if not model:
        return {}
    try:
        found = {}
        for index in range(llama_cpp.llama_model_meta_count(model)):
            buffers = [ctypes.create_string_buffer(256) for _ in range(2)]
            llama_cpp.llama_model_meta_key_by_index(model, index, buffers[0], 256)
            llama_cpp.llama_model_meta_val_str_by_index(model, index, buffers[1], 256)
            key, value = (buffer.value.decode("utf-8", "replace") for buffer in buffers)
            found[key] = value
        return found
    finally:
        llama_cpp.llama_model_free(model)
