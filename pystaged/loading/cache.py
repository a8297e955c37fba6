"""Models in the user's cache folder, under the names they have on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pystaged.aliases import hub_id
from pystaged.files import cache_folder, part_file, read_small
from pystaged.loading.file_types import file_type_name
from pystaged.loading.kept import PACKED, RECYCLED
from pystaged.loading.metadata import read_metadata
from pystaged.loading.quantize import DEFAULT_TYPE

_SOURCE = "source.json"
_MOST_BYTES = 1 << 20
# What llama.cpp keeps beside a model: its MTP layer, and what reads images for it.
_BESIDE = re.compile(r"(^|/)(mtp-|[^/]*mmproj)[^/]*$", re.IGNORECASE)


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache.

    Args:
        name: the name that commands accept.
        type: of its weights; "damaged" where the file cannot be read.
        shape: "36 x 1280, 20 heads".
        license: as its repository or the file says; "" where unknown.
    """

    name: str
    path: Path
    bytes: int
    type: str
    shape: str
    license: str


def folder() -> Path:
    """Where models are kept, as OWNER/NAME/FILE.gguf; files in Hugging Face's cache are linked."""
    return cache_folder() / "models"


def repository_folder(repository: str) -> Path:
    """Where the files of a repository are kept."""
    return folder() / repository


def find(name: str) -> Path | None:
    """The file of a cached model, None where there is none.

    Args:
        name: "owner/name" or "name", either with ":TYPE" or ":FILE.gguf"; or the hub's address of it.

    Raises:
        ValueError: the name fits several models; as hub_id.
    """
    repository, _, wanted = hub_id(name).partition(":")
    found = [path for path in paths() if repository in (_repository(path), _repository(path).partition("/")[2])]
    files = _fitting([_file(path) for path in found], wanted)
    found = [path for path in found if _file(path) in files]
    names = {_name(path): path for path in found}
    chosen = choose(sorted(names), "")
    if found and chosen is None:
        raise ValueError(f"{name!r} may be any of {', '.join(names)}; name one of them")
    return names[chosen] if chosen else None


def choose(files: Sequence[str], wanted: str) -> str | None:
    """Choose the one file of a wanted type or name; with none wanted, the only file or that of the default type.

    Returns None where no file or several fit.
    """
    found = _fitting(files, wanted)
    if len(found) > 1 and not wanted:
        found = _fitting(found, DEFAULT_TYPE)
    return found[0] if len(found) == 1 else None


def _fitting(files: Sequence[str], wanted: str) -> list[str]:
    """The files of a wanted name, or else those whose name or folder says that type, all where none is wanted. Where no
    file is named, what only belongs to a model is left out, unless there is nothing else."""
    wanted = wanted.lower()
    if not wanted.endswith(".gguf"):
        files = [file for file in files if not _BESIDE.search(file)] or files
    if not wanted:
        return list(files)
    kind = re.compile(rf"(^|[.:_/-]){re.escape(wanted)}(\.gguf$|/|$)")
    return [file for file in files if file.lower() == wanted] or [file for file in files if kind.search(file.lower())]


def paths() -> list[Path]:
    """Files of all cached models, without links whose target is gone."""
    return [path for path in sorted(folder().glob("*/*/**/*.gguf")) if path.is_file()]


def names() -> list[str]:
    """Names of all models in the cache, found without opening a file."""
    return sorted(_name(path) for path in paths())


def models() -> list[CachedModel]:
    """All models in the cache, by name."""
    return sorted(
        (replace(describe(_name(path), path), license=_source(path).license) for path in paths()),
        key=lambda model: model.name,
    )


def remove(name: str) -> int:
    """Remove a model, its packed weights, recycled candidates and n-gram table; returns the bytes freed.

    If the model is a link, its target is removed too, provided it was downloaded into Hugging Face's cache for this
    model and no other snapshot there has it.

    Raises:
        FileNotFoundError: no such model.
        ValueError: as in find.
    """
    path = find(name)
    if path is None:
        raise FileNotFoundError(f"there is no model {name!r} in the cache; `pystaged models` lists them")
    source = _source(path)
    if path.is_symlink():
        freed = _forget_download(path.parent / path.readlink()) if _file(path) in source.downloaded else 0
    else:
        freed = path.stat().st_size
    path.unlink()
    freed += sum(kept.remove(kept.path(path)) for kept in (PACKED, RECYCLED))
    path.with_suffix(".ngram.npz").unlink(missing_ok=True)
    source.files.pop(_file(path), None)
    source.downloaded.discard(_file(path))
    _keep(path, source)
    root = repository_folder(_repository(path))
    for parent in path.parents:
        if parent == root and not any(root.rglob("*.gguf")):
            (root / _SOURCE).unlink()
        if parent == folder() or any(parent.iterdir()):
            break
        parent.rmdir()
    return freed


def save_source(path: Path, revision: str, license_name: str, *, downloaded: bool = False) -> None:
    """Record a cached model's commit and license, and whether it was downloaded for this cache."""
    source, file = _source(path), _file(path)
    if downloaded:
        source.downloaded.add(file)
    elif source.files.get(file) != revision:
        source.downloaded.discard(file)
    _keep(path, _Source(license_name, source.files | {file: revision}, source.downloaded))


def is_current(path: Path, revision: str) -> bool:
    """Whether a model is in the cache and comes from that commit."""
    return path.is_file() and _source(path).files.get(_file(path)) == revision


def save_link(repository: str, name: str, file: Path) -> Path:
    """Link a repository's file that lies elsewhere; returns the link's path in the cache."""
    path = repository_folder(repository) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with part_file(path) as part:
        part.unlink()
        try:
            part.symlink_to(file)
        except OSError:  # Windows lets only some users make links to names
            os.link(file, part)
        part.replace(path)
    return path


def _forget_download(snapshot: Path) -> int:
    """Remove a snapshot's file from Hugging Face's cache, with its content unless shared; returns the bytes freed."""
    from huggingface_hub import constants, errors, scan_cache_dir  # noqa: PLC0415

    place = Path(os.path.realpath(snapshot.parent)) / snapshot.name
    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except errors.CacheNotFound:
        return 0
    files = [
        file
        for repository in found.repos
        for revision in repository.revisions
        for file in revision.files
        if file.file_path == place
    ]
    strategy = found.delete_files(*files)
    strategy.execute()
    return strategy.expected_freed_size


def _repository(path: Path) -> str:
    return "/".join(path.relative_to(folder()).parts[:2])


def _file(path: Path) -> str:
    """A model's path in its repository."""
    return path.relative_to(repository_folder(_repository(path))).as_posix()


def _name(path: Path) -> str:
    """The shortest name that only this file has."""
    kind = re.search(r"[.-]([A-Za-z0-9]+(?:_[A-Za-z0-9]+)*)\.gguf$", path.name)
    root = repository_folder(_repository(path))
    siblings = [_file(other) for other in root.rglob("*.gguf")]
    if kind and choose(siblings, kind[1]) == _file(path):
        return f"{_repository(path)}:{kind[1].lower()}"
    return f"{_repository(path)}:{_file(path)}"


def describe(name: str, path: Path) -> CachedModel:
    """Describe a model from its file's metadata, without reading its weights."""
    metadata = read_metadata(path)
    kind, shape = "damaged", ""
    if metadata:
        architecture = metadata.get("general.architecture", "?")
        heads = metadata.get(f"{architecture}.attention.head_count", "?")
        layers, width = (metadata.get(f"{architecture}.{key}", "?") for key in ("block_count", "embedding_length"))
        kind, shape = (
            file_type_name(metadata.get("general.file_type", "")),
            _shown(f"{layers} x {width}, {heads} heads"),
        )
    return CachedModel(name, path, path.stat().st_size, kind, shape, _shown(metadata.get("general.license", "")))


@dataclass(frozen=True)
class _Source:
    """Where a repository's models came from: commits by file, and the files that were downloaded for this cache."""

    license: str
    files: dict[str, str]
    downloaded: set[str]


def _source(path: Path) -> _Source:
    try:
        found = json.loads(read_small(repository_folder(_repository(path)) / _SOURCE, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        found = None
    found = found if isinstance(found, dict) else {}
    files, downloaded = found.get("files"), found.get("downloaded")
    return _Source(
        license=_shown(str(found.get("license", ""))),
        files={file: str(revision) for file, revision in files.items()} if isinstance(files, dict) else {},
        downloaded={str(file) for file in downloaded} if isinstance(downloaded, list) else set(),
    )


def _keep(path: Path, source: _Source) -> None:
    target = repository_folder(_repository(path)) / _SOURCE
    with part_file(target) as part:
        found = {"license": source.license, "files": source.files, "downloaded": sorted(source.downloaded)}
        part.write_text(json.dumps(found))
        part.replace(target)


def _shown(text: str) -> str:
    """A file's text, cut at 80 characters, with unprintable ones replaced: terminals show it."""
    return "".join(each if each.isprintable() else "?" for each in text[:80])
