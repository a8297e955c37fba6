"""Models by their names on the hub: those in Hugging Face's cache, and those that were made here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path

from pystaged.loading.kept import PACKED, RECYCLED
from pystaged.loading.metadata import file_type_name, read_metadata
from pystaged.loading.quantize import DEFAULT_TYPE
from pystaged.options.aliases import hub_id
from pystaged.platform.files import cache_folder
from pystaged.platform.seen import PART

# What llama.cpp keeps beside a model: its MTP layer, and what reads images for it.
BESIDE = re.compile(r"(^|/)(mtp-|[^/]*mmproj)[^/]*$", re.IGNORECASE)


def folder(repository: str = "") -> Path:
    """Where models are kept that were made here, as OWNER/NAME/FILE.gguf; or those of one repository."""
    return cache_folder() / "models" / repository


def _shared() -> Path:
    from huggingface_hub import constants  # noqa: PLC0415

    return Path(constants.HF_HUB_CACHE)


def _in_hubs_cache(path: Path) -> tuple[str, str] | None:
    """Repository and name of a file of Hugging Face's cache; None for others."""
    if not path.is_relative_to(_shared()):
        return None
    root, _, _, *file = path.relative_to(_shared()).parts
    return root.removeprefix("models--").replace("--", "/"), "/".join(file)


def _all(repository: str = "") -> dict[tuple[str, str], Path]:
    """The files of models by repository and name there, of several commits that of the newest; of all repositories, or
    at least of those of that name."""
    snapshots = []
    for snapshot in _shared().glob(f"models--*{escape(repository.replace('/', '--'))}/snapshots/*"):
        with suppress(FileNotFoundError):  # another process removed it
            snapshots.append((snapshot.stat().st_mtime_ns, snapshot))
    found = {}
    for _, snapshot in sorted(snapshots):
        for path in snapshot.rglob("*.gguf"):
            if path.is_file() and not PART.search(path.name):
                found[_in_hubs_cache(path) or ("", "")] = path
    for path in list(folder().glob("*/*/**/*.gguf")):
        if path.is_symlink() and path.readlink().is_relative_to(_shared()):  # which older versions made
            with suppress(OSError):
                path.unlink()
                _tidy_up(path)
        elif path.is_file():
            owner, name, *file = path.relative_to(folder()).parts
            found[f"{owner}/{name}", "/".join(file)] = path
    return dict(sorted(found.items()))


def own_place(model: Path) -> Path:
    """A model's path; for one that Hugging Face or Ollama keeps that in our folder beside which is kept what is made of
    it."""
    repository, file = _in_hubs_cache(model) or ("ollama/blobs" if model.name.startswith("sha256-") else "", model.name)
    return folder(repository) / file if repository else model


def find(name: str) -> Path | None:
    """The file of a cached model, None where there is none. Raises as hub_id, and ValueError for several.

    Args:
        name: "owner/name" or "name", either with ":TYPE" or ":FILE.gguf"; or the hub's address of it.
    """
    repository, _, wanted = hub_id(name).partition(":")
    found = _all(repository)
    found = {key: path for key, path in found.items() if repository in (key[0], key[0].partition("/")[2])}
    fitting = _fitting([file for _, file in found], wanted)
    named = _named({key: path for key, path in found.items() if key[1] in fitting}, [*found])
    chosen = choose(sorted(named), "")
    if named and chosen is None:
        raise ValueError(f"{name!r} may be any of {', '.join(named)}; name one of them")
    return named[chosen] if chosen else None


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
        files = [file for file in files if not BESIDE.search(file)] or files
    if not wanted:
        return list(files)
    kind = re.compile(rf"(^|[.:_/-]){re.escape(wanted)}((-00001-of-00001)?\.gguf$|/|$)")
    return [file for file in files if file.lower() == wanted] or [file for file in files if kind.search(file.lower())]


def _named(models: dict[tuple[str, str], Path], among: Sequence[tuple[str, str]]) -> dict[str, Path]:
    """Models by the shortest name that only this one has."""
    found = {}
    for (repository, file), path in models.items():
        kind = re.search(r"[.-]([A-Za-z0-9]+(?:_[A-Za-z0-9]+)*)\.gguf$", path.name)
        siblings = [each for owner, each in among if owner == repository]
        is_short = kind and choose(siblings, kind[1]) == file
        found[f"{repository}:{kind[1].lower() if kind and is_short else file}"] = path
    return dict(sorted(found.items()))


def files() -> dict[str, Path]:
    """The files of all models in the cache by name, found without opening one."""
    found = _all()
    return _named(found, [*found])


def about(path: Path) -> tuple[str, str, str]:
    """What a model's file says of itself, read without its weights: type, "damaged" if it cannot be read; shape, such
    as "36 x 1280, 20 heads"; license, "" for none."""
    metadata = read_metadata(path)
    architecture = metadata.get("general.architecture", "?")
    layers, width, heads = (
        metadata.get(f"{architecture}.{key}", "?")
        for key in ("block_count", "embedding_length", "attention.head_count")
    )
    if not metadata:
        return "damaged", "", ""
    shape = shown(f"{layers} x {width}, {heads} heads")
    return file_type_name(metadata.get("general.file_type", "")), shape, shown(metadata.get("general.license", ""))


def shown(text: str) -> str:
    """A file's text, cut at 80 characters, with unprintable ones replaced: terminals show it."""
    return "".join(each if each.isprintable() else "?" for each in text[:80])


def remove(name: str) -> int:
    """Remove a model, its packed weights, recycled candidates and n-gram table; returns the bytes freed. The target of
    a link that leads out of the cache stays. Raises FileNotFoundError where there is no such model, and as find."""
    path = find(name)
    if path is None:
        raise FileNotFoundError(f"there is no model {name!r} in the cache; `pystaged models` lists them")
    own = own_place(path)
    if shared := _in_hubs_cache(path):
        freed = _forget(*shared)
    else:
        freed = 0 if path.is_symlink() else path.stat().st_size
        path.unlink()
    own.with_suffix(".ngram.npz").unlink(missing_ok=True)
    return freed + sum(kept.remove(kept.path(path)) for kept in (PACKED, RECYCLED)) + _tidy_up(own)


def _tidy_up(path: Path) -> int:
    """Remove what is kept for a file that is gone, and folders without models; returns the bytes freed."""
    for parent in path.relative_to(folder()).parents[:-1]:
        if not any((folder() / parent).rglob("*.gguf")):
            with suppress(OSError):
                (folder() / parent / "source.json").unlink(missing_ok=True)  # of older versions
                (folder() / parent).rmdir()
    return sum(kept.remove(kept.path(path)) for kept in (PACKED, RECYCLED))


def _forget(repository: str, name: str) -> int:
    """Remove a file from all commits of a repository in Hugging Face's cache, or the repository where there is nothing
    else in it; returns the bytes freed."""
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415

    scan = scan_cache_dir(_shared())
    wanted = ("model", repository)
    revisions = [
        revision for each in scan.repos if (each.repo_type, each.repo_id) == wanted for revision in each.revisions
    ]
    places = {file.file_path.relative_to(each.snapshot_path).as_posix() for each in revisions for file in each.files}
    if places == {name}:
        strategy = scan.delete_revisions(*(revision.commit_hash for revision in revisions))
        strategy.execute()
        return strategy.expected_freed_size
    # By hand: the scan passes a repository by in which a download was interrupted, and deletes what links lead to.
    root = (_shared() / f"models--{repository.replace('/', '--')}").resolve()
    links = [*root.glob(f"snapshots/*/{escape(name)}")]
    blobs = {each.resolve(): each.stat().st_size for each in links if each.exists()}
    for each in links:
        each.unlink()
    left = {each.resolve() for each in root.glob("snapshots/**/*")}
    gone = {blob: size for blob, size in blobs.items() if blob not in left and blob.is_relative_to(root)}
    for blob in gone:
        blob.unlink(missing_ok=True)
    return sum(gone.values())
